"""Capturing and replaying on a device: what the rest of serving asks of it, and CUDA's answer.

Tests answer the same questions on the CPU with a double that is checked against this one on a GPU.
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
        """Forget the kernels; memory that no other graph of the pool uses is free again."""


class GraphBackend(Protocol):
    """A device that captures."""

    def new_pool(self) -> Any:
        """Return a handle of a memory pool that nothing was captured into."""

    def capture(self, *, pool: Any) -> AbstractContextManager[Graph]:
        """Return a block whose kernels are recorded into the graph that it yields, and not run.

        A pool is used up when the last of its graphs was reset: none can be captured into it again.

        What the block allocates is of `pool`. Memory of the pool that is free then is used again, whatever graphs of
        the pool write to it. After an error the device is as it was, and the graph holds nothing.
        """

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory that does not keep the pool from using it again."""

    def pool_bytes(self, pool: Any) -> int:
        """Return how much memory a pool holds."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was asked to do."""


class CudaGraphs:
    """CUDA graphs of one device.

    `torch.cuda.graph` is not used: it empties the caches of all streams before each capture, which takes longer than
    the capture of a piece, and where a capture fails it leaves its own stream the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's own gap

    def new_pool(self) -> Any:
        """See `GraphBackend`."""
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def capture(self, *, pool: Any) -> Iterator[Graph]:
        """See `GraphBackend`. Other threads may use CUDA meanwhile, as loaders and samplers do."""
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
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # torch's own gap
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))

    def synchronize(self) -> None:
        """See `GraphBackend`."""
        torch.cuda.synchronize(self._device)
