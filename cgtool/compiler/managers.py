"""The compilers of one warm: a manager for each adaptor, made when it is first needed, and the chain of adaptors."""

from __future__ import annotations

import threading

from cgtool.compiler.adaptors import get_adaptor
from cgtool.compiler.manager import CompilerManager
from cgtool.compiler.proof import Prover
from cgtool.compiler.workers.pool import WorkerPool
from cgtool.config import EAGER, CompilationConfig
from cgtool.events import OnEvent
from cgtool.store.layout import CacheLayout
from cgtool.store.units import UnitStore

#: What a piece is given to when an adaptor does not take it.
_NEXT = {"aot_inductor": "inductor_standalone"}


def next_adaptor(adaptor: str) -> str | None:
    """Return what a piece is given to when `adaptor` does not take it; None where nothing is left."""
    return None if adaptor == EAGER else _NEXT.get(adaptor, EAGER)


class Managers:
    """Managers by adaptor; any thread may ask.

    Args:
        layout: Where the cache lies.
        config: Where the compiler's options come from.
        on_event: Told when another process is waited for.
        pool: Workers to compile in.
        prover: Runs each unit before it is stored; None stores it without.
    """

    def __init__(
        self,
        layout: CacheLayout,
        config: CompilationConfig,
        *,
        on_event: OnEvent,
        pool: WorkerPool | None = None,
        prover: Prover | None = None,
    ) -> None:
        self._layout = layout
        self._units = UnitStore(layout, allow_shared=config.allow_shared_cache or None)
        self._config = config
        self._on_event = on_event
        self._pool = pool
        self._prover = prover
        self._made: dict[str, CompilerManager] = {}
        self._lock = threading.Lock()

    def get(self, adaptor: str) -> CompilerManager:
        """Return the manager of an adaptor.

        Raises:
            ConfigError: There is no such adaptor.
        """
        with self._lock:
            if adaptor not in self._made:
                compiler = get_adaptor(adaptor)
                compiler.initialize_cache(self._layout.root)
                self._made[adaptor] = CompilerManager(
                    self._units, compiler, self._config, on_event=self._on_event, pool=self._pool, prover=self._prover
                )
            return self._made[adaptor]
