"""Bodies: graphs that an op of the graph runs. Some are inlined, the others are encoded as arguments of the op."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from torch import fx

from cgtool.errors import ArtifactError, SplitError
from cgtool.graph.targets import ATTRIBUTES, check_method, target_name
from cgtool.graph.values import encode_value
from cgtool.plan.pieces import Body, Json, Node, NodeKind
from cgtool.split import _torch as private
from cgtool.split.nodes import attribute_of, cannot_split, example, is_dropped
from cgtool.split.transforms import without_transforms


def with_bodies(gm: fx.GraphModule) -> fx.GraphModule:
    """Inline the bodies of ops that only run their body, such as activation checkpointing.

    A graph without such ops is returned unchanged.
    """
    if not any(_body_of(node) is not None for node in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    _copy_nodes(gm, graph, path="", arguments=None)
    return fx.GraphModule(gm, graph)


def _body_of(node: fx.Node) -> fx.GraphModule | None:
    """Return the body of a node that only runs its body; else None."""
    if not isinstance(node.target, private.HigherOrderOperator) or node.target.__name__ not in private.BODY_OPS:
        return None
    argument = node.args[0]
    body = attribute_of(argument) if isinstance(argument, fx.Node) and argument.op == "get_attr" else None
    return body if isinstance(body, fx.GraphModule) else None


def _copy_nodes(source: fx.GraphModule, graph: fx.Graph, path: str, arguments: Mapping[fx.Node, Any] | None) -> Any:
    """Copy the nodes of a graph, or of a body with these arguments, and return the body's result.

    The path of a body, relative to the graph's module, ends with a dot.
    """
    copies: dict[fx.Node, Any] = dict(arguments or {})
    for node in source.graph.nodes:
        body = _body_of(node)
        if body is not None:
            values = [
                fx.map_arg(value, copies.__getitem__) for value in node.args[private.BODY_OPS[node.target.name()] :]
            ]
            placeholders = body.graph.find_nodes(op="placeholder")
            inner = dict(zip(placeholders, values, strict=True))
            copies[node] = _copy_nodes(body, graph, f"{path}{node.args[0].target}.", inner)
        elif node.op == "get_attr" and node.users and all(_body_of(user) is not None for user in node.users):
            continue  # a body
        elif node.op == "output" and arguments is not None:
            return fx.map_arg(node.args[0], copies.__getitem__)
        elif node.target is operator.getitem and isinstance(copies.get(node.args[0]), tuple | list):
            copies[node] = part = copies[node.args[0]][node.args[1]]
            part.meta["example_value"] = example(node)  # later nodes share memory with this fake, not the body's
        elif node not in copies:
            copies[node] = copy = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                copy.target = f"{path}{node.target}"
    return None


def bodies_of(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that a higher-order op runs."""
    if not isinstance(node.target, private.HigherOrderOperator):
        return []
    held = [attribute_of(leaf) for leaf in node.all_input_nodes if leaf.op == "get_attr"]
    return [body for body in held if isinstance(body, fx.GraphModule)]


def nodes_with_bodies(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield nodes and the nodes of their bodies."""
    for node in nodes:
        yield node
        for body in bodies_of(node):
            yield from nodes_with_bodies(body.graph.nodes)


def call_of(node: fx.Node) -> tuple[NodeKind, str]:
    """Return the kind and the target of the piece's node for `node`.

    Raises:
        SplitError: A piece cannot call it.
    """
    if node.target is getattr and node.args[1] not in ATTRIBUTES:
        msg = f"the model reads the attribute {node.args[1]} of a tensor, which a piece cannot; move it out of forward"
        raise SplitError(msg, actual=node.args[1])
    if node.op != "call_method":
        return "function", target_name(node.target)  # type: ignore[arg-type]  # a callable, in a call_function
    try:
        return "method", check_method(str(node.target))
    except ArtifactError as error:
        raise SplitError(f"{error}", actual=node.target) from error


def encode_node(node: fx.Node, ref: Callable[[Any], Json]) -> Node:
    """Encode a call; `ref` is as in `cgtool.graph.values.encode_value`.

    Raises:
        SplitError: A piece cannot contain the call.
    """
    kind, target = call_of(node)
    args = tuple(encode_value(arg, ref) for arg in node.args)
    kwargs = {name: encode_value(node.kwargs[name], ref) for name in sorted(node.kwargs)}
    return Node(kind=kind, target=target, args=args, kwargs=kwargs)


def encode_body(gm: fx.GraphModule) -> Json:
    """Encode the body of an op, which may use its own inputs only.

    Raises:
        SplitError: The grammar does not have a node or value; the message names the node and the user's line.
    """
    refs: dict[fx.Node, str] = {}
    nodes: list[Node] = []

    def ref(leaf: Any) -> Json:
        if not isinstance(leaf, fx.Node):
            raise SplitError(f"it uses the size {leaf}, which its body does not take as an input; pass it as one")
        held = attribute_of(leaf) if leaf.op == "get_attr" else None
        return encode_body(held) if isinstance(held, fx.GraphModule) else refs[leaf]

    graph = without_transforms(with_bodies(gm)).graph
    placeholders = graph.find_nodes(op="placeholder")
    for node in graph.nodes:
        if node.op == "output":
            output = encode_value(node.args[0], ref)
            return {"graph": msgspec.to_builtins(Body(num_inputs=len(placeholders), nodes=tuple(nodes), output=output))}
        if is_dropped(node) or (node.op == "get_attr" and isinstance(attribute_of(node), fx.GraphModule)):
            continue
        if node.op not in ("placeholder", "call_function", "call_method"):
            raise cannot_split(node, "the body of an op contains it; register it as a buffer")
        refs[node] = f"%{len(refs)}"
        if node.op != "placeholder":
            nodes.append(encode_node(node, ref))
    raise AssertionError
