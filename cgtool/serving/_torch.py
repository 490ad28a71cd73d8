"""The private torch APIs that serving uses. Each was checked in 2.13.0 and is unchanged since 2.11."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same CUDA memory that does not keep it allocated."""
    storage = tensor.untyped_storage()
    same: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())


def abandon_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a failed capture on the current stream; restore the allocator, the pool and the random number generators."""
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():  # raises if the error invalidated the capture
        warnings.simplefilter("ignore")  # the capture may be empty
        graph.capture_end()
    try:
        graph.pool()
    except RuntimeError:  # capture did not end: the allocator still uses the pool, and reset() would not release it
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    graph.reset()
    end_capture_of_generators()


def end_capture_of_generators() -> None:
    """Run a successful capture, which is the only way to tell torch's generators that no capture is active."""
    cell = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    cell.add_(1)
    graph.capture_end()
    graph.reset()
