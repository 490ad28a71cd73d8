"""A test double of `CudaGraphs` that needs no GPU. Tests check it against real graphs on a GPU.

It behaves like CUDA graphs in all that the tests depend on:

- Capturing does not run kernels: after a capture, outputs hold garbage (NaN here), and no other memory has changed.
- A replay runs the recorded ops on the memory of the capture: inputs and outputs have the addresses of the capture.
- Captures allocate from their pool. Free memory is reused, including by later captures of the pool, and replays may
  write to it: two graphs of one pool can overwrite each other's outputs.
- A pool cannot be used again after its last graph was reset.
- A synchronization with the host during a capture is an error.

Ops are recorded by a dispatch mode, so functions must consist of torch ops: native code that bypasses the dispatcher is
not recorded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_ALIGNMENT = 64
_SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")


class Pool:
    """An arena of memory, allocated in blocks; a block is free again when no tensor uses it."""

    def __init__(self, size: int = 1 << 22) -> None:
        self.memory = np.zeros(size, dtype=np.uint8)
        self.raw = torch.from_numpy(self.memory)
        self.used: dict[int, int] = {}  # offset -> bytes
        self.high = 0
        self.num_graphs: int | None = None  # None until a graph is captured

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return bytes that are in use as long as a tensor shares them."""
        nbytes = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        offset = 0
        for start in sorted(self.used):
            if start - offset >= nbytes:
                break
            offset = start + self.used[start]
        self.used[offset] = nbytes
        self.high = max(self.high, offset + nbytes)
        block = self.memory[offset : offset + nbytes]
        weakref.finalize(block, self.used.pop, offset)
        return torch.from_numpy(block)

    def holds(self, tensor: torch.Tensor) -> bool:
        start = self.raw.data_ptr()
        return start <= tensor.untyped_storage().data_ptr() < start + self.memory.nbytes

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same bytes that does not keep them in use."""
        start = tensor.data_ptr() - self.raw.data_ptr()
        end = self.memory.nbytes - (self.memory.nbytes - start) % tensor.element_size()
        return self.raw[start:end].view(tensor.dtype).as_strided(tensor.size(), tensor.stride())


class GraphDouble:
    """The recording of one capture."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.pool: Pool | None = None
        self.num_replays = 0

    def replay(self) -> None:
        if self.pool is None:
            raise RuntimeError("this graph was not captured, or was reset")
        self.num_replays += 1
        with torch.no_grad():
            for call in self.calls:
                call()

    def reset(self) -> None:
        self.calls.clear()
        if self.pool is not None:
            self.pool.num_graphs -= 1
        self.pool = None


class DoubleGraphs:
    """The double of `CudaGraphs`."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self.num_captures = 0
        self.capturing = False

    def new_pool(self) -> Pool:
        self.pools.append(Pool())
        return self.pools[-1]

    @contextlib.contextmanager
    def capture(self, *, pool: Pool) -> Iterator[GraphDouble]:
        graph = GraphDouble()
        if self.capturing:
            raise RuntimeError("a capture is underway")
        if pool.num_graphs == 0:
            raise RuntimeError("the pool is used up")
        recorder = _Recorder(graph, pool)
        self.capturing = True
        self.num_captures += 1
        try:
            with recorder:
                yield graph
        except BaseException:
            graph.reset()
            raise
        finally:
            self.capturing = False
            recorder.undo()
        graph.pool = pool
        pool.num_graphs = (pool.num_graphs or 0) + 1

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        held = [pool for pool in self.pools if pool.holds(tensor)]
        return held[0].borrow(tensor) if held else tensor.detach()

    def pool_bytes(self, pool: Pool) -> int:
        return pool.high

    def synchronize(self) -> None:
        """Do nothing: all work is synchronous."""


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: GraphDouble, pool: Pool) -> None:
        super().__init__()
        self.graph = graph
        self.pool = pool
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.blocks: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name in _SYNCS:
            raise RuntimeError("operation not permitted when stream is capturing")
        raw_args, raw_kwargs = self._raw((args, kwargs))
        written = _written(schema, args, kwargs)
        for tensor in written:
            if not self.pool.holds(tensor):
                self.before.append((tensor, tensor.clone()))
        output = func(*args, **kwargs)
        if written or _is_view(schema):
            if written:
                self.graph.calls.append(lambda: func(*raw_args, **raw_kwargs))
            return output
        placed = tree_map_only(torch.Tensor, self._placed, output)
        raw_output = self._raw(placed)

        def call() -> None:
            _fill(raw_output, func(*raw_args, **raw_kwargs))

        self.graph.calls.append(call)
        return placed

    def undo(self) -> None:
        """Restore memory as if nothing had run: garbage in the pool, original values outside."""
        for tensor, value in reversed(self.before):
            tensor.copy_(value)
        for raw in self.blocks:
            raw.fill_(255)  # NaN for floats

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor` in the pool."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        extent = extent if tensor.numel() else 0
        block = self.pool.allocate(extent * tensor.element_size())
        self.blocks.append(self.pool.borrow(block))
        whole = block[: extent * tensor.element_size()].view(tensor.dtype)
        return whole.as_strided(tensor.size(), tensor.stride()).copy_(tensor)

    def _raw(self, value: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: self.pool.borrow(t) if self.pool.holds(t) else t.detach(), value)


def _fill(places: Any, values: Any) -> None:
    if isinstance(places, torch.Tensor):
        places.copy_(values)
    elif isinstance(places, (tuple, list)):
        for place, value in zip(places, values, strict=True):
            _fill(place, value)


def _is_view(schema: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    return [
        named[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and named.get(argument.name) is not None
    ]
