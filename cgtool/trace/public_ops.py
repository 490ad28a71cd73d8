"""What Dynamo leaves in its graphs that a plan has no words for, written as what does the same and has some.

Calls of torch's private functions become public ones, and the arrays and numbers of numpy that a model has are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from cgtool.errors import TraceError
from cgtool.guards.kinds import encode_literal
from cgtool.plan.records import Guard, source_words
from cgtool.trace import _torch as private
from cgtool.trace.sources import Frame, source_text


def write_publicly(graph_module: fx.GraphModule) -> None:
    """Let a graph, and the graphs within it, call public functions alone where that can be said."""
    for part in graph_module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in list(part.graph.nodes):
            write = _WRITERS.get(node.target) if node.op == "call_function" else None
            if write is not None:
                write(node)
        part.recompile()


def hold_arrays(graph_module: fx.GraphModule, frame: Frame) -> Iterator[Guard]:
    """Let a graph hold the arrays and the numbers of numpy that the model has; yield a guard on each.

    Raises:
        TraceError: One is an argument.
    """
    graph = graph_module.graph
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        given = node.meta.get("grapharg")
        if given is None or not private.is_of_numpy(given.source):
            continue
        text = source_text(given.source.base, frame)
        if text.startswith("arg:"):
            name = source_words(text)
            msg = f"{name} is an array or a number of numpy, which an artifact cannot take. Pass a tensor or a float."
            raise TraceError(msg, path=name)
        graph_module.register_buffer(f"numpy_{index}", given.example.clone())
        with graph.inserting_before(node):
            held = graph.get_attr(f"numpy_{index}")
        held.meta.update(node.meta)
        node.replace_all_uses_with(held)
        graph.erase_node(node)
        yield Guard(source=text, kind="value", expected=encode_literal(frame.resolve(text)))
    graph_module.recompile()


def _data(node: fx.Node) -> None:
    """Write `x.data` as `x.detach()`: without gradients they are one."""
    node.op, node.target = "call_method", "detach"


def _assertion(node: fx.Node) -> None:
    """Give an assertion about a tensor the words that it has from torch: one without words gets lost in a compile."""
    if len(node.args) + len(node.kwargs) == 1:
        node.args = (*node.args, *node.kwargs.values(), "Expected Tensor with single nonzero value, but got zero")
        node.kwargs = {}


def _tensor_of_numbers(node: fx.Node) -> None:
    """Write `torch.tensor([x.shape[0], 2])` as scalars that are stacked."""
    value = node.meta["example_value"]
    graph = node.graph

    def made(function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        result = graph.call_function(function, args, kwargs)
        seen = fx.map_arg((args, kwargs), lambda leaf: leaf.meta["example_value"])
        with value.fake_mode:
            result.meta["example_value"] = function(*seen[0], **seen[1])
        result.meta["stack_trace"] = node.meta.get("stack_trace")
        return result

    def tensor(data: Any) -> fx.Node:
        if isinstance(data, list | tuple):
            return made(torch.stack, [tensor(item) for item in data])
        if isinstance(data, fx.Node) and isinstance(data.meta["example_value"], torch.Tensor):
            return made(torch.Tensor.to, data, dtype=value.dtype, device=value.device, copy=True)
        return made(torch.scalar_tensor, data, dtype=value.dtype, device=value.device)

    with graph.inserting_before(node):
        data = node.args[0] if node.args else node.kwargs["data"]
        node.replace_all_uses_with(tensor(data))
    graph.erase_node(node)


_WRITERS: Mapping[Any, Callable[[fx.Node], None]] = {
    private.TENSOR_OF_NUMBERS: _tensor_of_numbers,
    private.DATA_OF_TENSOR: _data,
    private.ASSERTION: _assertion,
}
