"""`load` and `compile`: the library's two entry points.

`load` never traces or compiles. `compile` loads on a cache hit; on a miss it warms the cache first.
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
from cgtool.runtime.call import AsModule, LoadedModel
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.factors import Live
from cgtool.runtime.find import Finder, MatchedEntry, open_entry, rank_here
from cgtool.store.layout import DEFAULT_PREFIX, CacheLayout
from cgtool.store.lookup import StateStore
from cgtool.store.trust import TrustPolicy

if TYPE_CHECKING:
    from cgtool.compiler.pipeline import WarmResult
    from cgtool.config import CompilationConfig
    from cgtool.model import DynamicDims, ModelSpec
    from cgtool.runtime.otherwise import AnyCall, Otherwise

_log = logging.getLogger(__name__)

#: The values of `cgtool.runtime.otherwise.Otherwise`; that module is rarely needed, so it is imported lazily.
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
    """Load a compiled model from the cache, without tracing or compiling.

    Artifacts of the adaptors `aot_inductor` and `eager` load with torch alone. Artifacts of other adaptors import
    Inductor, which on the CPU rebuilds its C++ kernels if torch's own cache folder does not hold them.

    Args:
        module: The model, built and in evaluation mode, a bound method of it such as `model.encode`, or a function.
            Weights may be loaded before or after this call.
        config: The configuration the entry must have been compiled with. None accepts the newest matching entry.
        cache_dir: The root of the cache. Defaults to the configuration's `cache_dir`, then `CGTOOL_CACHE_DIR`, then
            the user's cache folder.
        prefix: The compiled part of the model. Defaults to the name of a bound method, else "backbone".
        rank: The rank in the model-parallel group. Defaults to the rank in the environment.
        trusted_keys: Files and folders of public keys, one of which must have signed the entry. Defaults to the
            configuration's `trusted_keys`, then `CGTOOL_TRUSTED_KEYS`.
        otherwise: What to do with a call that the entry does not cover: "raise" or "eager", as for `compile`.
        cache: "static" for a transformers causal language model warmed with `--cache static`.
        cache_length: The length of the static cache, in tokens. None takes the entry that was warmed last.

    Returns:
        A callable with the signature and return value of the model's method. With a static cache, a copy of the
        model that shares its weights and whose `generate()` runs the compiled code.

    Raises:
        UsageError: `otherwise` would require compiling, or `cache` is unknown.
        ConfigError: `config` is not a `CompilationConfig`.
        ModelError: `module` cannot be compiled, or does not support a static cache.
        CacheMissError: No entry matches; `reasons` lists why, most relevant first.
        RefusedError: An entry matches but is not trusted: it lacks a required signature, or other users own it or
            can write to it.
        CacheCorruptError: The entry's files do not match their digests.
        CacheSchemaError: The cache was written by another version of cgtool.
        ArtifactError: An artifact cannot be opened on this machine. Artifacts are opened on first use, so a later
            call may raise this, too.
        GuardError: A tensor of the model had a different dtype, shape or layout when it was compiled.
        RemoteError: A required remote store failed.
    """
    if config is not None:
        from cgtool.config import checked_config  # imported lazily: most programs pass none

        if _compiles_nothing(checked_config(config)):
            return module  # type: ignore[no-any-return]
    if environment().disable_cache or (config is not None and config.disable_cache):
        msg = (
            "The cache is switched off (CGTOOL_DISABLE_CACHE or disable_cache), so there is nothing to load. Switch "
            "it on, or call cgtool.compile, which then compiles in this process."
        )
        raise CacheMissError(msg, reasons=("the cache is switched off",))
    check_otherwise(otherwise)
    if otherwise not in {"raise", "eager"}:
        msg = f"cgtool.load never compiles, so it does not support otherwise={otherwise!r}. Call cgtool.compile."
        raise UsageError(msg, path="otherwise", expected=["raise", "eager"], actual=otherwise)
    if cache_dir is None and config is not None:
        cache_dir = config.cache_dir or None
    layout, trust = CacheLayout.at(cache_dir), TrustPolicy.of(config, trusted_keys)
    if cache is not None:
        static = _static_cache(cache)
        step = static.StaticCacheStep(static.check_model(module))
        accept = functools.partial(static.length_mismatch, cache_length)
        prefix = prefix or static.PREFIX
        with gc_paused():
            loaded = _load_from(step, config, layout, prefix, rank=rank, trust=trust, accept=accept)
        return static.with_compiled_step(module, loaded, otherwise)  # type: ignore[no-any-return]  # `static` is Any
    module, method, prefix = _resolve_method(module, prefix)
    with gc_paused():
        loaded = _load_from(module, config, layout, prefix, rank=rank, trust=trust)
    return loaded if otherwise == "raise" else _with_fallback(module, method, otherwise, loaded=loaded)


def check_otherwise(otherwise: object) -> None:
    """Raise a `UsageError` unless `otherwise` is one of the values of `Otherwise`."""
    if otherwise not in _OTHERWISE:
        msg = f"otherwise must be one of {', '.join(map(repr, _OTHERWISE))}, not {otherwise!r}."
        raise UsageError(msg, path="otherwise", expected=_OTHERWISE, actual=otherwise)


def _static_cache(cache: str) -> Any:
    """Import `cgtool.runtime.static_cache`, which needs transformers."""
    if cache != "static":
        raise UsageError(f"There is no cache {cache!r}. Write cache='static'.", path="cache", actual=cache)
    try:
        from cgtool.runtime import static_cache
    except ModuleNotFoundError as error:
        msg = f"A static cache is for models of transformers, and {error.name} is not installed. Install it."
        raise ModelError(msg, path="cache") from error
    return static_cache


def _with_fallback(module: Any, method: str, otherwise: Otherwise, **options: Any) -> AnyCall:
    # imported lazily: otherwise="raise" is the common case
    from cgtool.runtime._torch import eager_call
    from cgtool.runtime.otherwise import AnyCall

    bound = getattr(module, method)
    eager = eager_call(module) if method == "forward" else bound
    return AnyCall(module, eager, bound.__qualname__, otherwise, **options)


def _check_example(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example call, or raise a UsageError, for instance where a tensor stands in place of the tuple."""
    args, kwargs = () if args is None else args, {} if kwargs is None else kwargs
    if not isinstance(args, (tuple, list)):
        kind = type(args).__qualname__
        msg = f"example_args must be a tuple, such as (x,) for the call model(x), not {kind}."
        raise UsageError(msg, path="example_args", expected="tuple", actual=kind)
    if not isinstance(kwargs, Mapping):
        kind = type(kwargs).__qualname__
        msg = f'example_kwargs must be a dict, such as {{"x": x}} for the call model(x=x), not {kind}.'
        raise UsageError(msg, path="example_kwargs", expected="dict", actual=kind)
    return tuple(args), dict(kwargs)


def _resolve_method(module: Any, prefix: str | None) -> tuple[Any, str, str]:
    """Return the model, the name of the method to compile, and the prefix.

    A function is compiled as the `forward` of a model without weights.
    """
    if isinstance(module, FunctionType):
        from cgtool.runtime.function import FunctionModel  # imported lazily: most programs pass a model

        return FunctionModel(module), "forward", prefix or DEFAULT_PREFIX
    if not isinstance(module, MethodType):
        return _check_module(module), "forward", prefix or DEFAULT_PREFIX
    method = module.__name__
    default = DEFAULT_PREFIX if method == "forward" else method.strip("_")
    return _check_module(module.__self__), method, prefix or default


def _check_module(module: Any) -> nn.Module:
    if isinstance(module, AsModule):
        advice = "It is compiled already: pass the model itself, its module"
    elif not isinstance(module, nn.Module):
        advice = "cgtool compiles a torch.nn.Module, a method of one, or a function: wrap it in a function"
    elif isinstance(module, torch.jit.ScriptModule):
        advice = "Dynamo does not trace TorchScript: pass the model that it was made from"
    elif "_orig_mod" in module.__dict__.get("_modules", ()):
        advice = "torch.compile would compile it again: pass the model itself, its _orig_mod"
    elif isinstance(module, nn.parallel.DistributedDataParallel):
        advice = "It is for training, and Dynamo does not trace what it does around a call: pass its module"
    else:
        model: nn.Module = module
        return model
    kind = type(module).__qualname__
    raise ModelError(f"The model is a {kind}. {advice}.", path="module", actual=kind)


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
    accept: Callable[[MatchedEntry], tuple[str, ...]] = lambda _: (),
) -> LoadedModel:
    rank = rank_here() if rank is None else rank
    fields = None if config is None else config.leveled().key_fields()
    finder = Finder(layout, module, Live.of(module, config=fields), rank=rank, prefix=prefix, trust=trust)
    try:
        found = finder.find(accept) if hash_ is None else finder.at(hash_)
    except CacheMissError:
        if hash_ is not None or not (environment().variables.get("CGTOOL_REMOTE") or (config and config.remote)):
            raise
        from cgtool.remote.remotes import Remotes  # imported lazily: a hit needs no remote store

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
    # Artifacts of Inductor's own adaptors import Inductor, which takes seconds.
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
    """Compile a model, or load it from the cache if it was compiled before.

    Args:
        module: The model, in evaluation mode, a bound method of it such as `model.encode`, or a function.
        example_args: Positional arguments of an example call.
        example_kwargs: Keyword arguments of an example call. If neither is passed, the first call is the example and
            waits for the compilation.
        dynamic: The dimensions that change from call to call: parameter → dimension → name, or (name, min, max).
        config: What to compile and how. Defaults to the `CGTOOL_*` variables and built-in defaults.
        cache_dir: The root of the cache. Defaults to the configuration's `cache_dir`, then `CGTOOL_CACHE_DIR`, then
            the user's cache folder.
        prefix: The compiled part of the model. Defaults to the name of a bound method, else "backbone".
        otherwise: What to do with a call that no compiled variant covers. "raise" raises a `GuardError` with the
            reason; "eager" runs the model itself and warns once per cause; "warm" compiles another variant first;
            "background" compiles it in a thread and runs the model itself meanwhile, from the first call on. After
            eight variants, further calls run eagerly. "eager" and "background" also run the model itself in training
            mode and when gradients are required. `cgtool.counters()` counts eager calls.
        cache: "static" compiles the decode step of a transformers causal language model around a static cache. It
            defines its own example and dynamic dimensions, and supports `otherwise` "raise" and "eager".
        cache_length: The length of the static cache in tokens, prompt and answer together. Defaults to the model's
            limit, at most 2048.

    Returns:
        A callable with the signature and return value of the model's method. With a static cache, a copy of the
        model, as for `load`. At level 0, `module` itself.

    Raises:
        UsageError: The example, `dynamic` or `otherwise` is malformed, or is combined with a static cache that does
            not support it.
        ConfigError: `config` is not a `CompilationConfig`.
        ModelError: `module` cannot be compiled, or the example does not fit it.
        TraceError: The model cannot be traced, or the trace cannot be stored as data.
        SplitError: The graph cannot be split.
        CompileError: A piece cannot be compiled.
        CacheError: The cache cannot be read or written.
        RemoteError: A required remote store failed.
    """
    from cgtool.config import CompilationConfig, checked_config  # imported lazily: `load` rarely needs it

    variables = environment().variables
    config = CompilationConfig.from_variables(variables) if config is None else checked_config(config)
    check_otherwise(otherwise)
    if _compiles_nothing(config):
        return module  # type: ignore[no-any-return]
    if cache is not None:
        static = _static_cache(cache)
        has_example = any(value is not None for value in (example_args, example_kwargs, dynamic))
        if has_example or otherwise not in {"raise", "eager"}:
            msg = (
                "A static cache defines its own example and dynamic dimensions, and supports otherwise='raise' and "
                "'eager' only. Leave the other arguments out."
            )
            raise UsageError(msg, path="cache")
        spec = static.static_cache_spec(static.check_model(module), cache_length)
        warmer = _Warmer(dataclasses.replace(spec, prefix=prefix or spec.prefix), config=config, cache_dir=cache_dir)
        loaded = warmer.load((), spec.calls[0].kwargs)
        return static.with_compiled_step(module, loaded, otherwise)  # type: ignore[no-any-return]  # `static` is Any
    module, method, prefix = _resolve_method(module, prefix)
    from cgtool.model import ModelSpec  # imported lazily: `load` does not need it

    bound = getattr(module, method, None)
    spec = ModelSpec(
        module=module,
        calls=(),
        dynamic=dynamic or {},
        method=method,
        prefix=prefix,
        name=bound.__qualname__ if isinstance(bound, FunctionType) else None,
    )
    warmer = _Warmer(spec, config=config, cache_dir=cache_dir)
    if example_args is None and example_kwargs is None:
        return _with_fallback(module, method, otherwise, warm=warmer.load)
    loaded = warmer.load(*_check_example(example_args, example_kwargs))
    if otherwise == "raise":
        return loaded
    return _with_fallback(module, method, otherwise, loaded=loaded, warm=warmer.load)


class _Warmer:
    """Warms and loads one model; `load` supplies the example calls that `spec` lacks."""

    def __init__(self, spec: ModelSpec, *, config: CompilationConfig, cache_dir: Path | str | None) -> None:
        method = getattr(spec.module, spec.method, None)
        self.name = spec.name or str(getattr(method, "__qualname__", type(spec.module).__name__))
        self._spec = spec
        self._config = config
        self._cache_dir = cache_dir if cache_dir is not None else config.cache_dir or None

    def load(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LoadedModel:
        """Load the model; on a cache miss, warm it for this example call first."""
        from cgtool.model import ExampleCall

        spec = dataclasses.replace(self._spec, calls=(ExampleCall(args=args, kwargs=kwargs),))
        if self._config.disable_cache or environment().disable_cache:
            with tempfile.TemporaryDirectory(prefix="cgtool-") as folder:
                return self._open(self._warm(spec, folder))
        rejected: list[str] = []
        while True:
            result = self._warm(spec, self._cache_dir, rejected)
            loaded = self._open(result)
            if result.compiled or not result.hit:
                self._push(result)
            # An entry for other sizes can match everything that is known before the call; then warm again without it.
            if loaded.serves(args, kwargs) or result.hash in rejected:
                return loaded
            rejected.append(result.hash)

    def _warm(self, spec: ModelSpec, cache_dir: Path | str | None, without: Sequence[str] = ()) -> WarmResult:
        from cgtool.compiler.pipeline import warm
        from cgtool.events import show_progress

        with show_progress(self.name) as on_event:
            result = warm(spec, config=self._config, cache_dir=cache_dir, without=without, on_event=on_event)
        if not result.hit:
            for note in result.notes:
                _log.warning("%s: %s", self.name, note)
        return result

    def _push(self, result: WarmResult) -> None:
        """Push the entry, in a thread that calls do not wait for but the end of the process does."""
        from cgtool.remote.remotes import Remotes  # imported lazily: a hit does not need it

        remotes = Remotes.of(CacheLayout(root=result.root), self._config, TrustPolicy.of(self._config))

        def push() -> None:
            try:
                remotes.push(result.manifest.name)
            except CgtoolError as error:
                _log.warning("%s could not be pushed: %s", self.name, error)

        if remotes.required:
            remotes.push(result.manifest.name)
        elif remotes.urls and not remotes.readonly:
            threading.Thread(target=push, name="cgtool-push", daemon=False).start()

    def _open(self, result: WarmResult) -> LoadedModel:
        layout, trust = CacheLayout(root=result.root), TrustPolicy.of(self._config)
        module, prefix = self._spec.module, self._spec.prefix
        return _load_from(module, self._config, layout, prefix, rank=None, trust=trust, hash_=result.hash)
