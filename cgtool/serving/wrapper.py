"""Capturing what a function does as CUDA graphs, one for each batch descriptor, and replaying them.

Memory, and why it is right:

- A graph reads its inputs where they lay when it was captured. Every replay compares the addresses; in debug mode,
  also shapes, strides and dtypes.
- Its outputs lie in its pool, and its own next replay, or that of another graph of the same pool, writes over them. So
  outputs are copied before a caller sees them, unless they are lent: within one step, from piece to piece, and to
  callers who ask for it. Graphs whose outputs are copied can share one pool, because nothing in it outlives the step;
  graphs that lend to callers have a pool each (`Pools`). Steps of one model follow each other on one stream.
- A weight lies where it lay, or the replay is refused: a graph would go on reading the tensor that was replaced.
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
    """The memory pools of graphs: one for each, or one for all where no output outlives its step uncopied."""

    def __init__(self, backend: GraphBackend, *, shared: bool = True) -> None:
        self.shared = shared
        self._backend = backend
        self._handles: dict[Hashable, Any] = {}
        self._num_graphs: Counter[Any] = Counter()  # by handle

    def of(self, mode: CUDAGraphMode, descriptor: BatchDescriptor | None) -> Any:
        """Return the pool for a graph; those of all pieces of one descriptor are one."""
        key = None if self.shared else (mode, descriptor)
        if key not in self._handles:
            self._handles[key] = self._backend.new_pool()
        return self._handles[key]

    def hold(self, handle: Any) -> None:
        """Count a graph that was captured into a pool."""
        self._num_graphs[handle] += 1

    def release(self, handle: Any) -> None:
        """Count a graph that was forgotten; a pool without any is used up, and the next capture gets a new one."""
        self._num_graphs[handle] -= 1
        if not self._num_graphs[handle]:
            del self._num_graphs[handle]
            self._handles = {key: other for key, other in self._handles.items() if other != handle}

    def rotate(self) -> None:
        """Capture into new pools from now on: nobody can say what a pool holds in which a capture failed."""
        self._handles.clear()

    def held_bytes(self) -> int:
        """Return how much memory the pools hold."""
        return sum(self._backend.pool_bytes(handle) for handle in self._handles.values())


#: Shape, stride and dtype.
_Make = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One graph, and what it was captured with: the addresses and makes of the tensors in the call, in order."""

    graph: Graph
    pool: Any
    addresses: tuple[int, ...]
    makes: tuple[_Make, ...]
    others: tuple[Any, ...]
    copies: tuple[tuple[int, torch.Tensor], ...]
    weights: tuple[int, ...]
    output: Any


class CUDAGraphWrapper:
    """A function that runs from CUDA graphs where the forward context asks for this wrapper's mode.

    It trusts the context: the descriptor there is the key of the graph. Under another mode the function is called, so
    that wrappers nest: one of mode FULL around a model whose pieces have wrappers of mode PIECEWISE.

    Args:
        function: What is captured. Tensors are arguments, or members of a list that is the only argument (`boxed`).
        mode: PIECEWISE or FULL.
        backend: The device.
        pools: Where graphs allocate; wrappers of one model share it.
        name: Of the function, for errors.
        weights: The tensors of the model that the function reads without getting them as arguments.
        copied_inputs: Positions of tensor arguments that are copied to the graph's own before each replay; None: all.
        lend_outputs: Return the graph's own output tensors, which the next replay writes over.
        boxed: The function takes one list of tensors, which it empties, and returns a list.
        debug: Check shapes, strides and dtypes of inputs, too.
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
            msg = f"A wrapper captures under PIECEWISE or FULL; {mode.name} is neither."
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
            GraphError: There is no graph and none may be captured now, or an input or a weight is not where it was.
        """
        context = get_forward_context()
        if context.cudagraph_runtime_mode is not self.mode:
            return self.function(*args, **kwargs)
        entry = self._entries.get(context.batch_descriptor)
        if entry is None:
            if not context.capturing:
                msg = (
                    f"{self.name} has no CUDA graph of {context.batch_descriptor}, and requests capture none: capture "
                    "it at start-up, or let the runner capture on demand."
                )
                raise GraphError(msg, path=self.name, expected=self.captured, actual=context.batch_descriptor)
            return self._capture(context.batch_descriptor, args, kwargs)
        return self._replay(entry, args, kwargs)

    def clear(self) -> None:
        """Forget all graphs."""
        for descriptor in self.captured:
            self.drop(descriptor)

    def drop(self, descriptor: BatchDescriptor | None) -> None:
        """Forget the graph of one descriptor, if there is one."""
        entry = self._entries.pop(descriptor, None)
        if entry is not None:
            entry.graph.reset()
            self._pools.release(entry.pool)

    def _replay(self, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = args[0] if self._boxed else _tensors(args, kwargs)
        for position, own in entry.copies:
            self._check_make(position, tensors[position], _make(own))
            own.copy_(tensors[position])
            tensors[position] = own
        if tuple(map(data_ptr, tensors)) != entry.addresses:
            raise self._moved(entry, tensors)
        if not self._boxed and _others(args, kwargs) != entry.others:
            msg = f"{self.name} was captured with other values of its arguments that are no tensors: pass the same."
            raise GraphError(msg, path=self.name, expected=entry.others, actual=_others(args, kwargs))
        if self._weights is not None and self._weights.addresses() != entry.weights:
            name = self._weights.changed(entry.weights)
            msg = f"{name} is another tensor than when {self.name} was captured: write into it, or capture again."
            raise GraphError(msg, path=name)
        if self.debug:
            for position, (tensor, make) in enumerate(zip(tensors, entry.makes, strict=True)):
                self._check_make(position, tensor, make)
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
        for position, own in copies:
            tensors[position] = own
        addresses, makes = tuple(map(data_ptr, tensors)), tuple(map(_make, tensors))
        others = () if self._boxed else _others(args, kwargs)
        if not self._boxed:
            args, kwargs = _with_tensors(args, kwargs, tensors)
        del tensors  # the function may free what it needs no longer
        pool = self._pools.of(self.mode, descriptor)
        try:
            graph, output, lent = self._recorded(pool, args, kwargs)
        except Exception as error:
            self._pools.rotate()
            msg = f"{self.name} cannot be captured for {descriptor}: {error}"
            raise GraphError(msg, path=self.name) from error
        self._pools.hold(pool)
        self._entries[descriptor] = _Entry(
            graph=graph,
            pool=pool,
            addresses=addresses,
            makes=makes,
            others=others,
            copies=copies,
            weights=() if self._weights is None else self._weights.addresses(),
            output=lent,
        )
        count("captures")
        graph.replay()  # what was recorded has not run yet
        return output if self._lend else copied(output)

    def _recorded(self, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Graph, Any, Any]:
        """Return a graph of the function, its output, and the same without a hold on the pool's memory."""
        with torch.no_grad(), gc_paused(), self._backend.capture(pool=pool) as graph:
            output = self.function(*args, **kwargs)
        try:
            with torch.inference_mode(mode=False):  # an inference tensor could be written to in that mode alone
                return graph, output, map_tensors(self._backend.borrow, output)
        except UsageError:
            graph.reset()
            raise

    def _moved(self, entry: _Entry, tensors: list[torch.Tensor]) -> GraphError:
        now = tuple(map(data_ptr, tensors))
        if len(now) != len(entry.addresses):
            msg = f"{self.name} was captured with {len(entry.addresses)} tensors and is called with {len(now)}."
            return GraphError(msg, path=self.name, expected=len(entry.addresses), actual=len(now))
        position = next(i for i, was in enumerate(entry.addresses) if was != now[i])
        msg = (
            f"Tensor {position} of {self.name} does not lie where it lay at capture: write inputs into the same "
            "buffers at every step, or set cudagraph_copy_inputs; after a weight was replaced, capture again."
        )
        return GraphError(msg, path=self.name, expected=entry.addresses[position], actual=now[position])

    def _check_make(self, position: int, tensor: torch.Tensor, make: _Make) -> None:
        if _make(tensor) != make:
            msg = f"Tensor {position} of {self.name} has another shape, stride or dtype than at capture."
            raise GraphError(msg, path=self.name, expected=make, actual=_make(tensor))


def _make(tensor: torch.Tensor) -> _Make:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def _others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the call with its tensors left out: what a graph cannot take anew."""
    kept = [None if isinstance(value, torch.Tensor) else value for value in args]
    named = {name: None if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
    return (*kept, named) if named else tuple(kept)


def _with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call with other tensors in the places of its own."""
    left = iter(tensors)
    return (
        tuple(next(left) if isinstance(value, torch.Tensor) else value for value in args),
        {name: next(left) if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()},
    )
