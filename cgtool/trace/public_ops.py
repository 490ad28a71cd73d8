"""Rewrites parts of Dynamo's graphs that a plan cannot express.

Calls of torch's private functions become calls of public ones, and a model's NumPy arrays and numbers become constants.
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


def replace_private_ops(graph_module: fx.GraphModule) -> None:
    """Replace private functions of torch in a graph and its nested graphs by public ones, where there is one."""
    for part in graph_module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in list(part.graph.nodes):
            write = _WRITERS.get(node.target) if node.op == "call_function" else None
            if write is not None:
                write(node)
        part.recompile()


def embed_numpy_arrays(graph_module: fx.GraphModule, frame: Frame) -> Iterator[Guard]:
    """Make the model's NumPy arrays and numbers constants of the graph; yield a guard on each.

    Raises:
        TraceError: An argument is a NumPy array or number.
    """
    graph = graph_module.graph
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        grapharg = node.meta.get("grapharg")
        if grapharg is None or not private.is_of_numpy(grapharg.source):
            continue
        text = source_text(grapharg.source.base, frame)
        if text.startswith("arg:"):
            name = source_words(text)
            msg = f"{name} is a NumPy array or number, which an artifact cannot take. Pass a tensor or a float."
            raise TraceError(msg, path=name)
        graph_module.register_buffer(f"numpy_{index}", grapharg.example.clone())
        with graph.inserting_before(node):
            constant = graph.get_attr(f"numpy_{index}")
        constant.meta.update(node.meta)
        node.replace_all_uses_with(constant)
        graph.erase_node(node)
        yield Guard(source=text, kind="value", expected=encode_literal(frame.resolve(text)))
    graph_module.recompile()


def _data(node: fx.Node) -> None:
    """Replace `x.data` by `x.detach()`: without gradients they are equivalent."""
    node.op, node.target = "call_method", "detach"


def _assertion(node: fx.Node) -> None:
    """Give an assertion about a tensor torch's default message: without a message, a compile drops the assertion."""
    if len(node.args) + len(node.kwargs) == 1:
        node.args = (*node.args, *node.kwargs.values(), "Expected Tensor with single nonzero value, but got zero")
        node.kwargs = {}


def _tensor_of_numbers(node: fx.Node) -> None:
    """Replace `torch.tensor([x.shape[0], 2])` by stacked scalars."""
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
