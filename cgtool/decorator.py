"""`@support_torch_compile`: a class decorator whose instances run compiled from their first call on.

The class keeps its `forward`; `__call__` runs the compiled function. `state_dict`, `eval` and `to` of an instance work
as before, and a failed compilation leaves nothing to undo.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn

from cgtool.api import check_otherwise
from cgtool.api import compile as compile_model
from cgtool.config import CompilationConfig, checked_config
from cgtool.config_values import CompilationLevel
from cgtool.errors import ModelError, UsageError
from cgtool.host import environment
from cgtool.model import DynamicDims
from cgtool.runtime import _torch as private
from cgtool.runtime.call import AsModule
from cgtool.runtime.otherwise import Otherwise
from cgtool.store.layout import DEFAULT_PREFIX
from cgtool.threads import ForkedLock

_Class = TypeVar("_Class", bound=type[nn.Module])

#: parameter → one dimension, several dimensions, or a mapping of dimension to name
DynamicArgDims = Mapping[str, int | Sequence[int] | Mapping[int, Any]]


@overload
def support_torch_compile(cls: _Class, /) -> _Class: ...


@overload
def support_torch_compile(
    *,
    dynamic_arg_dims: DynamicArgDims | None = None,
    config: CompilationConfig | None = None,
    cache_dir: Path | str | None = None,
    prefix: str = DEFAULT_PREFIX,
    otherwise: Otherwise = "raise",
) -> Callable[[_Class], _Class]: ...


def support_torch_compile(
    cls: type[nn.Module] | None = None,
    /,
    *,
    dynamic_arg_dims: DynamicArgDims | None = None,
    config: CompilationConfig | None = None,
    cache_dir: Path | str | None = None,
    prefix: str = DEFAULT_PREFIX,
    otherwise: Otherwise = "raise",
) -> Any:
    """Decorate a class of models so that its instances run compiled.

    The first call of an instance loads it from the cache, or compiles it. Instances of subclasses are compiled, too.
    In training mode and at level 0 an instance runs eagerly. Several threads may call one instance; the first call
    compiles and the others wait for it.

    Args:
        cls: The class, if the decorator is used without parentheses.
        dynamic_arg_dims: The dimensions of `forward`'s arguments that change from call to call; negative ones count
            from the end. None takes dimension 0 of every argument that is annotated as a tensor or an optional
            tensor. Dimensions of equal size in the first call are one dimension; to tell them apart, name them in a
            mapping.
        config: What to compile and how. Defaults to the `CGTOOL_*` variables at the first call and built-in defaults.
        cache_dir: The root of the cache. Defaults to the configuration's `cache_dir`, then `CGTOOL_CACHE_DIR`, then
            the user's cache folder.
        prefix: The compiled part of the model.
        otherwise: What to do with a call that no compiled variant covers: "raise", "eager", "warm" or "background",
            as for `cgtool.compile`.

    Returns:
        The class, or a decorator.

    Raises:
        UsageError: `forward` has no argument of that name, or no argument with a dynamic dimension.
        ConfigError: `config` is not a `CompilationConfig`.

    Source: the decorator of the same name in ATOM and vLLM.
    """
    decorate = functools.partial(
        _decorate,
        dynamic=dynamic_arg_dims,
        config=None if config is None else checked_config(config),
        cache_dir=cache_dir,
        prefix=prefix,
        otherwise=otherwise,
    )
    return decorate if cls is None else decorate(cls)


def _decorate(
    cls: type[nn.Module],
    *,
    dynamic: DynamicArgDims | None,
    config: CompilationConfig | None,
    cache_dir: Path | str | None,
    prefix: str,
    otherwise: Otherwise,
) -> type[nn.Module]:
    check_otherwise(otherwise)
    _check_class(cls)
    if dynamic is not None:
        _check_dims(dynamic)
    dims = _tensor_arguments(cls.forward) if dynamic is None else dynamic
    unknown = set(dims) - set(inspect.signature(cls.forward).parameters)
    if unknown or not dims:
        msg = (
            f"{cls.__qualname__}.forward has no argument {', '.join(sorted(unknown)) or 'annotated as a tensor'}. Name "
            "the arguments whose sizes change in dynamic_arg_dims."
        )
        raise UsageError(msg, path=cls.__qualname__, actual=sorted(unknown))

    def compile_instance(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        effective = CompilationConfig.from_variables(environment().variables) if config is None else config
        if effective.effective_level == CompilationLevel.NO_COMPILATION:
            return private.eager_call(self)
        waits = otherwise != "background"
        return compile_model(
            self,
            example_args=args if waits else None,
            example_kwargs=kwargs if waits else None,
            dynamic=_name_dims(
                dims,
                inspect.signature(self.forward).bind(*args, **kwargs).arguments,
                are_explicit=dynamic is not None,
            ),
            config=effective,
            cache_dir=cache_dir,
            prefix=prefix,
            otherwise=otherwise,
        )

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.training:
            return private.eager_call(self)(*args, **kwargs)
        compiled = _compiled_of(self)
        if compiled is None:
            with _creating:
                compiled = _compiled_of(self)
                if compiled is None:
                    compiled = self.__dict__[_ATTRIBUTE] = _Compiled(self.__dict__)
        if compiled.function is None:
            with compiled.lock:
                if compiled.function is None:
                    compiled.function = compile_instance(self, args, kwargs)
        return compiled.function(*args, **kwargs)

    private.call_instead(cls, call)
    decorated: Any = cls  # mypy does not allow a new attribute on a class
    decorated.recheck = _recheck
    return cls


#: The attribute of an instance that holds its `_Compiled`.
_ATTRIBUTE = "_cgtool_compiled"
#: Held while an instance gets its `_Compiled`.
_creating = ForkedLock()


class _Compiled:
    """The compiled function of one instance.

    A copy of the instance starts without one. A shallow copy shares this object in its `__dict__`, which `owner` shows.

    Args:
        owner: The `__dict__` of the instance.
    """

    def __init__(self, owner: dict[str, Any] | None = None) -> None:
        self.owner = owner
        self.lock = ForkedLock()
        self.function: Any = None

    def __reduce__(self) -> tuple[type[_Compiled], tuple[()]]:
        return _Compiled, ()


def _compiled_of(module: nn.Module) -> _Compiled | None:
    compiled = module.__dict__.get(_ATTRIBUTE)
    return compiled if compiled is not None and compiled.owner is module.__dict__ else None


def _recheck(self: nn.Module) -> None:
    """Check every guard on the model and on globals again, after the model was changed on purpose.

    Raises:
        GuardError: The model or a global differs from what was compiled; the message names it.
    """
    compiled = _compiled_of(self)
    if compiled is not None and isinstance(compiled.function, AsModule):
        compiled.function.recheck()


def _tensor_arguments(forward: Callable[..., Any]) -> dict[str, int]:
    """Return the arguments that are annotated as tensors or optional tensors, each with dimension 0."""
    hints = typing.get_type_hints(forward)
    return {name: 0 for name, hint in hints.items() if name != "return" and _is_tensor(hint)}


def _is_tensor(hint: Any) -> bool:
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        return set(typing.get_args(hint)) == {torch.Tensor, type(None)}
    return hint is torch.Tensor


def _check_class(cls: Any) -> None:
    if not isinstance(cls, type):
        kind = type(cls).__qualname__
        msg = f"support_torch_compile decorates a class of models, not {kind}: call cgtool.compile to compile a model."
        raise UsageError(msg, path="cls", expected="type", actual=kind)


def _check_dims(dynamic: Any) -> None:
    if not isinstance(dynamic, Mapping):
        msg = f'dynamic_arg_dims must be {{"x": 0}}, {{"x": [0, 1]}} or {{"x": {{0: "name"}}}}, not {dynamic!r}.'
        raise UsageError(msg, path="dynamic_arg_dims", actual=dynamic)
    for name, dims in dynamic.items():
        listed = (dims,) if isinstance(dims, int) else dims if isinstance(dims, (Sequence, Mapping)) else (None,)
        if not all(type(dim) is int for dim in listed):
            msg = f'dynamic_arg_dims[{name!r}] must be 0, [0, 1] or {{0: "name"}}, not {dims!r}.'
            raise UsageError(msg, path=name, actual=dims)


def _name_dims(wanted: DynamicArgDims, arguments: Mapping[str, Any], *, are_explicit: bool) -> DynamicDims:
    """Name the dynamic dimensions. Unnamed dimensions of equal size share a name."""
    by_size: dict[int, str] = {}
    named: dict[str, dict[int, Any]] = {}
    for argument, dims in wanted.items():
        tensor = arguments.get(argument)
        if tensor is None:
            continue
        if isinstance(dims, Mapping):
            named[argument] = dict(dims)
            continue
        rank = tensor.dim() if isinstance(tensor, torch.Tensor) else 0
        if rank == 0 and not are_explicit:
            continue
        for dim in (dims,) if isinstance(dims, int) else dims:
            if not -rank <= dim < rank:
                msg = (
                    f"dynamic_arg_dims names dimension {dim} of {argument!r}, but the argument of this call has "
                    f"{rank} dimensions. Correct dynamic_arg_dims."
                )
                raise ModelError(msg, path=argument, actual=dim)
            place, size = dim % rank, tensor.shape[dim]
            name = by_size.setdefault(size, f"{argument}_{place}" if by_size else "num_tokens")
            named.setdefault(argument, {})[place] = name
    return named
