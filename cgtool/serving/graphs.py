"""The interface for capturing and replaying graphs on a device, and its CUDA implementation.

Tests use a CPU double of the interface, which is checked against this implementation on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from cgtool.serving._torch import abandon_capture, borrowed, end_capture_of_generators


class Graph(Protocol):
    """One captured sequence of kernels."""

    def replay(self) -> None:
        """Run the kernels again on the memory that they were captured with."""

    def reset(self) -> None:
        """Discard the kernels and free the memory that no other graph of the pool uses."""


class GraphBackend(Protocol):
    """A device that can capture graphs."""

    def new_pool(self) -> Any:
        """Return the handle of a new memory pool."""

    def capture(self, *, pool: Any) -> AbstractContextManager[Graph]:
        """Return a context manager that records kernels, without running them, into the graph that it yields.

        Allocations in the block come from `pool`, and may reuse memory of the pool that is free at the time, even if
        other graphs of the pool write to it. After an error, the device is as before and the graph is empty.

        Once the last graph of a pool has been reset, nothing can be captured into the pool again.
        """

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory that does not keep the memory allocated."""

    def pool_bytes(self, pool: Any) -> int:
        """Return the size of a pool's memory."""

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""


class CudaGraphs:
    """CUDA graphs of one device.

    Does not use `torch.cuda.graph`, which empties the caches of all streams before each capture. That takes longer than
    capturing a piece, and if a capture fails, `torch.cuda.graph` leaves its own stream current.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # untyped in torch

    def new_pool(self) -> Any:
        """See `GraphBackend`."""
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def capture(self, *, pool: Any) -> Iterator[Graph]:
        """See `GraphBackend`. Other threads, such as loaders and samplers, may use CUDA during the capture."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            except RuntimeError:
                end_capture_of_generators()
                raise
            try:
                yield graph
                graph.capture_end()
            except BaseException:
                abandon_capture(graph, pool)
                raise
        current.wait_stream(self._stream)

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `GraphBackend`."""
        return borrowed(tensor)

    def pool_bytes(self, pool: Any) -> int:
        """See `GraphBackend`."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # untyped in torch
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))

    def synchronize(self) -> None:
        """See `GraphBackend`."""
        torch.cuda.synchronize(self._device)
