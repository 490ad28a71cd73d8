"""Capture a function as CUDA graphs, one for each batch descriptor, and replay them.

Memory safety:

- A graph reads its inputs at the addresses they had at capture. Every replay compares the addresses; in debug mode,
  also shapes, strides and dtypes.
- Outputs are in the graph's pool, and are overwritten by the next replay of this or another graph of the pool. They are
  therefore copied before they are returned, unless they are lent: from piece to piece within a step, and to callers
  that request it. Graphs with copied outputs can share one pool, because nothing in it outlives the step; graphs that
  lend to callers have separate pools (`Pools`). All steps of a model run on one stream.
- If the address of a weight changed, the replay is refused: a graph would keep reading the tensor that was replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from cgtool.config_values import CUDAGraphMode
from cgtool.errors import GraphError, UsageError
from cgtool.host import count, gc_paused
from cgtool.serving.forward_context import BatchDescriptor, get_forward_context
from cgtool.serving.graphs import Graph, GraphBackend
from cgtool.serving.tensors import HeldTensors, copied, data_ptr, map_tensors


class Pools:
    """The memory pools of graphs: one per key, or a shared one if outputs are copied before a step ends."""

    def __init__(self, backend: GraphBackend, *, shared: bool = True) -> None:
        self.shared = shared
        self._backend = backend
        self._handles: dict[Hashable, Any] = {}
        self._num_graphs: Counter[Any] = Counter()  # by handle

    def of(self, mode: CUDAGraphMode, descriptor: BatchDescriptor | None) -> Any:
        """Return the pool for a graph. The graphs of all pieces of a descriptor share a pool."""
        key = None if self.shared else (mode, descriptor)
        if key not in self._handles:
            self._handles[key] = self._backend.new_pool()
        return self._handles[key]

    def hold(self, handle: Any) -> None:
        """Add a graph that was captured into a pool."""
        self._num_graphs[handle] += 1

    def release(self, handle: Any) -> None:
        """Remove a graph. A pool without graphs cannot be used again, so the next capture gets a new pool."""
        self._num_graphs[handle] -= 1
        if not self._num_graphs[handle]:
            del self._num_graphs[handle]
            self._handles = {key: other for key, other in self._handles.items() if other != handle}

    def rotate(self) -> None:
        """Use new pools from now on. After a failed capture, the state of a pool is unknown."""
        self._handles.clear()

    def held_bytes(self) -> int:
        """Return the size of the pools' memory."""
        return sum(self._backend.pool_bytes(handle) for handle in self._handles.values())


#: Shape, stride and dtype.
_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One graph, with the addresses and layouts of the call's tensors at capture, in order."""

    graph: Graph
    pool: Any
    addresses: tuple[int, ...]
    layouts: tuple[_Layout, ...]
    others: tuple[Any, ...]
    copies: tuple[tuple[int, torch.Tensor], ...]
    weights: tuple[int, ...]
    output: Any


class CUDAGraphWrapper:
    """A function that runs from CUDA graphs if the mode in the forward context is the wrapper's mode.

    The descriptor in the context is the key of the graph. In other modes the function itself is called, so wrappers can
    be nested: a FULL wrapper around a model whose pieces have PIECEWISE wrappers.

    Args:
        function: The function to capture. Tensors are arguments, or items of a list that is the only argument
            (`boxed`).
        mode: PIECEWISE or FULL.
        backend: The device.
        pools: The memory pools, shared by all wrappers of a model.
        name: The name of the function in error messages.
        weights: The tensors of the model that the function reads although they are not arguments.
        copied_inputs: Positions of the tensor arguments to copy into the graph's buffers before each replay; None means
            all.
        lend_outputs: Return the graph's output tensors, which the next replay overwrites.
        boxed: Whether the function takes one list of tensors, which it empties, and returns a list.
        debug: Also check shapes, strides and dtypes of inputs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mode: CUDAGraphMode,
        *,
        backend: GraphBackend,
        pools: Pools,
        name: str = "the model",
        weights: HeldTensors | None = None,
        copied_inputs: Collection[int] | None = (),
        lend_outputs: bool = False,
        boxed: bool = False,
        debug: bool = False,
    ) -> None:
        if mode not in {CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL}:
            msg = f"The mode of a wrapper must be PIECEWISE or FULL, not {mode.name}."
            raise UsageError(msg, actual=mode.name)
        self.function = function
        self.mode = mode
        self.name = name
        self._backend = backend
        self._pools = pools
        self._weights = weights
        self._copied_inputs = copied_inputs
        self._lend = lend_outputs
        self._boxed = boxed
        self.debug = debug
        self._entries: dict[BatchDescriptor | None, _Entry] = {}

    @property
    def captured(self) -> tuple[BatchDescriptor | None, ...]:
        """The descriptors that have a graph, in order of capture."""
        return tuple(self._entries)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the graph of the current descriptor, or capture it, or call the function.

        Raises:
            GraphError: There is no graph and capturing is not allowed, or the address of an input or a weight changed.
        """
        context = get_forward_context()
        if context.cudagraph_runtime_mode is not self.mode:
            return self.function(*args, **kwargs)
        entry = self._entries.get(context.batch_descriptor)
        if entry is None:
            if not context.capturing:
                msg = (
                    f"{self.name} has no CUDA graph for {context.batch_descriptor}, and capturing during requests is "
                    "disabled. Capture the graph at start-up, or set capture_on_demand."
                )
                raise GraphError(msg, path=self.name, expected=self.captured, actual=context.batch_descriptor)
            return self._capture(context.batch_descriptor, args, kwargs)
        return self._replay(entry, args, kwargs)

    def clear(self) -> None:
        """Drop all graphs."""
        for descriptor in self.captured:
            self.drop(descriptor)

    def drop(self, descriptor: BatchDescriptor | None) -> None:
        """Drop the graph of a descriptor, if there is one."""
        entry = self._entries.pop(descriptor, None)
        if entry is not None:
            entry.graph.reset()
            self._pools.release(entry.pool)

    def _replay(self, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = args[0] if self._boxed else _tensors(args, kwargs)
        for position, buffer in entry.copies:
            self._check_layout(position, tensors[position], _layout(buffer))
            buffer.copy_(tensors[position])
            tensors[position] = buffer
        if tuple(map(data_ptr, tensors)) != entry.addresses:
            raise self._moved(entry, tensors)
        if not self._boxed and _others(args, kwargs) != entry.others:
            msg = (
                f"{self.name} was captured with different values for arguments that are not tensors. Pass the same "
                "values."
            )
            raise GraphError(msg, path=self.name, expected=entry.others, actual=_others(args, kwargs))
        if self._weights is not None and self._weights.addresses() != entry.weights:
            name = self._weights.changed(entry.weights)
            msg = (
                f"{name} was replaced after {self.name} was captured. Write into the tensor in place, or capture again."
            )
            raise GraphError(msg, path=name)
        if self.debug:
            for position, (tensor, layout) in enumerate(zip(tensors, entry.layouts, strict=True)):
                self._check_layout(position, tensor, layout)
        if self._boxed:
            tensors.clear()
        entry.graph.replay()
        count("replays")
        return entry.output if self._lend else copied(entry.output)

    def _capture(self, descriptor: BatchDescriptor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = args[0] if self._boxed else _tensors(args, kwargs)
        copies = tuple(
            (position, tensor.clone())
            for position, tensor in enumerate(tensors)
            if self._copied_inputs is None or position in self._copied_inputs
        )
        for position, buffer in copies:
            tensors[position] = buffer
        addresses, layouts = tuple(map(data_ptr, tensors)), tuple(map(_layout, tensors))
        others = () if self._boxed else _others(args, kwargs)
        if not self._boxed:
            args, kwargs = _with_tensors(args, kwargs, tensors)
        del tensors  # so that the function can free its inputs early
        pool = self._pools.of(self.mode, descriptor)
        try:
            graph, output, lent = self._record(pool, args, kwargs)
        except Exception as error:
            self._pools.rotate()
            msg = f"Cannot capture {self.name} for {descriptor}: {error}"
            raise GraphError(msg, path=self.name) from error
        self._pools.hold(pool)
        self._entries[descriptor] = _Entry(
            graph=graph,
            pool=pool,
            addresses=addresses,
            layouts=layouts,
            others=others,
            copies=copies,
            weights=() if self._weights is None else self._weights.addresses(),
            output=lent,
        )
        count("captures")
        graph.replay()  # recording does not run the kernels
        return output if self._lend else copied(output)

    def _record(self, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Graph, Any, Any]:
        """Return a graph of the function, its output, and the output without references to the pool's memory."""
        with torch.no_grad(), gc_paused(), self._backend.capture(pool=pool) as graph:
            output = self.function(*args, **kwargs)
        try:
            with torch.inference_mode(mode=False):  # inference tensors can be written to only in inference mode
                return graph, output, map_tensors(self._backend.borrow, output)
        except UsageError:
            graph.reset()
            raise

    def _moved(self, entry: _Entry, tensors: list[torch.Tensor]) -> GraphError:
        now = tuple(map(data_ptr, tensors))
        if len(now) != len(entry.addresses):
            msg = (
                f"{self.name} was captured with {len(entry.addresses)} tensors but is called with {len(now)}. Pass the "
                "same arguments, or capture again."
            )
            return GraphError(msg, path=self.name, expected=len(entry.addresses), actual=len(now))
        position = next(i for i, was in enumerate(entry.addresses) if was != now[i])
        msg = (
            f"The address of tensor {position} of {self.name} changed since capture. Write inputs into the same "
            "buffers at every step, or set cudagraph_copy_inputs. If a weight was replaced, capture again."
        )
        return GraphError(msg, path=self.name, expected=entry.addresses[position], actual=now[position])

    def _check_layout(self, position: int, tensor: torch.Tensor, expected: _Layout) -> None:
        actual = _layout(tensor)
        if actual != expected:
            msg = (
                f"Tensor {position} of {self.name} does not have the shape, stride and dtype that it had at capture "
                f"({actual}, not {expected}). Pass tensors like those at capture, or capture again."
            )
            raise GraphError(msg, path=self.name, expected=expected, actual=actual)


def _layout(tensor: torch.Tensor) -> _Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def _others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments with tensors replaced by None: the values that are fixed at capture."""
    positional = [None if isinstance(value, torch.Tensor) else value for value in args]
    named = {name: None if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
    return (*positional, named) if named else tuple(positional)


def _with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with their tensors replaced by `tensors`, in order."""
    remaining = iter(tensors)
    return (
        tuple(next(remaining) if isinstance(value, torch.Tensor) else value for value in args),
        {name: next(remaining) if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()},
    )
