"""Calls of torch's private functions that Dynamo leaves in its graphs, written as public ones that do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from cgtool.trace import _torch as private


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


def _data(node: fx.Node) -> None:
    """Write `x.data` as `x.detach()`: without gradients they are one."""
    node.op, node.target = "call_method", "detach"


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
            return made(torch.Tensor.to, data, dtype=value.dtype, device=value.device)
        return made(torch.scalar_tensor, data, dtype=value.dtype, device=value.device)

    with graph.inserting_before(node):
        data = node.args[0] if node.args else node.kwargs["data"]
        node.replace_all_uses_with(tensor(data))
    graph.erase_node(node)


_WRITERS: Mapping[Any, Callable[[fx.Node], None]] = {
    private.TENSOR_OF_NUMBERS: _tensor_of_numbers,
    private.DATA_OF_TENSOR: _data,
}
