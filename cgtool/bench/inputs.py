"""The arguments of a timed call: the example's own, at another size of a dynamic dimension.

Values are the example's, repeated or cut: token ids stay in range, and every way gets the same ones. They are made
outside of inference mode, since guards of every kind tell inference tensors from others. Imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from cgtool.errors import UsageError
from cgtool.model import DynamicDims, ModelSpec

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def bounds_of(dynamic: DynamicDims) -> dict[str, tuple[int, int | None]]:
    """Return each dynamic dimension's name with its smallest and its largest size."""
    named = (dim for dims in dynamic.values() for dim in dims.values())
    return dict((dim, (1, None)) if isinstance(dim, str) else (dim[0], (dim[1], dim[2])) for dim in named)


def dimension_of(spec: ModelSpec, asked: str | None) -> str | None:
    """Return the dimension that sizes speak of: the one asked for, else the last; None where none is dynamic.

    Raises:
        UsageError: The model has no dynamic dimension of that name.
    """
    known = list(bounds_of(spec.dynamic))
    if asked is None:
        return known[-1] if known else None
    if asked not in known:
        names = ", ".join(known) or "none"
        message = f"The model has no dynamic dimension {asked!r}; it has: {names}. Name one of them with --size-dim."
        raise UsageError(message, path="--size-dim", expected=known, actual=asked)
    return asked


def example(spec: ModelSpec) -> Arguments:
    """Return the arguments of the first example call."""
    return tuple(spec.calls[0].args), dict(spec.calls[0].kwargs)


def resized(spec: ModelSpec, dimension: str | None, size: int) -> Arguments:
    """Return the first example call's arguments with `dimension` at another size.

    Raises:
        UsageError: No dimension is dynamic, or the model bounds it.
    """
    if dimension is None:
        message = f"The model names no dynamic dimension, so it cannot be called at size {size}: leave --tokens out."
        raise UsageError(message, path="--tokens", actual=size)
    least, most = bounds_of(spec.dynamic)[dimension]
    if size < least or (most is not None and size > most):
        message = f"{dimension} lies from {least} to {most or 'no limit'}, and {size} does not. Give another size."
        raise UsageError(message, path="--tokens", expected=[least, most], actual=size)

    def change(tensor: torch.Tensor, dims: Mapping[int, Any]) -> torch.Tensor:
        for index, dim in dims.items():
            if dimension == (dim if isinstance(dim, str) else dim[0]):
                places = torch.arange(size, device=tensor.device) % tensor.shape[index]
                tensor = tensor.index_select(index, places)
        return tensor

    return _changed(spec, change)


def dynamic_tensors(spec: ModelSpec) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the example's tensors that have dynamic dimensions, with those dimensions."""
    found: list[tuple[torch.Tensor, tuple[int, ...]]] = []

    def look(tensor: torch.Tensor, dims: Mapping[int, Any]) -> torch.Tensor:
        found.append((tensor, tuple(dims)))
        return tensor

    _changed(spec, look)
    yield from found


def _changed(spec: ModelSpec, change: Callable[[torch.Tensor, Mapping[int, Any]], torch.Tensor]) -> Arguments:
    args, kwargs = example(spec)
    names = list(inspect.signature(getattr(spec.module, spec.method)).parameters)
    by_place = [spec.dynamic.get(name, {}) for name in names[: len(args)]]
    by_place += [{}] * (len(args) - len(by_place))
    return (
        tuple(change(arg, dims) if dims else arg for arg, dims in zip(args, by_place, strict=True)),
        {name: change(arg, spec.dynamic[name]) if name in spec.dynamic else arg for name, arg in kwargs.items()},
    )
