"""The library's two functions: `load` a model from the cache, and `compile` it, from the cache where it can be.

compile = hit → load, or else miss → warm → load
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

from cgtool.errors import CacheMissError
from cgtool.host import environment, gc_paused
from cgtool.plan.pieces import PieceGraph
from cgtool.runtime.assemble import open_entry
from cgtool.runtime.call import AsModule, LoadedModel
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.factors import Live
from cgtool.runtime.find import Finder
from cgtool.store.layout import CacheLayout, resolve_root
from cgtool.store.lookup import StateStore
from cgtool.store.trust import TrustPolicy

if TYPE_CHECKING:
    from cgtool.compiler.pipeline import WarmResult
    from cgtool.config import CompilationConfig
    from cgtool.model import DynamicDims

_log = logging.getLogger(__name__)

DEFAULT_PREFIX = "backbone"


def load(
    module: Any,
    *,
    config: CompilationConfig | None = None,
    cache_dir: Path | str | None = None,
    prefix: str | None = None,
    rank: int | None = None,
    trusted_keys: Sequence[Path | str] = (),
) -> Callable[..., Any]:
    """Return a callable that runs `module` from what was compiled for it; nothing is traced.

    Entries of the adaptors `aot_inductor` and `eager` open with torch alone. Artifacts of the others import Inductor,
    which on the CPU builds the C++ of its kernels again where torch's own cache folder does not hold them.

    Args:
        module: The model, built and in evaluation mode, or a bound method of it, such as `model.encode`. Its weights
            may be loaded before or after.
        config: What the entry must have been compiled with; None takes the newest entry that fits.
        cache_dir: The cache's root; None takes the configuration's, `CGTOOL_CACHE_DIR` or the user's own.
        prefix: Which compiled part of the model; None takes the name of a bound method, else "backbone".
        rank: Which process of a model-parallel group; None takes the environment's word.
        trusted_keys: Files and folders of public keys, one of which must have signed the entry; none takes the
            configuration's and `CGTOOL_TRUSTED_KEYS`.

    Returns:
        A callable that takes what the model's method takes and returns what it returns.

    Raises:
        CacheMissError: No entry fits; `reasons` says why, the most telling first.
        RefusedError: An entry fits, and is not signed as it must be, or others own it or may write to it.
        CacheCorruptError: What the entry holds differs from its digests.
        CacheSchemaError: The cache was written by another version of cgtool.
        ArtifactError: An artifact cannot be opened here. One that no call has chosen yet is opened by the first that
            does, which raises this then.
        GuardError: A tensor of the model is of another make than when it was compiled.
    """
    if config is not None and _compiles_nothing(config):
        return module  # type: ignore[no-any-return]  # Any: to name its class, torch would have to load
    if environment().disable_cache or (config is not None and config.disable_cache):
        msg = (
            "The cache is switched off (CGTOOL_DISABLE_CACHE or disable_cache), so nothing can be loaded from it. "
            "Switch it on, or call cgtool.compile, which compiles in this process then."
        )
        raise CacheMissError(msg, reasons=("the cache is switched off",))
    wanted_dir = cache_dir if cache_dir is not None else (config.cache_dir or None) if config is not None else None
    module, _, prefix = _part(module, prefix)
    with gc_paused():
        layout = CacheLayout(root=resolve_root(wanted_dir))
        return _load_from(module, config, layout, prefix, rank=rank, trust=TrustPolicy.of(config, trusted_keys))


def _part(module: Any, prefix: str | None) -> tuple[Any, str, str]:
    """Return the model, the method that is compiled, and the prefix: what was handed over may be a bound method."""
    if not isinstance(module, MethodType):
        return module, "forward", prefix or DEFAULT_PREFIX
    method = module.__name__
    default = DEFAULT_PREFIX if method == "forward" else method.strip("_")
    return module.__self__, method, prefix or default


def _compiles_nothing(config: CompilationConfig) -> bool:
    return config.effective_level == config.effective_level.NO_COMPILATION


def _load_from(
    module: Any,
    config: CompilationConfig | None,
    layout: CacheLayout,
    prefix: str,
    *,
    rank: int | None,
    trust: TrustPolicy,
    hash_: str | None = None,
) -> LoadedModel:
    rank = environment().rank if rank is None else rank
    fields = None if config is None else config.leveled().key_fields()
    finder = Finder(layout, module, Live.of(module, config=fields), rank=rank, prefix=prefix, trust=trust)
    found = finder.find() if hash_ is None else finder.at(hash_)
    recheck_calls = config is not None and config.recheck == "call"
    loaded = open_entry(found, module, _open_artifact, recheck_calls=recheck_calls)
    StateStore(layout).record_hit(found.entry.name)
    return loaded


def _open_artifact(adaptor: str, data: bytes, graph: PieceGraph) -> Boxed:
    # Inductor's own artifacts need Inductor: seconds to import, and only for an entry that holds them.
    from cgtool.compiler.adaptors.interface import get_adaptor

    return get_adaptor(adaptor).load(data, graph)


def compile(  # noqa: A001 - the name that a user of torch.compile looks for
    module: Any,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic: DynamicDims | None = None,
    config: CompilationConfig | None = None,
    cache_dir: Path | str | None = None,
    prefix: str | None = None,
) -> Callable[..., Any]:
    """Return a callable that runs `module` compiled: from the cache, or else compiled now and stored there.

    Args:
        module: The model, in evaluation mode, or a bound method of it, such as `model.encode`.
        example_args: Positional arguments of an example call.
        example_kwargs: Keyword arguments of an example call. With neither, the first call's arguments serve, and that
            call waits for the compilation.
        dynamic: Which dimensions change from call to call: parameter → dimension → name, or (name, min, max).
        config: What to compile and how; None takes the defaults and `CGTOOL_*` variables.
        cache_dir: The cache's root; None takes the configuration's, `CGTOOL_CACHE_DIR` or the user's own.
        prefix: Which compiled part of the model; None takes the name of a bound method, else "backbone".

    Returns:
        A callable that takes what the model's forward takes and returns what it returns. At level 0, `module` itself.

    Raises:
        TraceError: The model cannot be traced, or not be kept as data.
        SplitError: The graph cannot be split.
        CompileError: A piece cannot be compiled.
        CacheError: The cache cannot be read or written.
    """
    from cgtool.config import CompilationConfig  # what only loads needs it where it is given one

    config = CompilationConfig.from_variables(environment().variables) if config is None else config
    if _compiles_nothing(config):
        return module  # type: ignore[no-any-return]  # Any: to name its class, torch would have to load
    module, method, prefix = _part(module, prefix)
    maker = _Maker(module, method, dynamic=dynamic or {}, config=config, cache_dir=cache_dir, prefix=prefix)
    if example_args is None and example_kwargs is None:
        return _OnFirstCall(maker)
    return maker.make(tuple(example_args or ()), dict(example_kwargs or {}))


class _Maker:
    """Warms and loads one model."""

    def __init__(
        self,
        module: Any,
        method: str,
        *,
        dynamic: DynamicDims,
        config: CompilationConfig,
        cache_dir: Path | str | None,
        prefix: str,
    ) -> None:
        self.module = module
        self._method = method
        self._dynamic = dynamic
        self._config = config
        self._cache_dir = cache_dir if cache_dir is not None else config.cache_dir or None
        self._prefix = prefix

    def make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LoadedModel:
        """Load the model, warming it for this example first where the cache does not serve it."""
        # A program that only loads needs none of it; Dynamo itself is imported where something has to be traced.
        from cgtool.compiler.pipeline import warm
        from cgtool.model import ExampleCall, ModelSpec

        call = ExampleCall(args=args, kwargs=kwargs)
        spec = ModelSpec(
            module=self.module, calls=(call,), dynamic=self._dynamic, method=self._method, prefix=self._prefix
        )
        if self._config.disable_cache or environment().disable_cache:
            with tempfile.TemporaryDirectory(prefix="cgtool-") as folder:
                return self._load(warm(spec, config=self._config, cache_dir=folder))
        refusing: list[str] = []
        while True:
            result = warm(spec, config=self._config, cache_dir=self._cache_dir, without=refusing)
            loaded = self._load(result)
            # An entry for other sizes may fit all that is known before a call. The next warm looks past it.
            if loaded.serves(args, kwargs) or result.hash in refusing:
                return loaded
            refusing.append(result.hash)

    def _load(self, result: WarmResult) -> LoadedModel:
        layout, trust = CacheLayout(root=result.root), TrustPolicy.of(self._config)
        return _load_from(self.module, self._config, layout, self._prefix, rank=None, trust=trust, hash_=result.hash)


class _OnFirstCall(AsModule):
    """A model that is compiled when it is first called, for that call's arguments."""

    def __init__(self, maker: _Maker) -> None:
        self.module = maker.module
        self._maker = maker
        self._loaded: LoadedModel | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._loaded is None:
            with self._lock:  # a second thread's first call waits for what the first one's makes
                if self._loaded is None:
                    _log.info("Compiling %s for its first call.", type(self._maker.module).__name__)
                    self._loaded = self._maker.make(args, kwargs)
        return self._loaded(*args, **kwargs)

    def recheck(self) -> None:
        """Do what `LoadedModel.recheck` does; before the first call there is nothing to check."""
        if self._loaded is not None:
            self._loaded.recheck()
