"""The private torch APIs that the runtime uses. Each was checked in 2.13.0 and is unchanged since 2.11."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.torch_version import TorchVersion


def tensors_unchanged(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that takes as many tensors and checks that each has the same metadata as its original.

    Compares class, dispatch keys, dtype, device, requires_grad, sizes and strides. Dispatch keys depend on inference
    mode, so a check is valid only in the inference mode in which it was created.
    """
    # The class behind Dynamo's guards is part of torch's C extension, so torch._dynamo is not imported.
    tensor_guards: Any = torch._C._dynamo.guards.TensorGuards
    guards = tensor_guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    check: Callable[..., bool] = guards.check
    return check


def call_instead(cls: type[torch.nn.Module], call: Callable[..., Any]) -> None:
    """Make instances of a class run `call` when they are called, as `Module.compile()` does for a single module."""
    target: Any = cls
    target._compiled_call_impl = call


def eager_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module with its hooks and its original forward."""
    call: Callable[..., Any] = module._call_impl
    return call


def in_dual_level() -> bool:
    """Return whether a dual level of forward-mode differentiation is active."""
    return torch.autograd.forward_ad._current_level >= 0


def is_traced() -> bool:
    """Return whether `torch.jit.trace`, or an export based on it, is recording the ops of this thread."""
    # As `torch.jit.is_tracing`, without its wrappers: this runs at every call.
    return torch._C._get_tracing_state() is not None


def opens_folders() -> bool:
    """Return whether torch's package loader accepts a folder in the layout of an archive (2.13 and newer)."""
    return TorchVersion(torch.__version__) >= TorchVersion("2.13")


def open_package(path: str, device_index: int | None) -> Any:
    """Open an AOTInductor package: an archive, or a folder with the same layout.

    Args:
        path: The archive or folder.
        device_index: The index of the device to run on; None means the current device.

    Returns:
        An object with `boxed_run(list of tensors)`. Its runner takes no lock, as CUDA graph capture requires.

    Raises:
        RuntimeError: The package cannot be opened.
    """
    # model name, run_single_threaded, num_runners, device_index: positional in every version
    return torch._C._aoti.AOTIModelPackageLoader(path, "model", True, 1, -1 if device_index is None else device_index)
