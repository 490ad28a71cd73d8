"""The private torch names that building a model under fake tensors needs; no other module of cgtool.models uses any.

Read in torch 2.13.0; supported from 2.11. `import torch` itself imports `torch._subclasses`. Since 2.14, some fake
tensors are created in C++ and `isinstance` with FakeTensor is no longer reliable, so `is_fake` asks torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cgtool.errors import chain_of

__all__ = [
    "FakeTensorMode",
    "blames_fake_tensors",
    "building_fakes",
    "fake_like",
    "is_fake",
    "new_fake_mode",
    "refer_to_weights",
]

_TORCH: Final = str(Path(torch.__file__).parent) + os.sep
#: Errors that torch raises if code reads the values of fake tensors.
_FAKE_TENSOR_ERRORS: Final[tuple[type[BaseException], ...]] = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.MetadataMismatchError,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedMutationAliasingException,
    fake_tensor.UnsupportedOperatorException,
)

#: Messages of a RuntimeError or AssertionError with the same cause.
_FAKE_TENSOR_MESSAGES: Final[tuple[str, ...]] = (
    "is not supported for tensor subclasses",
    "convert all Tensors to FakeTensors",
    "Cannot access data pointer",
    "data is not allocated yet",
    "FakeTensor",
    "on meta tensors",
    "meta tensor",
)


def refer_to_weights(module: nn.Module) -> None:
    """Update an RNN's weak references to its current weights: it compares them when it is called."""
    if isinstance(module, nn.RNNBase):
        weights = (getattr(module, name, None) for name in module._flat_weights_names)
        module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


def new_fake_mode() -> FakeTensorMode:
    """Return a mode that accepts real tensors: a factory may use constants created when its module was imported."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def building_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Enter a fake mode in which modules can be built as usual, including `module.to(torch.bfloat16)`.

    `nn.Module.to` swaps a fake parameter with its converted copy. torch refuses to swap tensors that have weak
    references, and the mode's own caches hold some to tensors that were filled in place, as initialisation does. The
    tensors of a device mesh hold rank numbers and stay real.
    """
    dispatch = mode.dispatch

    def dispatch_except_for_meshes(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_called_by_a_mesh(sys._getframe(1)):
            return func(*args, **(kwargs or {}))
        return dispatch(func, types, args, kwargs)

    swap = torch.utils.swap_tensors

    def swap_fakes(one: torch.Tensor, other: torch.Tensor) -> None:
        if not (is_fake(one) and is_fake(other)):
            swap(one, other)  # type: ignore[no-untyped-call]  # torch's own gap
            return
        for name in ("__class__", "__dict__"):
            ours, theirs = getattr(one, name), getattr(other, name)
            setattr(one, name, theirs)
            setattr(other, name, ours)
        torch._C._swap_tensor_impl(one, other)

    torch.utils.swap_tensors = swap_fakes
    mode.dispatch = dispatch_except_for_meshes  # type: ignore[method-assign]  # only on this mode, restored below
    try:
        with mode:
            yield
    finally:
        torch.utils.swap_tensors = swap
        del mode.dispatch


def _is_called_by_a_mesh(frame: FrameType | None) -> bool:
    """Return whether the torch frames from here outwards, up to the first other frame, include a device mesh's."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_globals.get("__name__") == "torch.distributed.device_mesh":
            return True
        frame = frame.f_back
    return False


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fake, that is, has no values."""
    return fake_tensor.is_fake(tensor)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake tensor like `tensor`: on `device` if it is a meta tensor, otherwise on its own device."""
    if tensor.device.type != "meta":
        return mode.from_tensor(tensor, static_shapes=True)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def blames_fake_tensors(error: BaseException) -> bool:
    """Return whether `error`, or an error in its chain, was raised because fake tensors have no values."""
    return any(
        isinstance(link, _FAKE_TENSOR_ERRORS) or any(text in str(link) for text in _FAKE_TENSOR_MESSAGES)
        for link in chain_of(error)
    )
