"""Shared helpers for tests of the split: toy ops, a capture with Dynamo, and an interpreter of its results.

The interpreter is independent of the split: it decodes `PieceGraph` records and runs them on real tensors. In `hostile`
mode it runs compiled pieces like the worst correct compiler: inputs of a piece are separate copies, writes to them
are copied back, and outputs are new memory. A piece that needs more must not be compiled.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx
from torch.fx.experimental import _config as fx_config
from torch.utils._pytree import tree_map_only

from cgtool.compiler.fx_piece import body_module
from cgtool.graph.expressions import evaluate
from cgtool.graph.targets import resolve_target
from cgtool.graph.values import decode_value
from cgtool.plan.grammar import decode
from cgtool.plan.pieces import Body, PieceGraph, TensorMeta
from cgtool.split.splitter import SplitResult, split_graph

# Dynamo's structured trace would be formatted for pytest's log capture, which costs more than the trace itself.
logging.getLogger("torch.__trace").propagate = False

_lib = torch.library.Library("toysplit", "FRAGMENT")


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _lib.define(schema)
    _lib.impl(name, kernel, "CompositeExplicitAutograd")
    _lib._register_fake(name, fake)


def _fill(x: torch.Tensor, out: torch.Tensor, layer: str = "") -> None:
    out.copy_(x * 2 + 1)


def _bump_(x: torch.Tensor) -> None:
    x.add_(3)


def _bump_all_(xs: list[torch.Tensor]) -> None:
    for x in xs:
        x.add_(3)


_define("fill(Tensor x, Tensor(a!) out, str layer='') -> ()", _fill, lambda x, out, layer="": None)
_define("mix(Tensor a, Tensor b) -> Tensor", lambda a, b: a * 2 + b, lambda a, b: torch.empty_like(a))
_define("pair(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x * 3), lambda x: (x.new_empty(x.shape),) * 2)
_define("bump_(Tensor(a!) x) -> ()", _bump_, lambda x: None)
_define("bump_all_(Tensor(a!)[] xs) -> ()", _bump_all_, lambda xs: None)
_define("scale(Tensor x, SymInt n) -> Tensor", lambda x, n: x * n, lambda x, n: torch.empty_like(x))
# A fake implementation must not return one tensor twice.
_lib._register_fake("pair", lambda x: (torch.empty_like(x), torch.empty_like(x)), allow_override=True)

OPS = torch.ops.toysplit
AT_TOYS = (
    "toysplit::fill",
    "toysplit::mix",
    "toysplit::pair",
    "toysplit::bump_",
    "toysplit::bump_all_",
    "toysplit::scale",
)


def capture(function: Callable[..., Any], *args: Any, dynamic: Sequence[tuple[int, int]] = ()) -> fx.GraphModule:
    """Return Dynamo's full graph of a call; `dynamic` holds (argument, dimension)."""
    graphs: list[fx.GraphModule] = []

    def backend(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph_module)
        for node in graph_module.graph.find_nodes(op="placeholder"):  # removed when Dynamo is done
            node.meta["argument"] = getattr(node.meta["grapharg"].source, "local_name", None)
        return graph_module.forward

    torch._dynamo.reset()
    args = tuple(copy.deepcopy(list(args)))
    for index, dim in dynamic:
        torch._dynamo.mark_dynamic(args[index], dim)
    with torch.no_grad(), fx_config.patch(use_duck_shape=False):
        torch.compile(function, fullgraph=True, backend=backend)(*args)
    (graph_module,) = graphs
    return graph_module


def toy_ops_in(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Return the toy ops in a graph and in the bodies within it."""
    modules = [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    nodes = [node for module in modules for node in module.graph.nodes]
    there = {str(node.target).replace(".", "::") for node in nodes if node.op == "call_function"}
    return tuple(name for name in AT_TOYS if name in there)


def symbol_values(graph_module: fx.GraphModule, result: SplitResult, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the values of the variant's symbols for these inputs of the graph."""
    values: dict[str, int] = {}
    inputs = [n for n in graph_module.graph.find_nodes(op="placeholder") if _is_tensor(n)]
    for node, tensor in zip(inputs, tensors, strict=True):
        for size, actual in zip(node.meta["example_value"].shape, tensor.shape, strict=True):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                name = result.symbol_names[size.node.expr.name]
                assert values.setdefault(name, actual) == actual
    return values


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def graph_arguments(graph_module: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the arguments of the graph module, including sizes, for these tensors."""
    sizes: dict[Any, int] = {}
    waiting = iter(tensors)
    found: list[Any] = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            tensor = next(waiting)
            found.append(tensor)
            for size, actual in zip(value.shape, tensor.shape, strict=True):
                if isinstance(size, torch.SymInt):
                    sizes[size.node.expr] = actual
        else:
            found.append(value)
    return [sizes[v.node.expr] if isinstance(v, torch.SymInt) else v for v in found]


def run_piece(graph: PieceGraph, inputs: Sequence[torch.Tensor], symbols: dict[str, int]) -> list[torch.Tensor]:
    """Run one piece on real tensors, checking everything that it says of them."""
    for meta, tensor in zip(graph.inputs, inputs, strict=True):
        check_meta(meta, tensor, symbols)
    for fact in graph.facts:
        assert evaluate(fact, symbols), (fact, symbols)
    for symbol in graph.symbols:
        assert symbol.min <= symbols[symbol.name] <= (symbol.max or 1 << 62)
    for group in graph.aliases:
        assert len({inputs[i].untyped_storage().data_ptr() for i in group}) == 1
    values: list[Any] = list(inputs)

    def lookup(ref: str) -> Any:
        return values[int(ref[1:])]

    def decoded(data: Any) -> Any:
        return tree_map_only(Body, body_module, decode_value(data, lookup))

    for node in graph.nodes:
        args = [decoded(arg) for arg in node.args]
        kwargs = {name: decoded(value) for name, value in node.kwargs.items()}
        if node.kind == "size":
            values.append(args[0].shape[args[1]])
        elif node.kind == "method":
            values.append(getattr(args[0], node.target)(*args[1:], **kwargs))
        else:
            values.append(resolve_target(node.target)(*args, **kwargs))
    outputs = [lookup(ref) for ref in graph.outputs]
    for meta, tensor in zip(graph.results, outputs, strict=True):
        check_meta(meta, tensor, symbols)
    return outputs


def check_meta(meta: TensorMeta, tensor: torch.Tensor, symbols: dict[str, int]) -> None:
    """Check that a tensor is what its record says, strides of dimensions that have a step included."""
    assert str(tensor.dtype) == f"torch.{meta.dtype}"
    assert tuple(evaluate(size, symbols) for size in meta.shape) == tuple(tensor.shape)
    for size, step, expected in zip(tensor.shape, tensor.stride(), meta.stride, strict=True):
        if size > 1 and tensor.numel():
            assert step == evaluate(expected, symbols)


def _run_hostile(graph: PieceGraph, inputs: list[torch.Tensor], symbols: dict[str, int]) -> list[torch.Tensor]:
    copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in inputs]
    before = [tensor._version for tensor in copies]
    outputs = run_piece(graph, copies, symbols)
    for tensor, mine, version in zip(inputs, copies, before, strict=True):
        if mine._version != version:
            tensor.copy_(mine)
    same = {id(mine): tensor for tensor, mine in zip(inputs, copies, strict=True)}
    return [
        same[id(out)] if id(out) in same else torch.empty_strided(out.shape, out.stride(), dtype=out.dtype).copy_(out)
        for out in outputs
    ]


def run_split(
    result: SplitResult, tensors: Sequence[torch.Tensor], symbols: dict[str, int], *, hostile: bool = False
) -> list[Any]:
    """Run a split graph and return the graph's outputs."""
    values: list[torch.Tensor] = list(tensors)
    with torch.no_grad():
        for step in result.steps:
            graph = result.graphs[step.graph]
            if hostile:  # what shared memory in the trace need not do so any more
                graph = replace(graph, aliases=())
            own = {name: evaluate(text, symbols) for name, text in step.symbols.items()}
            inputs = [values[i] for i in step.inputs]
            compiled = not step.splitting and step.piece not in result.eager_pieces
            outputs = _run_hostile(graph, inputs, own) if hostile and compiled else run_piece(graph, inputs, own)
            assert step.outputs == tuple(range(len(values), len(values) + len(outputs)))
            values.extend(outputs)
    found: list[Any] = []
    for word, what in result.outputs:
        found.append(values[what] if word == "v" else evaluate(what, symbols) if word == "expr" else what)
    return found


def same(left: Any, right: Any) -> bool:
    """Return whether two outputs are equal to the bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype.is_floating_point:
            return torch.equal(left.nan_to_num(nan=1e30), right.nan_to_num(nan=1e30))
        return torch.equal(left, right)
    return type(left) is type(right) and left == right


def check_split(
    function: Callable[..., Any],
    *args: torch.Tensor,
    dynamic: Sequence[tuple[int, int]] = (),
    others: Sequence[Sequence[torch.Tensor]] = (),
    splitting_ops: Sequence[str] | None = AT_TOYS,
) -> SplitResult:
    """Capture, split, and compare the pieces with the whole graph, on these inputs and on `others` of other sizes."""
    graph_module = capture(function, *args, dynamic=dynamic)
    names = toy_ops_in(graph_module) if splitting_ops is AT_TOYS else splitting_ops
    result = split_graph(graph_module, splitting_ops=names)
    for identity, graph in result.graphs.items():
        assert decode(graph.canonical(), PieceGraph).identity() == identity
    order = placeholder_order(graph_module, function, args)
    for inputs in (args, *others):
        for hostile in (False, True):
            whole = copy.deepcopy(list(inputs))
            pieces = copy.deepcopy(list(inputs))
            with torch.no_grad():
                expected = graph_module(*graph_arguments(graph_module, [whole[i] for i in order]))
            own = [pieces[i] for i in order]
            actual = run_split(result, own, symbol_values(graph_module, result, own), hostile=hostile)
            assert len(actual) == len(expected)
            for position, (left, right) in enumerate(zip(actual, expected, strict=True)):
                assert same(left, right), (position, hostile, left, right)
            for position, (left, right) in enumerate(zip(pieces, whole, strict=True)):
                assert same(left, right), ("input", position, hostile, left, right)
    return result


def placeholder_order(graph_module: fx.GraphModule, function: Callable[..., Any], args: Sequence[Any]) -> list[int]:
    """Return for each tensor placeholder the position of the argument that it stands for."""
    names = list(function.__code__.co_varnames[: function.__code__.co_argcount])
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    return [names.index(node.meta["argument"]) for node in placeholders if _is_tensor(node)]
