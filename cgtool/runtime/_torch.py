"""The private names of torch that the runtime needs, each read in 2.13.0 and unchanged since 2.11."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.torch_version import TorchVersion


def tensors_unchanged(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a check that takes as many tensors and says whether each is of the same make as the one it stands for.

    The make is class, dispatch keys, dtype, device, requires_grad, sizes and strides. Dispatch keys follow inference
    mode, so a check holds only in the inference mode that it was made in.
    """
    # The class that Dynamo's guards are made of is part of torch's C extension: nothing of torch._dynamo is imported.
    make: Any = torch._C._dynamo.guards.TensorGuards
    guards = make(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    check: Callable[..., bool] = guards.check
    return check


def call_instead(cls: type[torch.nn.Module], call: Callable[..., Any]) -> None:
    """Make `call` what instances of a class run when they are called, as `Module.compile()` does for one of them."""
    of_class: Any = cls
    of_class._compiled_call_impl = call


def eager_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return what calls a module with its hooks and runs nothing in place of its forward."""
    call: Callable[..., Any] = module._call_impl
    return call


def in_dual_level() -> bool:
    """Return whether a dual level of forward-mode differentiation is entered."""
    return torch.autograd.forward_ad._current_level >= 0


def is_traced() -> bool:
    """Return whether `torch.jit.trace`, or an export that rests on it, records the ops of this thread."""
    # what `torch.jit.is_tracing` asks, without its wrappers: each call asks it
    return torch._C._get_tracing_state() is not None


def opens_folders() -> bool:
    """Return whether torch's loader of packages opens a folder in the layout of an archive: from 2.13."""
    return TorchVersion(torch.__version__) >= TorchVersion("2.13")


def open_package(path: str, device_index: int | None) -> Any:
    """Open a package of AOTInductor: an archive, or a folder in its layout.

    Args:
        path: Of the archive or folder.
        device_index: Of the device to run on; None: the current one.

    Returns:
        An object with `boxed_run(list of tensors)`; its runner takes no lock of its own, as CUDA graphs need it.

    Raises:
        RuntimeError: It cannot be opened.
    """
    # name of the model, run_single_threaded, num_runners, device_index: positional in every version
    return torch._C._aoti.AOTIModelPackageLoader(path, "model", True, 1, -1 if device_index is None else device_index)
