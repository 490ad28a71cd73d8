"""Analysis of a graph before the split: kinds, memory, sizes and autocast regions. Does not change the graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cgtool.split import _torch as private
from cgtool.split.bodies import with_bodies
from cgtool.split.memory import Memory, changes_shape, read_memory
from cgtool.split.nodes import (
    RUNS,
    Kind,
    cannot_split,
    constant_of,
    example,
    kind_of,
    tensors_in,
)
from cgtool.split.reals import refuse_reordered
from cgtool.split.sizes import GraphSizes
from cgtool.split.transforms import without_transforms


@dataclass(frozen=True, kw_only=True)
class Program:
    """A graph and its analysis."""

    #: Every node except the output, in order.
    kinds: dict[fx.Node, Kind]
    memory: Memory
    sizes: GraphSizes
    #: node → the nodes that enter the autocast regions around it, outermost first.
    contexts: Mapping[fx.Node, tuple[fx.Node, ...]]
    #: The tensor placeholders.
    inputs: tuple[fx.Node, ...]
    #: The results of the graph: nodes and constants.
    output: tuple[Any, ...]


def read_program(gm: fx.GraphModule) -> Program:
    """Analyze a graph of Dynamo's.

    Raises:
        SplitError: A piece cannot contain one of its nodes.
    """
    graph = _with_tensors_only(without_transforms(with_bodies(gm)))
    _set_missing_examples(graph)
    kinds = {node: kind_of(node) for node in graph.nodes if node.op != "output"}
    inputs = tuple(node for node, kind in kinds.items() if kind is Kind.INPUT)
    _refuse_several_devices(kinds)
    memory = read_memory(kinds)
    sizes = GraphSizes.of(inputs, kinds)
    refuse_reordered(kinds, sizes.shape_env)
    (returned,) = next(iter(reversed(graph.nodes))).args
    output = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    return Program(
        kinds=kinds,
        memory=memory,
        sizes=sizes,
        contexts=_autocast_regions(kinds),
        inputs=inputs,
        output=output,
    )


def _set_missing_examples(graph: fx.Graph) -> None:
    """Set the example values of the elements that `tolist()` reads, which Dynamo does not record."""
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        owner = example(node.args[0]) if isinstance(node.args[0], fx.Node) else None
        if "example_value" not in node.meta and isinstance(owner, torch.Tensor) and type(node.args[1]) is int:
            with private.fake_mode_of(owner):
                node.meta["example_value"] = owner[node.args[1]]


def _with_tensors_only(gm: fx.GraphModule) -> fx.Graph:
    """Rewrite the graph so that only tensors computed by nodes can cross a boundary; return a copy if that changes it.

    `f(bundle)` becomes `f((bundle[0], bundle[1]))`, and a constant that the graph returns becomes a clone.
    """
    if not any(_uses_whole_bundle(node) or _is_returned_constant(node) for node in gm.graph.nodes):
        return gm.graph
    graph = fx.Graph(owning_module=gm)
    items: dict[fx.Node, tuple[fx.Node, ...]] = {}
    copies: dict[fx.Node, Any] = {}
    clones: dict[fx.Node, fx.Node] = {}

    def whole(node: fx.Node) -> Any:
        return items.get(copies[node], copies[node])

    for node in gm.graph.nodes:
        is_item = node.op == "call_function" and node.target is operator.getitem
        copy = graph.node_copy(node, copies.__getitem__ if is_item or node.op == "output" else whole)
        copies[node] = copy
        if _is_returned_constant(node):
            clone = graph.call_function(torch.clone, (copy,))
            clone.meta.update(node.meta, example_value=constant_of(node).clone())
            clones[copy] = clone
        if _uses_whole_bundle(node):
            items[copy] = tuple(_item(graph, copy, index) for index in range(len(example(node))))
    output = next(iter(reversed(graph.nodes)))
    output.args = fx.map_arg(output.args, lambda node: clones.get(node, node))
    return graph


def _is_returned_constant(node: fx.Node) -> bool:
    return node.op == "get_attr" and any(user.op == "output" for user in node.users)


def _item(graph: fx.Graph, bundle: fx.Node, index: int) -> fx.Node:
    item = graph.call_function(operator.getitem, (bundle, index))
    item.meta["example_value"] = example(bundle)[index]
    item.meta["stack_trace"] = bundle.meta.get("stack_trace")
    return item


def _is_flat_bundle(node: fx.Node) -> bool:
    value = example(node)
    return isinstance(value, tuple | list) and bool(value) and all(isinstance(v, torch.Tensor) for v in value)


def _takes_whole(user: fx.Node, node: fx.Node) -> bool:
    return user.op != "output" and not (
        user.op == "call_function" and user.target is operator.getitem and user.args[0] is node
    )


def _uses_whole_bundle(node: fx.Node) -> bool:
    return (
        node.op in ("call_function", "call_method")
        and _is_flat_bundle(node)
        and any(_takes_whole(u, node) for u in node.users)
    )


def _autocast_regions(kinds: Mapping[fx.Node, Kind]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    active: list[fx.Node] = []
    regions: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node, kind in kinds.items():
        regions[node] = tuple(active)
        if kind is Kind.CONTEXT:
            if node.target is private.ENTER_AUTOCAST:
                active.append(node)
            else:
                active.remove(node.args[0])  # type: ignore[arg-type]  # the node that entered it
    return regions


def _refuse_several_devices(kinds: Mapping[fx.Node, Kind]) -> None:
    seen: dict[str, set[int]] = {}
    for node, kind in kinds.items():
        if kind is Kind.INPUT or kind in RUNS:
            for tensor in tensors_in(example(node)):
                if tensor.device.index is not None:
                    seen.setdefault(tensor.device.type, set()).add(tensor.device.index)
                    if len(seen[tensor.device.type]) > 1:
                        raise cannot_split(
                            node,
                            f"it uses a second {tensor.device.type} device; use one device per process, and further "
                            "ranks for the others",
                        )


def refuse_shape_changes(program: Program, piece_of: Mapping[fx.Node, int]) -> None:
    """Refuse in-place changes of a shape that are visible to another piece or the caller.

    The trace contains the last shape only.

    Raises:
        SplitError: The graph has such a change; the message names the op and the user's line.
    """
    for node, kind in program.kinds.items():
        if kind not in RUNS or not changes_shape(node):
            continue
        first = program.memory.root.get(node, node)
        same = [other for other, root in program.memory.root.items() if root is first]
        users = {user for other in same for user in other.users if user in piece_of}
        pieces = {piece_of.get(other, -1) for other in (*same, *users)}
        if len(pieces) > 1 or -1 in pieces:
            raise cannot_split(node, "it changes a tensor's shape in place; use the form without the underscore")
