"""Every private torch name that only the proof touches. Read in torch 2.13.0, written for 2.11 and newer."""

from __future__ import annotations

import contextlib
import traceback
from typing import Any
from unittest.mock import patch

import torch

_ALLOCATING = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
)

#: Ops that take a dimension and the places in it, in this order, after the tensor.
_BY_DIM = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("gather", "index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill"),
        *("index_fill_", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    )
)
_INDEX = 2
_BY_TENSORS = frozenset(getattr(torch.ops.aten, name) for name in ("index", "index_put", "index_put_"))


class _Beside(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]  # 2.11 to 2.15
    """A mode under which eager code may compile a part of itself, as flex attention does."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return true: under others torch compiles nothing, and `fullgraph` raises."""
        return True


class Settled(_Beside):  # type: ignore[no-untyped-call]  # as above
    """Settles, one way or the other, what ops leave open: what uninitialised memory holds, how a sort orders equals."""

    def __init__(self, *, other: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._other = other

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, fill what it allocated alone, and put what it sorted into an order that is known."""
        del types
        packet = getattr(func, "overloadpacket", None)
        kwargs = kwargs or {}
        if packet is torch.ops.aten.sort and not kwargs.get("stable") and "values" not in kwargs:
            return _sorted(*args, turned=self._other, **{**kwargs, "stable": True})
        result = func(*args, **kwargs)
        return result.fill_(0.0 if self._other else 1.0) if packet in _ALLOCATING else result


def _sorted(
    tensor: torch.Tensor, dim: int = -1, descending: bool = False, *, stable: bool, turned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort; where turned, what is equal is moved on by one place among its equals, so that no place stays as it was."""
    values, places = torch.sort(tensor, stable=stable, dim=dim, descending=descending)
    count = values.shape[dim] if values.dim() else 0
    if not turned or count == 0:
        return values, places
    is_equal = values.narrow(dim, 1, count - 1) == values.narrow(dim, 0, count - 1)
    edge = torch.zeros_like(values.narrow(dim, 0, 1), dtype=torch.bool)
    here = torch.ones_like(places).cumsum(dim) - 1
    first = torch.where(torch.cat([edge, is_equal], dim), 0, here).cummax(dim).values
    following = torch.where(torch.cat([is_equal, edge], dim), here + 1, first)
    return values, places.gather(dim, following)


class CheckedIndices(_Beside):  # type: ignore[no-untyped-call]  # as above
    """Raises IndexError where an index is out of range: a GPU refuses all further work of the process instead."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the indices, then call `func`."""
        del types
        packet = getattr(func, "overloadpacket", None)
        if packet in _BY_DIM and len(args) > _INDEX:
            _check_index(args[_INDEX], 0, args[0].shape[args[1]] if args[0].dim() else 1)
        elif packet is torch.ops.aten.embedding:
            _check_index(args[1], 0, args[0].shape[0])
        elif packet in _BY_TENSORS:
            dim = 0
            for index in args[1]:
                is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
                if index is not None and not is_mask:
                    _check_index(index, -args[0].shape[dim], args[0].shape[dim])
                dim += index.dim() if is_mask else 1
        return func(*args, **(kwargs or {}))


def _check_index(index: torch.Tensor, least: int, size: int) -> None:
    if index.numel() and not least <= int(index.min()) <= int(index.max()) < size:
        msg = f"an index from {int(index.min())} to {int(index.max())} is out of range for a dimension of size {size}"
        raise IndexError(msg)


def indices_checked(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a wrong index is an IndexError on a type of device, as it is on the CPU by itself."""
    return contextlib.nullcontext() if device == "cpu" else CheckedIndices()  # type: ignore[no-untyped-call]  # as above


def told_that_it_compiles() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `torch.compiler.is_compiling` is true, as it is in a trace."""
    return patch.object(torch.compiler, "_is_compiling_flag", new=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no values."""
    return torch._subclasses.fake_tensor.is_fake(tensor)


def failed_in_exchange(error: Exception) -> bool:
    """Return whether it was a collective that failed: a rank that is gone or late says nothing of a model."""
    names = {frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)}
    return not names.isdisjoint({"torch.distributed.distributed_c10d", "torch.distributed._functional_collectives"})


def is_lost_in_copy(said: str) -> bool:
    """Return whether a failure is that of gradients in a fork of a process that computed some: its threads are gone."""
    return "autograd's threading" in said
