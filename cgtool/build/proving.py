"""The proof as a warm uses it: one child for all artifacts, started with the first compile."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from cgtool.build.adaptors.interface import CompilerInterface
from cgtool.build.proof import Prover
from cgtool.build.workers.modules import imports_for
from cgtool.build.workers.unit import StaysHereError
from cgtool.pieces import PieceGraph


class Proof:
    """Proves the artifacts of one warm; any thread may ask.

    Args:
        timeout_secs: How long one proof may take; None is no limit.
        device_index: The device that pieces run on, where they run on an accelerator; None is the current one.
    """

    def __init__(self, *, timeout_secs: float | None, device_index: int | None) -> None:
        self._prover = Prover(timeout_secs=timeout_secs, device_index=device_index)
        self._is_started = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._prover.close()

    def start(self) -> None:
        """Start the child without waiting for it; once is enough."""
        with self._lock:
            begin, self._is_started = not self._is_started, True
        if begin:
            self._prover.start()

    def prove(
        self, data: bytes, *, adaptor: CompilerInterface, graph: PieceGraph, guards: tuple[str, ...]
    ) -> str | None:
        """Run an artifact and compare it with its piece.

        Returns:
            None where it was proved, else why it could not be.

        Raises:
            ProofMismatchError: The artifact does not give what the piece gives.
            ProofCrashError: The child died, or did not end in time.
        """
        try:
            imports = imports_for(graph.ops, adaptor)
        except StaysHereError as reason:
            return f"not proved: {reason}"
        return self._prover.prove(data, adaptor=adaptor.name, graph=graph, guards=guards, imports=imports).reason
