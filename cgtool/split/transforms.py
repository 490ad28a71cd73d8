"""Removal of `torch.vmap` and `torch.func` from a graph, where they wrap tensors and open and close functorch levels.

Each region of such steps is traced again, which applies torch's own rules for the transforms, and replaced by the
resulting plain ops. A call of a numpy function is also a region: Dynamo replaces it by torch's implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cgtool.split import _torch as private
from cgtool.split.nodes import attribute_of, cannot_split, example, is_dropped, is_transform_step

_OPENS, _CLOSES = "_increment_nesting", "_decrement_nesting"


def without_transforms(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph of Dynamo's with its transforms replaced by plain ops; a graph without any is returned unchanged.

    Raises:
        SplitError: torch cannot trace a region; the message contains the user's line.
    """
    ends = dict(_regions(list(gm.graph.nodes)))
    if not ends:
        return gm
    graph = fx.Graph()
    held: dict[str, Any] = {}
    copies: dict[fx.Node, Any] = {}
    region: list[fx.Node] = []
    last: fx.Node | None = None
    for node in gm.graph.nodes:
        last = ends.get(node, last)
        if last is not None:
            region.append(node)
            if node is last:
                _inline(region, graph, held, copies)
                region, last = [], None
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            held[str(node.target)] = attribute_of(node)
    return fx.GraphModule(held, graph)


def _regions(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the first and last node of each region; after it, all levels are closed and no wrapped tensor is used."""
    order = {node: index for index, node in enumerate(nodes)}
    index = 0
    while index < len(nodes):
        if not is_transform_step(nodes[index]):
            index += 1
            continue
        first, depth, needed = index, 0, index
        while True:
            node = nodes[index]
            name = getattr(node.target, "__name__", "")
            depth += name.endswith(_OPENS) - name.endswith(_CLOSES)
            if private.is_wrapped(example(node)):
                needed = max([needed, *(order[user] for user in node.users)])
            index += 1
            if (depth == 0 and index > needed) or index == len(nodes):
                break
        yield nodes[first], nodes[index - 1]


def _inline(region: Sequence[fx.Node], graph: fx.Graph, held: dict[str, Any], copies: dict[fx.Node, Any]) -> None:
    """Append the plain ops of a region to `graph`, and add its results to `copies`."""
    inside = set(region)
    inputs = list(dict.fromkeys(leaf for node in region for leaf in node.all_input_nodes if leaf not in inside))
    outputs = [node for node in region if any(user not in inside for user in node.users)]
    reported = next((node for node in region if node.meta.get("stack_trace")), region[0])  # has the user's line
    fakes = [value for node in region[0].graph.nodes if isinstance(value := example(node), torch.Tensor)]
    with private.tracing_under(fakes[0]) as mode:
        values = {leaf: _value(leaf, mode) for leaf in inputs}
        traced = [leaf for leaf, value in values.items() if isinstance(value, torch.Tensor | torch.SymInt)]

        def run(*arguments: Any) -> list[Any]:
            known = {**values, **dict(zip(traced, arguments, strict=True))}
            for node in region:
                if not is_dropped(node) or node.target is private.SET_GRAD:
                    known[node] = _run(node, known)
            return [known[node] for node in outputs]

        try:
            plain = private.plain_graph(run, [values[leaf] for leaf in traced])
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            why = f"torch.vmap and torch.func cannot decompose it ({error}); put it into a custom op"
            raise cannot_split(reported, why) from error
        placeholders = plain.graph.find_nodes(op="placeholder")
        placed = dict(zip(placeholders, map(copies.__getitem__, traced), strict=True))
        for node in plain.graph.nodes:
            if node.meta.get("unbacked_bindings"):
                raise cannot_split(
                    reported, "it has a data-dependent size within torch.vmap or torch.func; move it outside"
                )
            if node.op not in ("placeholder", "output"):
                placed[node] = _append(node, placed, graph, held, mode)
                if not placed[node].meta.get("stack_trace"):
                    placed[node].meta["stack_trace"] = reported.meta.get("stack_trace")
    results: Any = plain.graph.output_node().args[0]
    for node, result in zip(outputs, results, strict=True):
        copies[node] = made = fx.map_arg(result, placed.__getitem__)
        if isinstance(result, fx.Node) and result not in placeholders:
            # later nodes share memory with the fakes of Dynamo's trace
            made.meta.setdefault("seen_before", []).append(example(made))
            made.meta["example_value"] = example(node)


def _append(node: fx.Node, placed: Mapping[fx.Node, Any], graph: fx.Graph, held: dict[str, Any], mode: Any) -> fx.Node:
    copy = graph.node_copy(node, placed.__getitem__)
    if node.op == "get_attr":
        copy.target = f"transformed_{len(held)}"
        held[copy.target] = attribute_of(node)
        copy.meta["example_value"] = _value(node, mode)  # the new graph has no module yet
        return copy
    copy.meta = {"stack_trace": node.meta.get("stack_trace")}
    copy.meta["example_value"] = _run(copy, {leaf: _value(leaf, mode) for leaf in copy.all_input_nodes})
    return copy


def _value(leaf: fx.Node, mode: Any) -> Any:
    if leaf.op != "get_attr" or example(leaf) is not None:
        return example(leaf)
    value = attribute_of(leaf)
    return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value


def _run(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return attribute_of(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]  # what a call_function calls
