"""The private torch names that building a model under fake tensors needs; nothing else of cgtool.models touches any.

Read in torch 2.13.0; supported from 2.11. `torch._subclasses` is loaded by `import torch` itself. From 2.14 some fake
tensors are made in C++, so that `isinstance` with FakeTensor no longer tells: `is_fake` asks torch.
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
#: What fake tensors raise when something asks for values that they do not have.
_BLAMES: Final[tuple[type[BaseException], ...]] = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.MetadataMismatchError,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedMutationAliasingException,
    fake_tensor.UnsupportedOperatorException,
)

#: The same where torch raises a plain RuntimeError or AssertionError.
_BLAMING_TEXTS: Final[tuple[str, ...]] = (
    "is not supported for tensor subclasses",
    "convert all Tensors to FakeTensors",
    "Cannot access data pointer",
    "data is not allocated yet",
    "FakeTensor",
    "on meta tensors",
    "meta tensor",
)


def refer_to_weights(module: nn.Module) -> None:
    """Let an RNN's weak references be to the weights that it has now, whose replacement it would see at a call."""
    if isinstance(module, nn.RNNBase):
        weights = (getattr(module, name, None) for name in module._flat_weights_names)
        module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


def new_fake_mode() -> FakeTensorMode:
    """Return a mode that takes real tensors along: a factory may use constants made when its module was imported."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def building_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Enter a mode in which modules can be built as ever: `module.to(torch.bfloat16)` converts fake parameters, too.

    `nn.Module.to` swaps a fake parameter with its converted copy, which torch refuses for what has weak references; the
    mode's own caches have some to what was filled in place, as initialisation does. The tensors of a device mesh are
    numbers of ranks, and stay real.
    """
    dispatch = mode.dispatch

    def dispatch_but_ranks(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    mode.dispatch = dispatch_but_ranks  # type: ignore[method-assign]  # of this mode alone, and taken back below
    try:
        with mode:
            yield
    finally:
        torch.utils.swap_tensors = swap
        del mode.dispatch


def _is_called_by_a_mesh(frame: FrameType | None) -> bool:
    """Return whether torch's own code around a frame, up to the first that is not, is that of a device mesh."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_globals.get("__name__") == "torch.distributed.device_mesh":
            return True
        frame = frame.f_back
    return False


def is_fake(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has no values."""
    return fake_tensor.is_fake(tensor)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake tensor with the dtype, shape and strides of `tensor` on `device`; a real one keeps its device."""
    if tensor.device.type != "meta":
        return mode.from_tensor(tensor, static_shapes=True)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def blames_fake_tensors(error: BaseException) -> bool:
    """Tell whether `error`, or what it came from, is about values that a fake tensor does not have."""
    chain = chain_of(error)
    return any(isinstance(link, _BLAMES) or any(text in str(link) for text in _BLAMING_TEXTS) for link in chain)
