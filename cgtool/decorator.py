"""`@support_torch_compile`: a class of models whose instances run compiled, each from its first call on.

The class keeps its `forward` and its `__call__`, which has a place for what runs instead: an instance is what it was,
with the model's `state_dict`, `eval` and `to`, and where compiling fails nothing is to be undone.
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

#: parameter → one dimension, several, or dimension → name
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
    """Make the instances of a class of models run compiled: from the cache, or compiled at their first call.

    An instance in training mode, or whose level is 0, runs as it is. Subclasses are compiled, too, each instance for
    itself. Several threads may call one instance; the first call of one of them compiles.

    Args:
        cls: The class, where the decorator stands without parentheses.
        dynamic_arg_dims: Which dimensions of the arguments of `forward` change from call to call, counted from either
            end. None takes dimension 0 of every argument that is annotated as a tensor or an optional one. Dimensions
            that have one size in the first call are one dimension; name them in a mapping where they are not.
        config: What to compile and how; None takes the defaults and `CGTOOL_*` variables at the first call.
        cache_dir: The cache's root; None takes the configuration's, `CGTOOL_CACHE_DIR` or the user's own.
        prefix: Which compiled part of the model.
        otherwise: What a call gets that nothing compiled serves: "raise", "eager", "warm" or "background", as
            `cgtool.compile` has them.

    Returns:
        The class, or a decorator.

    Raises:
        UsageError: `forward` has no such argument, or none whose dimension changes.
        ConfigError: `config` is no configuration.

    Source: the decorator of that name in ATOM and vLLM.
    """
    decorate = functools.partial(
        _decorated,
        dynamic=dynamic_arg_dims,
        config=None if config is None else checked_config(config),
        cache_dir=cache_dir,
        prefix=prefix,
        otherwise=otherwise,
    )
    return decorate if cls is None else decorate(cls)


def _decorated(
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
    wanted = _tensor_arguments(cls.forward) if dynamic is None else dynamic
    unknown = set(wanted) - set(inspect.signature(cls.forward).parameters)
    if unknown or not wanted:
        msg = (
            f"{cls.__qualname__}.forward has no argument {', '.join(sorted(unknown)) or 'annotated as a tensor'}: name "
            "the arguments whose sizes change in dynamic_arg_dims."
        )
        raise UsageError(msg, path=cls.__qualname__, actual=sorted(unknown))

    def compiled(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        chosen = CompilationConfig.from_variables(environment().variables) if config is None else config
        if chosen.effective_level == CompilationLevel.NO_COMPILATION:
            return private.eager_call(self)
        waits = otherwise != "background"
        return compile_model(
            self,
            example_args=args if waits else None,
            example_kwargs=kwargs if waits else None,
            dynamic=_named_dims(
                wanted,
                inspect.signature(self.forward).bind(*args, **kwargs).arguments,
                named_by_user=dynamic is not None,
            ),
            config=chosen,
            cache_dir=cache_dir,
            prefix=prefix,
            otherwise=otherwise,
        )

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.training:
            return private.eager_call(self)(*args, **kwargs)
        held = self.__dict__.get(_HELD)
        if held is None or held.of is not self.__dict__:
            with _renewing:  # of several threads, one makes it
                held = self.__dict__.get(_HELD)
                if held is None or held.of is not self.__dict__:
                    held = self.__dict__[_HELD] = _Held(self.__dict__)
        if held.function is None:
            with held.lock:  # a second thread's first call waits for what the first one's makes
                if held.function is None:
                    held.function = compiled(self, args, kwargs)
        return held.function(*args, **kwargs)

    private.call_instead(cls, call)
    changed: Any = cls  # for mypy, which knows no method of a class that is set later
    changed.recheck = _recheck
    return cls


#: The attribute of an instance that holds what it runs.
_HELD = "_cgtool_compiled"
#: Held while an instance gets its `_Held`.
_renewing = ForkedLock()


class _Held:
    """What an instance runs; a copy of the instance starts without, though a shallow one has this in its dict, too.

    Args:
        of: The dict of the instance.
    """

    def __init__(self, of: dict[str, Any] | None = None) -> None:
        self.of = of
        self.lock = ForkedLock()
        self.function: Callable[..., Any] | None = None

    def __reduce__(self) -> tuple[type[_Held], tuple[()]]:
        return _Held, ()


def _recheck(self: nn.Module) -> None:
    """Check every guard on the model and on globals again, after the model was changed on purpose.

    Raises:
        GuardError: Some fact that the model was compiled with no longer holds; the message names it.
    """
    held = self.__dict__.get(_HELD)
    if held is not None and held.of is self.__dict__ and isinstance(held.function, AsModule):
        held.function.recheck()


def _tensor_arguments(forward: Callable[..., Any]) -> dict[str, int]:
    """Return the arguments that are annotated as tensors or optional ones, each with dimension 0."""
    hints = typing.get_type_hints(forward)
    return {name: 0 for name, hint in hints.items() if name != "return" and _is_tensor(hint)}


def _is_tensor(hint: Any) -> bool:
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        return set(typing.get_args(hint)) == {torch.Tensor, type(None)}
    return hint is torch.Tensor


def _check_class(given: Any) -> None:
    if not isinstance(given, type):
        kind = type(given).__qualname__
        msg = f"support_torch_compile is for a class of models, and this is a {kind}: cgtool.compile takes a model."
        raise UsageError(msg, path="cls", expected="type", actual=kind)


def _check_dims(given: Any) -> None:
    form = '{"x": 0}, {"x": [0, 1]} or {"x": {0: "name"}}'
    if not isinstance(given, Mapping):
        raise UsageError(f"dynamic_arg_dims is {given!r}; write {form}.", path="dynamic_arg_dims", actual=given)
    for name, dims in given.items():
        listed = (dims,) if isinstance(dims, int) else dims if isinstance(dims, (Sequence, Mapping)) else (None,)
        if not all(type(dim) is int for dim in listed):
            raise UsageError(f"dynamic_arg_dims[{name!r}] is {dims!r}; write {form}.", path=name, actual=dims)


def _named_dims(wanted: DynamicArgDims, arguments: Mapping[str, Any], *, named_by_user: bool) -> DynamicDims:
    """Return the dimensions that change, by name: those of one size are one dimension, unless they are named."""
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
        if rank == 0 and not named_by_user:
            continue
        for dim in (dims,) if isinstance(dims, int) else dims:
            if not -rank <= dim < rank:
                msg = f"dynamic_arg_dims names dimension {dim} of {argument!r}, which this call's has not. Correct it."
                raise ModelError(msg, path=argument, actual=dim)
            place, size = dim % rank, tensor.shape[dim]
            name = by_size.setdefault(size, f"{argument}_{place}" if by_size else "num_tokens")
            named.setdefault(argument, {})[place] = name
    return named
