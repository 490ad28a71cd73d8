"""The private torch names that only the proof uses. Verified with torch 2.13.0, written for 2.11 and newer."""

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

#: Ops whose arguments after the tensor are a dimension and the indices in it.
_BY_DIM = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("gather", "index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill"),
        *("index_fill_", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    )
)
_INDEX = 2
_BY_TENSORS = frozenset(getattr(torch.ops.aten, name) for name in ("index", "index_put", "index_put_"))


class _InfraMode(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]  # 2.11 to 2.15
    """A dispatch mode that allows eager code to compile parts of itself, as flex attention does."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return true: under any other mode, torch compiles nothing and `fullgraph` raises."""
        return True


class Settled(_InfraMode):  # type: ignore[no-untyped-call]  # as above
    """Makes undefined results deterministic: the content of uninitialized memory, and the order of equal elements.

    With `other`, they take a second set of values, so that comparing both runs shows which results depend on them.
    """

    def __init__(self, *, other: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._other = other

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`; fill its result if it only allocates, and fix the order of equal elements if it sorts."""
        del types
        packet = getattr(func, "overloadpacket", None)
        kwargs = kwargs or {}
        if packet is torch.ops.aten.sort and not kwargs.get("stable") and "values" not in kwargs:
            return _sort(*args, rotate_equals=self._other, **{**kwargs, "stable": True})
        result = func(*args, **kwargs)
        return result.fill_(0.0 if self._other else 1.0) if packet in _ALLOCATING else result


def _sort(
    tensor: torch.Tensor, dim: int = -1, descending: bool = False, *, stable: bool, rotate_equals: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort; with `rotate_equals`, rotate each group of equal elements by one, so that each of them moves."""
    values, places = torch.sort(tensor, stable=stable, dim=dim, descending=descending)
    count = values.shape[dim] if values.dim() else 0
    if not rotate_equals or count == 0:
        return values, places
    is_equal = values.narrow(dim, 1, count - 1) == values.narrow(dim, 0, count - 1)
    edge = torch.zeros_like(values.narrow(dim, 0, 1), dtype=torch.bool)
    here = torch.ones_like(places).cumsum(dim) - 1
    first = torch.where(torch.cat([edge, is_equal], dim), 0, here).cummax(dim).values
    following = torch.where(torch.cat([is_equal, edge], dim), here + 1, first)
    return values, places.gather(dim, following)


class CheckedIndices(_InfraMode):  # type: ignore[no-untyped-call]  # as above
    """Raises IndexError for an index out of range; on a GPU, it would make the process's CUDA context unusable."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the indices, then call `func`."""
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
    """Return a context in which an index out of range raises IndexError on any device, as it always does on the CPU."""
    return contextlib.nullcontext() if device == "cpu" else CheckedIndices()  # type: ignore[no-untyped-call]  # as above


def told_that_it_compiles() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `torch.compiler.is_compiling()` is true, as in a trace."""
    return patch.object(torch.compiler, "_is_compiling_flag", new=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fake, that is, has no data."""
    return torch._subclasses.fake_tensor.is_fake(tensor)


def failed_in_exchange(error: Exception) -> bool:
    """Return whether a collective failed: a lost or late rank is not a fault of the model."""
    names = {frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)}
    return not names.isdisjoint({"torch.distributed.distributed_c10d", "torch.distributed._functional_collectives"})


def is_lost_in_copy(message: str) -> bool:
    """Return whether an error comes from autograd in a fork, where the parent's autograd threads do not exist."""
    return "autograd's threading" in message
