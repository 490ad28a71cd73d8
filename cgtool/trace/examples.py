"""Prepares example calls for tracing: which variants a call needs, and its tensors at each variant's sizes.

Dynamo specializes sizes 0 and 1, so a dimension that may have these sizes gets variants in which it is fixed. A variant
is a set of fixed dimensions; all others are dynamic and at least 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from cgtool.dims import FIRST_DYNAMIC, Dims, Place
from cgtool.errors import ModelError, UsageError
from cgtool.graph._torch import share_storage
from cgtool.guards._torch import is_view
from cgtool.guards.signature import CallSignature
from cgtool.model import ExampleCall
from cgtool.trace import _torch as private


def variants_of(dims: Dims, passed: Container[str]) -> tuple[Mapping[str, int], ...]:
    """Return the sets of fixed dimensions that together cover every size: {} first, then those with a 0 or a 1.

    Only the dimensions in `passed` count: those of the call, which `sizes_of` returns.
    """
    choices: list[list[tuple[str, int | None]]] = []
    for dim in (dim for name, dim in dims.by_name.items() if name in passed):
        sizes: list[int | None] = []
        if dim.max is None or dim.max >= FIRST_DYNAMIC:
            sizes.append(None)
        sizes += [size for size in (1, 0) if dim.min <= size and (dim.max is None or size <= dim.max)]
        choices.append([(dim.name, size) for size in sizes])
    found = [{name: size for name, size in combo if size is not None} for combo in itertools.product(*choices)]
    return tuple(sorted(found, key=len))


def arguments_for(
    call: ExampleCall,
    signature: CallSignature,
    dims: Dims,
    fixed: Mapping[str, int],
    sizes: Mapping[str, int] | None = None,
) -> tuple[dict[str, Any], list[tuple[torch.Tensor, int, str]]]:
    """Return the call's root locals with its tensors at this variant's sizes, and which of their dims are dynamic.

    Args:
        call: The example.
        signature: The method's.
        dims: All dynamic dimensions.
        fixed: The dimensions that the variant fixes, with their sizes.
        sizes: The sizes of others; by default those of the example, or the nearest allowed size.

    Returns:
        The root locals, and (tensor, dimension, name) of each dynamic dimension.

    Raises:
        ModelError: The example does not match the method, or lacks a named dimension.
    """
    outer = _outer_arguments(call, signature)
    targets = _targets(outer, signature, dims, {**(sizes or {}), **fixed})
    given = [leaf for leaf in private.tree_leaves(outer) if isinstance(leaf, torch.Tensor)]
    marked: list[tuple[torch.Tensor, int, str]] = []
    by_parameter: dict[str, list[Place]] = {}
    for place in dims.places:
        by_parameter.setdefault(place.parameter, []).append(place)
    for parameter, places in by_parameter.items():
        if outer.get(parameter) is None:
            continue
        tensor = outer[parameter]
        if isinstance(tensor, torch.nn.Parameter):
            msg = f"{parameter!r} is a torch.nn.Parameter, whose sizes are fixed for torch. Pass {parameter}.detach()."
            raise ModelError(msg, path=parameter)
        for place in places:
            tensor = _resized(tensor, place.dim, targets[place.name])
        if tensor is outer[parameter] and _is_lone_view(tensor, given):
            tensor = _copied(tensor)
        outer[parameter] = tensor
        marked += [(tensor, place.dim % tensor.dim(), place.name) for place in places if place.name not in fixed]
    args, kwargs = _as_call(outer, signature)
    return signature.bind(args, kwargs), marked


def sizes_of(call: ExampleCall, signature: CallSignature, dims: Dims) -> dict[str, int]:
    """Return {dimension: size} of a call's fully dynamic variant, for each dimension that the call has.

    Raises:
        ModelError: The example does not match the method, or lacks a named dimension.
    """
    return _targets(_outer_arguments(call, signature), signature, dims, {})


def _outer_arguments(call: ExampleCall, signature: CallSignature) -> dict[str, Any]:
    """Return the call's arguments by the names that users see, including those of `**kwargs`."""
    try:
        outer = dict(signature.outer.bind(*call.args, **call.kwargs).arguments)
    except TypeError as error:
        msg = f"The example call {call.name!r} does not match {signature.outer}: {error}. Correct the example."
        raise ModelError(msg, path=call.name) from error
    rest = signature.outer_var_keyword
    return outer if rest is None else {**outer.pop(rest, {}), **outer}


def _as_call(outer: Mapping[str, Any], signature: CallSignature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    bound = signature.outer.bind_partial()
    named = {name: value for name, value in outer.items() if name in signature.outer.parameters}
    bound.arguments.update(named)
    return bound.args, {**bound.kwargs, **{name: value for name, value in outer.items() if name not in named}}


def _targets(
    outer: Mapping[str, Any], signature: CallSignature, dims: Dims, fixed: Mapping[str, int]
) -> dict[str, int]:
    """Return the size of each named dimension in this variant: fixed, that of the example, or the nearest allowed."""
    targets: dict[str, int] = dict(fixed)
    for place in dims.places:
        signature.source(place.parameter)  # refuses an unknown parameter
        tensor = outer.get(place.parameter)
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= place.dim < tensor.dim():
            msg = (
                f"dynamic names dimension {place.dim} of {place.parameter!r}, which the example does not have. "
                "Correct `dynamic` or the example."
            )
            raise ModelError(msg, path=place.parameter)
        if place.name in targets:
            continue
        dim = dims.by_name[place.name]
        size = max(tensor.shape[place.dim], FIRST_DYNAMIC, dim.min)
        targets[place.name] = size if dim.max is None else min(size, dim.max)
    return targets


def _resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return `tensor` with that size in one dimension and the same layout, truncated or repeated."""
    now = tensor.shape[dim]
    if now == size:
        return tensor
    if now == 0:
        shape = list(tensor.shape)
        shape[dim] = size
        return tensor.new_zeros(shape)
    tensor = tensor.detach()
    repeats = -(-size // now)
    longer = torch.cat([tensor] * repeats, dim=dim) if repeats > 1 else tensor
    part = longer.narrow(dim, 0, size)
    return part.new_empty_strided(part.shape, _strides(tensor, part.shape)).copy_(part)


def _is_lone_view(tensor: torch.Tensor, given: Sequence[torch.Tensor]) -> bool:
    """Return whether a tensor is a view, can be copied, and shares its memory with no other argument.

    Dynamo traces the base of a view as an additional input, whose sizes do not follow from the call's.
    """
    if not is_view(tensor) or 0 in tensor.stride():
        return False
    return not any(other is not tensor and share_storage(tensor, other) for other in given)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _strides(tensor: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Return the strides of a tensor of `shape` with the dimension order and the gaps of `tensor`."""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]))
    if tensor.is_contiguous() or 0 in tensor.stride():
        order = list(range(tensor.dim()))[::-1]
        tensor = tensor.contiguous()
    strides = [0] * tensor.dim()
    dense_then = dense_now = 1
    for dim in order:
        step = tensor.stride(dim)
        strides[dim] = dense_now if step == dense_then else max(step, dense_now)
        dense_then, dense_now = step * tensor.shape[dim], strides[dim] * shape[dim]
    return strides


def unique_names(calls: Sequence[ExampleCall]) -> None:
    """Check that no two example calls share a name.

    Raises:
        UsageError: Two do.
    """
    names = [call.name for call in calls]
    if not names:
        msg = "The model spec has no example call; give at least one."
        raise UsageError(msg)
    if len(set(names)) != len(names):
        msg = f"Two example calls have the same name ({', '.join(names)}); name each."
        raise UsageError(msg, actual=names)
