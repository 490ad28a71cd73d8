"""The library's two functions: `load` a model from the cache, and `compile` it, from the cache where it can be.

compile = hit → load, or else miss → warm → load
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from cgtool.errors import CacheMissError, CgtoolError, ModelError, UsageError
from cgtool.host import environment, gc_paused
from cgtool.plan.pieces import PieceGraph
from cgtool.runtime.call import LoadedModel
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.factors import Live
from cgtool.runtime.find import Finder, Found, open_entry, rank_here
from cgtool.store.layout import DEFAULT_PREFIX, CacheLayout
from cgtool.store.lookup import StateStore
from cgtool.store.trust import TrustPolicy

if TYPE_CHECKING:
    from cgtool.compiler.pipeline import WarmResult
    from cgtool.config import CompilationConfig
    from cgtool.model import DynamicDims, ModelSpec
    from cgtool.runtime.otherwise import AnyCall, Otherwise

_log = logging.getLogger(__name__)

#: `Otherwise`, which most programs do without.
_OTHERWISE = ("raise", "eager", "warm", "background")


def load(
    module: Any,
    *,
    config: CompilationConfig | None = None,
    cache_dir: Path | str | None = None,
    prefix: str | None = None,
    rank: int | None = None,
    trusted_keys: Sequence[Path | str] = (),
    otherwise: Otherwise = "raise",
    cache: Literal["static"] | None = None,
    cache_length: int | None = None,
) -> Callable[..., Any]:
    """Return a callable that runs `module` from what was compiled for it; nothing is traced.

    Entries of the adaptors `aot_inductor` and `eager` open with torch alone. Artifacts of the others import Inductor,
    which on the CPU builds the C++ of its kernels again where torch's own cache folder does not hold them.

    Args:
        module: The model, built and in evaluation mode, or a bound method of it, such as `model.encode`, or a function.
            Its weights may be loaded before or after.
        config: What the entry must have been compiled with; None takes the newest entry that fits.
        cache_dir: The cache's root; None takes the configuration's, `CGTOOL_CACHE_DIR` or the user's own.
        prefix: Which compiled part of the model; None takes the name of a bound method, else "backbone".
        rank: Which process of a model-parallel group; None takes the environment's word.
        trusted_keys: Files and folders of public keys, one of which must have signed the entry; none takes the
            configuration's and `CGTOOL_TRUSTED_KEYS`.
        otherwise: What a call gets that nothing in the entry serves: "raise" or "eager", as `compile` has them.
        cache: "static" for a causal language model of transformers that was warmed with `--cache static`.
        cache_length: How many tokens its cache holds; None takes the entry that was warmed last.

    Returns:
        A callable that takes what the model's method takes and returns what it returns. With a static cache it is a
        copy of the model that shares its weights: `generate()` on it runs what was compiled.

    Raises:
        UsageError: `otherwise` would have to compile, or there is no such `cache`.
        ConfigError: `config` is no configuration.
        ModelError: It is no model, or none that has such a cache.
        CacheMissError: No entry fits; `reasons` says why, the most telling first.
        RefusedError: An entry fits, and is not signed as it must be, or others own it or may write to it.
        CacheCorruptError: What the entry holds differs from its digests.
        CacheSchemaError: The cache was written by another version of cgtool.
        ArtifactError: An artifact cannot be opened here. One that no call has chosen yet is opened by the first that
            does, which raises this then.
        GuardError: A tensor of the model is of another make than when it was compiled.
        RemoteError: A store that is required fails.
    """
    if config is not None:
        from cgtool.config import checked_config  # most programs give none

        if _compiles_nothing(checked_config(config)):
            return module  # type: ignore[no-any-return]  # Any: to name its class, torch would have to load
    if environment().disable_cache or (config is not None and config.disable_cache):
        msg = (
            "The cache is switched off (CGTOOL_DISABLE_CACHE or disable_cache), so nothing can be loaded from it. "
            "Switch it on, or call cgtool.compile, which compiles in this process then."
        )
        raise CacheMissError(msg, reasons=("the cache is switched off",))
    check_otherwise(otherwise)
    if otherwise not in {"raise", "eager"}:
        msg = f"cgtool.load compiles nothing, so otherwise={otherwise!r} is not for it: call cgtool.compile."
        raise UsageError(msg, path="otherwise", expected=["raise", "eager"], actual=otherwise)
    if cache_dir is None and config is not None:
        cache_dir = config.cache_dir or None
    layout, trust = CacheLayout.at(cache_dir), TrustPolicy.of(config, trusted_keys)
    if cache is not None:
        static = _static_cache(cache)
        step = static.StaticCacheStep(static.checked(module))
        accept = functools.partial(static.length_refused, cache_length)
        with gc_paused():
            place = prefix or static.PREFIX
            loaded = _load_from(step, config, layout, place, rank=rank, trust=trust, accept=accept)
        return static.generating(module, loaded, otherwise)  # type: ignore[no-any-return]  # its module is Any here
    module, method, prefix = _part(module, prefix)
    with gc_paused():
        loaded = _load_from(module, config, layout, prefix, rank=rank, trust=trust)
    return loaded if otherwise == "raise" else _any_call(module, method, otherwise, loaded=loaded)


def _static_cache(cache: str) -> Any:
    """Return the module that knows caches of transformers; a UsageError or a ModelError where there is none."""
    if cache != "static":
        raise UsageError(f"There is no cache {cache!r}. Write cache='static'.", path="cache", actual=cache)
    try:
        from cgtool.runtime import static_cache  # needs transformers, which most programs do without
    except ModuleNotFoundError as error:
        msg = f"A static cache is for models of transformers, and {error.name} is not installed."
        raise ModelError(msg, path="cache") from error
    return static_cache


def check_otherwise(given: object) -> None:
    """Check what was given as `otherwise`.

    Raises:
        UsageError: There is no such way.
    """
    if given not in _OTHERWISE:
        msg = f"otherwise is {given!r}; it is one of {', '.join(map(repr, _OTHERWISE))}."
        raise UsageError(msg, path="otherwise", expected=_OTHERWISE, actual=given)


def _any_call(module: Any, method: str, otherwise: Otherwise, **more: Any) -> AnyCall:
    # Most programs have every other call refused.
    from cgtool.runtime._torch import eager_call
    from cgtool.runtime.otherwise import AnyCall

    own = getattr(module, method)
    return AnyCall(module, eager_call(module) if method == "forward" else own, own.__qualname__, otherwise, **more)


def _example(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an example call; a UsageError where it is written as something else, such as the tensor itself."""
    args, kwargs = () if args is None else args, {} if kwargs is None else kwargs
    if not isinstance(args, (tuple, list)):
        msg = (
            f"example_args is of the type {type(args).__qualname__}. Give a tuple, such as (x,) for the call model(x)."
        )
        raise UsageError(msg, path="example_args", expected="tuple", actual=type(args).__qualname__)
    if not isinstance(kwargs, Mapping):
        kind = type(kwargs).__qualname__
        msg = f'example_kwargs is of the type {kind}. Give a dict, such as {{"x": x}} for the call model(x=x).'
        raise UsageError(msg, path="example_kwargs", expected="dict", actual=kind)
    return tuple(args), dict(kwargs)


def _part(module: Any, prefix: str | None) -> tuple[Any, str, str]:
    """Return the model, the method that is compiled, and the prefix.

    What was handed over may be a bound method, or a function: that is the forward of a model without weights.
    """
    if isinstance(module, FunctionType):
        from cgtool.runtime.function import FunctionModel  # most programs hand over a model

        return FunctionModel(module), "forward", prefix or DEFAULT_PREFIX
    if not isinstance(module, MethodType):
        return _checked(module), "forward", prefix or DEFAULT_PREFIX
    method = module.__name__
    default = DEFAULT_PREFIX if method == "forward" else method.strip("_")
    return _checked(module.__self__), method, prefix or default


def _checked(module: Any) -> nn.Module:
    """Return a model that can be compiled; a ModelError where it cannot."""
    if not isinstance(module, nn.Module):
        why = "cgtool compiles a torch.nn.Module, a method of one, or a function: write a function that calls it"
    elif isinstance(module, torch.jit.ScriptModule):
        why = "TorchScript has its own code, which Dynamo does not trace: hand over the model that it was made from"
    elif "_orig_mod" in module.__dict__.get("_modules", ()):
        why = "torch.compile would compile it once more: hand over the model itself, its _orig_mod"
    elif isinstance(module, nn.parallel.DistributedDataParallel):
        why = "It is for training, and Dynamo does not trace what it does around a call: hand over its module"
    else:
        model: nn.Module = module
        return model
    kind = type(module).__qualname__
    raise ModelError(f"The model is of the type {kind}. {why}.", path="module", actual=kind)


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
    accept: Callable[[Found], tuple[str, ...]] = lambda _: (),
) -> LoadedModel:
    rank = rank_here() if rank is None else rank
    fields = None if config is None else config.leveled().key_fields()
    finder = Finder(layout, module, Live.of(module, config=fields), rank=rank, prefix=prefix, trust=trust)
    try:
        found = finder.find(accept) if hash_ is None else finder.at(hash_)
    except CacheMissError:
        if hash_ is not None or not (environment().variables.get("CGTOOL_REMOTE") or (config and config.remote)):
            raise
        from cgtool.remote.remotes import Remotes  # what is in the cache needs no store

        remotes = Remotes.of(layout, config, trust)
        pulled = remotes.find(lambda: finder.find(accept), finder.lookup, finder.fits, rank=rank, prefix=prefix)
        if pulled is None:
            raise
        found = pulled
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
    otherwise: Otherwise = "raise",
    cache: Literal["static"] | None = None,
    cache_length: int | None = None,
) -> Callable[..., Any]:
    """Return a callable that runs `module` compiled: from the cache, or else compiled now and stored there.

    Args:
        module: The model, in evaluation mode, or a bound method of it, such as `model.encode`, or a function.
        example_args: Positional arguments of an example call.
        example_kwargs: Keyword arguments of an example call. With neither, the first call's arguments serve, and that
            call waits for the compilation.
        dynamic: Which dimensions change from call to call: parameter → dimension → name, or (name, min, max).
        config: What to compile and how; None takes the defaults and `CGTOOL_*` variables.
        cache_dir: The cache's root; None takes the configuration's, `CGTOOL_CACHE_DIR` or the user's own.
        prefix: Which compiled part of the model; None takes the name of a bound method, else "backbone".
        otherwise: What a call gets that nothing compiled serves: "raise", a `GuardError` that says why; "eager", the
            model itself, with one warning for each cause; "warm", a further variant that is compiled now; "background",
            one that is compiled in a thread, and the model itself meanwhile, from the first call on. After eight
            variants the rest runs eagerly. In training mode, and where gradients are asked for, "eager" and
            "background" run the model itself. `cgtool.counters()` has the number of eager calls.
        cache: "static" compiles the decode step of a causal language model of transformers around a static cache;
            example and dynamic dimensions are its own, and `otherwise` is "raise" or "eager".
        cache_length: How many tokens that cache holds, prompt and answer; None: what the model takes, 2048 at most.

    Returns:
        A callable that takes what the model's forward takes and returns what it returns; with a static cache a copy of
        the model, as `load` returns it. At level 0, `module` itself.

    Raises:
        UsageError: The example or `dynamic` is not of that form, there is no such `otherwise`, or a static cache comes
            with one of the three.
        ConfigError: `config` is no configuration.
        ModelError: It is no model, or the example does not fit it.
        TraceError: The model cannot be traced, or not be kept as data.
        SplitError: The graph cannot be split.
        CompileError: A piece cannot be compiled.
        CacheError: The cache cannot be read or written.
        RemoteError: A store that is required fails.
    """
    from cgtool.config import CompilationConfig, checked_config  # what only loads needs it where it is given one

    variables = environment().variables
    config = CompilationConfig.from_variables(variables) if config is None else checked_config(config)
    check_otherwise(otherwise)
    if _compiles_nothing(config):
        return module  # type: ignore[no-any-return]  # Any: to name its class, torch would have to load
    if cache is not None:
        static = _static_cache(cache)
        given = any(value is not None for value in (example_args, example_kwargs, dynamic))
        if given or otherwise not in {"raise", "eager"}:
            msg = "A static cache brings example and dimensions of its own; otherwise= is 'raise' or 'eager' with it."
            raise UsageError(msg, path="cache")
        spec = static.static_cache_spec(static.checked(module), cache_length)
        maker = _Maker(dataclasses.replace(spec, prefix=prefix or spec.prefix), config=config, cache_dir=cache_dir)
        loaded = maker.make((), spec.calls[0].kwargs)
        return static.generating(module, loaded, otherwise)  # type: ignore[no-any-return]  # its module is Any here
    module, method, prefix = _part(module, prefix)
    from cgtool.model import ModelSpec  # a program that only loads does without

    own = getattr(module, method, None)
    spec = ModelSpec(
        module=module,
        calls=(),
        dynamic=dynamic or {},
        method=method,
        prefix=prefix,
        name=own.__qualname__ if isinstance(own, FunctionType) else None,
    )
    maker = _Maker(spec, config=config, cache_dir=cache_dir)
    if example_args is None and example_kwargs is None:
        return _any_call(module, method, otherwise, warm=maker.make)
    loaded = maker.make(*_example(example_args, example_kwargs))
    return loaded if otherwise == "raise" else _any_call(module, method, otherwise, loaded=loaded, warm=maker.make)


class _Maker:
    """Warms and loads one model; the spec's example calls are those that `make` is given."""

    def __init__(self, spec: ModelSpec, *, config: CompilationConfig, cache_dir: Path | str | None) -> None:
        method = getattr(spec.module, spec.method, None)
        self.name = spec.name or str(getattr(method, "__qualname__", type(spec.module).__name__))
        self._spec = spec
        self._config = config
        self._cache_dir = cache_dir if cache_dir is not None else config.cache_dir or None

    def make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LoadedModel:
        """Load the model, warming it for this example first where the cache does not serve it."""
        # A program that only loads needs none of it; Dynamo itself is imported where something has to be traced.
        from cgtool.model import ExampleCall

        spec = dataclasses.replace(self._spec, calls=(ExampleCall(args=args, kwargs=kwargs),))
        if self._config.disable_cache or environment().disable_cache:
            with tempfile.TemporaryDirectory(prefix="cgtool-") as folder:
                return self._load(self._warmed(spec, folder))
        refusing: list[str] = []
        while True:
            result = self._warmed(spec, self._cache_dir, refusing)
            loaded = self._load(result)
            if result.compiled or not result.hit:
                self._hand_on(result)
            # An entry for other sizes may fit all that is known before a call. The next warm looks past it.
            if loaded.serves(args, kwargs) or result.hash in refusing:
                return loaded
            refusing.append(result.hash)

    def _warmed(self, spec: ModelSpec, cache_dir: Path | str | None, without: Sequence[str] = ()) -> WarmResult:
        from cgtool.compiler.pipeline import warm
        from cgtool.events import told_while_waiting

        with told_while_waiting(self.name) as tell:
            result = warm(spec, config=self._config, cache_dir=cache_dir, without=without, on_event=tell)
        if not result.hit:
            for note in result.notes:
                _log.warning("%s: %s", self.name, note)
        return result

    def _hand_on(self, result: WarmResult) -> None:
        """Push what was made: in a thread, which the calls need not wait for and the end of the process does."""
        from cgtool.remote.remotes import Remotes  # what a hit does without

        remotes = Remotes.of(CacheLayout(root=result.root), self._config, TrustPolicy.of(self._config))

        def push() -> None:
            try:
                remotes.push(result.manifest.name)
            except CgtoolError as error:
                _log.warning("%s was not pushed: %s", self.name, error)

        if remotes.required:
            remotes.push(result.manifest.name)
        elif remotes.urls and not remotes.readonly:
            threading.Thread(target=push, name="cgtool-push", daemon=False).start()

    def _load(self, result: WarmResult) -> LoadedModel:
        layout, trust = CacheLayout(root=result.root), TrustPolicy.of(self._config)
        module, prefix = self._spec.module, self._spec.prefix
        return _load_from(module, self._config, layout, prefix, rank=None, trust=trust, hash_=result.hash)
