"""Encoding of one piece: nodes of the trace become a `PieceGraph`, in which positions replace names.

The order is canonical, so that equal pieces have equal graphs: inputs in order of first use, then donors of sizes;
outputs in the order in which they are computed; the arithmetic of a size directly before its first use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cgtool.errors import SplitError
from cgtool.graph.sympy_text import expression_text
from cgtool.graph.targets import target_name
from cgtool.graph.values import encode_value, tensor_meta
from cgtool.guards.code import op_digest
from cgtool.ops import is_torch_op
from cgtool.plan.pieces import Json, Node, NodeKind, PieceGraph
from cgtool.split import _torch as private
from cgtool.split.bodies import encode_body, encode_node, nodes_with_bodies
from cgtool.split.data import is_read, is_readable, is_shown, symbols_from_data
from cgtool.split.nodes import Kind, attribute_of, cannot_split, constant_of, described, example, leaves_of
from cgtool.split.program import Program
from cgtool.split.sizes import PieceSizes, piece_sizes

_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.And: "and_",
    ast.Or: "or_",
}
_EXTREMES = {"Max": "torch.sym_max", "Min": "torch.sym_min"}
_ROUNDINGS = {"Trunc": "math.trunc", "Floor": "math.floor", "Ceil": "math.ceil", "Round": "builtins.round"}


@dataclass(frozen=True, kw_only=True)
class EncodedPiece:
    """The graph of a piece, and the nodes of the trace that are its inputs and outputs."""

    graph: PieceGraph
    #: The nodes of its inputs, in order.
    takes: tuple[fx.Node, ...]
    #: The nodes of its outputs, in order.
    gives: tuple[fx.Node, ...]
    #: Piece symbol → symbol of the trace.
    symbols: Mapping[str, str]


def takes_of(members: Sequence[fx.Node], program: Program) -> list[fx.Node]:
    """Return the tensors that these nodes take from outside, in order of first use."""
    inside = frozenset(members)
    found: dict[fx.Node, None] = {}
    for node in members:
        for leaf in _leaves_to_take(node, inside, program):
            if program.kinds[leaf] not in (Kind.TENSOR, Kind.INPUT):
                raise cannot_split(leaf, "its result is not a tensor and is used in another piece; split elsewhere")
            value = program.memory.root[leaf]
            if value not in inside and program.kinds[value] is not Kind.CONSTANT:
                found[value] = None
    return list(found)


def _leaves_to_take(node: fx.Node, inside: frozenset[fx.Node], program: Program) -> Iterator[fx.Node]:
    """Yield the nodes outside that `node` needs, except sizes that can be recomputed from tensors."""
    for leaf in leaves_of(node):
        kind = program.kinds[leaf]
        if leaf in inside or kind in (Kind.CONSTANT, Kind.CONTEXT, Kind.DROPPED):
            continue
        is_number = kind is Kind.SIZE or is_read(leaf, program.kinds)
        if is_number and is_readable(example(leaf), inside, program):
            continue
        if kind is Kind.SIZE:
            yield from _leaves_to_take(leaf, inside, program)
        else:
            yield leaf


def donors_of(members: Sequence[fx.Node], program: Program) -> list[fx.Node]:
    """Return the tensors of other pieces from which these nodes read data-dependent sizes."""
    if not program.sizes.from_data:
        return []
    takes = takes_of(members, program)
    gives = [node for node in members if program.kinds[node] is Kind.TENSOR]
    inputs, _ = _sized_inputs(members, gives, program)
    return [node for node in inputs if node not in takes and program.kinds[node] is not Kind.INPUT]


def _sized_inputs(
    members: Sequence[fx.Node], gives: Sequence[fx.Node], program: Program
) -> tuple[list[fx.Node], PieceSizes]:
    """Return the inputs of a piece, with donors of sizes at the end, and its symbols."""
    sizes = program.sizes
    used = [symbol for node in members for symbol in _symbols_used(node, program)]
    used += [symbol for node in gives for symbol in sizes.symbols_in(example(node))]
    inside = frozenset(members)
    made = [s for s in used if s in sizes.from_data and not is_shown(s, inside, program)]
    needed = [symbol for symbol in used if symbol not in made]
    return piece_sizes(takes_of(members, program), needed, sizes, made)


def encode_piece(members: Sequence[fx.Node], gives: Sequence[fx.Node], program: Program) -> EncodedPiece:
    """Encode a piece.

    Args:
        members: Its nodes, in the graph's order.
        gives: Those whose tensors are used outside the piece, in the graph's order.
        program: The graph.

    Raises:
        SplitError: The grammar does not have a node or value; the message names the node and the user's line.
    """
    try:
        takes, sizes = _sized_inputs(members, gives, program)
    except SplitError as error:
        made = [node for node in members if error.actual in map(str, node.meta.get("unbacked_bindings") or ())]
        where = f"At {described(made[0])}" if made else f"In the piece that begins with {described(members[0])}"
        raise SplitError(f"{where}: {error}", actual=error.actual) from error
    writer = _PieceWriter(takes, sizes, program)
    for node in members:
        writer.write(node)
    writer.leave_contexts()
    graph = PieceGraph(
        symbols=program.sizes.ranges(sizes.names),
        facts=program.sizes.facts(sizes.names),
        inputs=tuple(tensor_meta(example(node), sizes.names) for node in takes),
        aliases=_alias_groups(takes, program),
        nodes=tuple(writer.nodes),
        outputs=tuple(writer.refs[node] for node in gives),
        results=tuple(tensor_meta(example(node), sizes.names) for node in gives),
        ops=_ops_of(members),
    )
    return EncodedPiece(
        graph=graph,
        takes=tuple(takes),
        gives=tuple(gives),
        symbols={name: symbol for symbol, name in sizes.names.items()},
    )


def _symbols_used(node: fx.Node, program: Program) -> Iterator[str]:
    """Yield the symbols from which the sizes among a node's arguments are computed."""
    for leaf in leaves_of(node):
        if program.kinds[leaf] is not Kind.SIZE and not is_read(leaf, program.kinds):
            continue
        value = example(leaf)
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.SymInt):
                # a data-dependent number that is not a size of any tensor has no symbol: its node is copied
                unnamed = set(symbols_from_data(item)) - program.sizes.from_data
                yield from (symbol for symbol in program.sizes.symbols_in(item) if symbol not in unnamed)
            elif isinstance(item, torch.SymFloat | torch.SymBool):
                yield from _symbols_used(leaf, program)


def _alias_groups(takes: Sequence[fx.Node], program: Program) -> tuple[tuple[int, ...], ...]:
    groups: dict[int, list[int]] = {}
    for position, node in enumerate(takes):
        for key in program.memory.of(node):
            groups.setdefault(key, []).append(position)
    return tuple(sorted(tuple(group) for group in groups.values() if len(group) > 1))


def _ops_of(members: Sequence[fx.Node]) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in nodes_with_bodies(members):
        if isinstance(node.target, private.OpOverload | private.OpOverloadPacket):
            names = [private.op_name(op) for op in private.overloads_of(node.target)]
            found.update({name: op_digest(name) for name in names if name not in found and not is_torch_op(name)})
    return found


class _PieceWriter:
    """Appends nodes to a piece, and tracks the references of nodes and sizes."""

    def __init__(self, takes: Sequence[fx.Node], sizes: PieceSizes, program: Program) -> None:
        self.nodes: list[Node] = []
        self.refs: dict[fx.Node, str] = {node: f"%{position}" for position, node in enumerate(takes)}
        self._num_inputs = len(takes)
        self._sizes = sizes
        self._program = program
        self._known_sizes: dict[str, Json] = {}
        self._contexts: list[tuple[fx.Node, str]] = []

    def write(self, node: fx.Node) -> None:
        """Append `node`, preceded by the contexts that it runs in and the sizes that it needs."""
        self._enter(self._program.contexts[node])
        try:
            self.refs[node] = self._call(node)
        except SplitError as error:
            raise SplitError(f"{described(node)} cannot be part of a piece: {error}", actual=error.actual) from error

    def _call(self, node: fx.Node) -> str:
        return self._add(encode_node(node, self._ref))

    def _append(
        self, kind: NodeKind, target: str | None, args: Sequence[Json], kwargs: dict[str, Json] | None = None
    ) -> str:
        return self._add(Node(kind=kind, target=target, args=tuple(args), kwargs=kwargs or {}))

    def _add(self, node: Node) -> str:
        self.nodes.append(node)
        return f"%{self._num_inputs + len(self.nodes) - 1}"

    def _ref(self, leaf: Any) -> Json:
        if not isinstance(leaf, fx.Node):
            return self._size(leaf)
        kind = self._program.kinds[leaf]
        if leaf in self.refs:
            return self.refs[leaf]
        if kind is Kind.SIZE or is_read(leaf, self._program.kinds):
            return self._number(leaf)
        if kind is Kind.DROPPED and leaf.op == "get_attr":
            return encode_body(attribute_of(leaf))
        root = leaf if kind is Kind.CONSTANT else self._program.memory.root[leaf]
        return (
            encode_value(constant_of(root), self._ref)
            if self._program.kinds[root] is Kind.CONSTANT
            else self.refs[root]
        )

    def _number(self, node: fx.Node) -> Json:
        """Return the value of a SIZE node, computed from the piece's inputs."""
        value = example(node)
        if isinstance(value, torch.SymFloat | torch.SymBool) or not self._shows(value):
            # Only integers computed from shapes are sizes in the grammar; copy other arithmetic node by node.
            if node not in self.refs:
                if node.op == "placeholder":
                    raise SplitError(f"{value} comes from a number among the arguments; make it a tensor or a constant")
                self.refs[node] = self._call(node)
            return self.refs[node]
        if value is None:
            raise SplitError(f"its argument {node.name} is neither a tensor nor a number; pass one of these")
        return encode_value(value, self._size)

    def _shows(self, value: Any) -> bool:
        """Return whether the piece can read all data-dependent symbols of a number from the shapes of its inputs."""
        places = (self._sizes.places.get(self._sizes.names.get(symbol, "")) for symbol in symbols_from_data(value))
        return None not in places

    def _size(self, value: Any) -> Json:
        expr = private.expr_of(value)
        return self._computed(ast.parse(expression_text(expr, self._sizes.names), mode="eval").body)

    def _computed(self, tree: ast.expr) -> Json:
        """Return the value of an expression: a literal, or a reference to the node that computes it."""
        if isinstance(tree, ast.Constant):
            return encode_value(tree.value, self._size)
        text = ast.unparse(tree)
        if text not in self._known_sizes:
            self._known_sizes[text] = self._compute(tree)
        return self._known_sizes[text]

    def _compute(self, tree: ast.expr) -> Json:
        match tree:
            case ast.Name(id=name):
                position, dim = self._sizes.places[name]
                return self._append("size", None, (f"%{position}", dim))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
                return -value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._append("function", "_operator.neg", (self._computed(operand),))
            case ast.UnaryOp(operand=operand):
                return self._append("function", "torch.sym_not", (self._computed(operand),))
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._fold(f"_operator.{_BINARY[type(op)]}", (left, right))
            case ast.BoolOp(op=op, values=values):
                return self._fold(f"_operator.{_BINARY[type(op)]}", values)
            case ast.Call(func=ast.Name(id=name), args=[real]):
                return self._append("function", _ROUNDINGS[name], (self._computed(real),))
            case ast.Call(func=ast.Name(id=name), args=args):
                return self._fold(_EXTREMES[name], args)
        raise SplitError(f"a piece cannot compute the size {ast.unparse(tree)}; make that dimension static")

    def _fold(self, target: str, operands: Sequence[ast.expr]) -> Json:
        total = self._computed(operands[0])
        for operand in operands[1:]:
            total = self._append("function", target, (total, self._computed(operand)))
        return total

    def _enter(self, wanted: tuple[fx.Node, ...]) -> None:
        """Leave and enter autocast regions until exactly `wanted` are active, outermost first."""
        active = [node for node, _ in self._contexts]
        common = 0
        while common < min(len(active), len(wanted)) and active[common] is wanted[common]:
            common += 1
        while len(self._contexts) > common:
            self._append("function", target_name(private.EXIT_AUTOCAST), (self._contexts.pop()[1],))
        for node in wanted[common:]:
            args = tuple(encode_value(arg, self._ref) for arg in node.args)
            kwargs = {name: encode_value(node.kwargs[name], self._ref) for name in sorted(node.kwargs)}
            self._contexts.append((node, self._append("function", target_name(private.ENTER_AUTOCAST), args, kwargs)))

    def leave_contexts(self) -> None:
        """Leave all autocast regions at the end of the piece."""
        self._enter(())
