"""The split: converts Dynamo's graph to pieces and the steps that run them.

Stages: analyze the graph (`program`), cut it at the splitting ops (`cut`), resolve aliasing across the cuts (`memory`),
encode each piece (`encode`), and number the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from cgtool.errors import SplitError
from cgtool.graph.values import dim_of
from cgtool.plan.pieces import Json, NodeKind, PieceGraph, SymbolRange
from cgtool.plan.records import Step
from cgtool.split.bodies import call_of
from cgtool.split.cut import Segment, segments, splitting_nodes
from cgtool.split.data import data_dependent_nodes, is_source, with_numbers
from cgtool.split.encode import EncodedPiece, donors_of, encode_piece, takes_of
from cgtool.split.memory import Crossing, contested, hazards, view_chain
from cgtool.split.nodes import Kind, cannot_split, described, example
from cgtool.split.program import Program, read_program, refuse_shape_changes

_DATA_DEPENDENT = "The results of these ops have data-dependent sizes or numbers"
#: The kind and the target of a piece's node.
Call = tuple[NodeKind, str]


@dataclass(frozen=True, kw_only=True)
class SplitResult:
    """The pieces of a graph."""

    #: identity → graph of each unique piece.
    graphs: dict[str, PieceGraph]
    #: The calls of the pieces in order; value ids as in `cgtool.plan.records`.
    steps: tuple[Step, ...]
    #: Symbol of the trace → the variant's symbol, in order.
    symbol_names: dict[str, str]
    #: The variant's symbols and their ranges.
    symbols: tuple[SymbolRange, ...]
    #: For each output of the graph: ["v", value id], ["expr", text] or ["const", value].
    outputs: tuple[Json, ...]
    splitting_ops: tuple[str, ...] = ()
    #: Relations of the trace that contain data-dependent sizes.
    relations_from_data: tuple[str, ...] = ()
    #: Reason → the ops that run between pieces although they are not splitting ops, with their lines.
    apart: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: piece index → why a piece without a splitting op must run eagerly.
    eager_pieces: dict[int, str] = field(default_factory=dict)
    #: Positions of the tensor placeholders that the graph writes to.
    mutated_inputs: tuple[int, ...] = ()
    #: node name → piece index, of every node that runs.
    assignment: dict[str, int] = field(default_factory=dict)


def split_graph(
    gm: fx.GraphModule,
    *,
    splitting_ops: Sequence[str] | None,
    refused: Callable[[PieceGraph], Mapping[Call, str]] = lambda _: {},
) -> SplitResult:
    """Split a full graph of Dynamo's, traced under `no_grad`, at splitting ops.

    Running the steps computes the same results as the graph, which is not changed.

    Args:
        gm: The graph.
        splitting_ops: Names of ops, see `cgtool.split.cut`. None means known and registered ops, as far as the graph
            contains them.
        refused: Returns the calls in a piece that must run between pieces, too, each with its reason.

    Raises:
        UnmatchedSplittingOpError: The graph does not contain a splitting op.
        SplitError: A piece cannot contain a node; the message names it and the user's line.
    """
    program = read_program(gm)
    kinds = program.kinds
    at, names = splitting_nodes(kinds, splitting_ops)
    from_data = data_dependent_nodes(kinds)
    apart: dict[fx.Node, str] = {}
    while True:
        cut = segments(program, at | from_data | apart.keys())
        result = _split_at(cut, program)
        more = _refused_nodes(cut, result, refused)
        if more.keys() <= apart.keys():
            break
        apart = more | apart
    noted: dict[str, dict[str, None]] = {}
    for node in kinds:
        why = _DATA_DEPENDENT if node in from_data and is_source(node) else apart.get(node)
        if why is not None:
            noted.setdefault(why, {})[described(node)] = None
    return replace(result, splitting_ops=names, apart={why: tuple(ops) for why, ops in noted.items()})


def _refused_nodes(
    cut: Sequence[Segment], result: SplitResult, refused: Callable[[PieceGraph], Mapping[Call, str]]
) -> dict[fx.Node, str]:
    """Return the nodes of compiled pieces whose calls are refused, with the reasons."""
    found: dict[fx.Node, str] = {}
    for step, segment in zip(result.steps, cut, strict=True):
        if not step.splitting and step.piece not in result.eager_pieces:
            calls = refused(result.graphs[step.graph])
            found.update((node, calls[call_of(node)]) for node in segment.nodes if calls and call_of(node) in calls)
    return found


def _split_at(cut: Sequence[Segment], program: Program) -> SplitResult:
    piece_of = {node: index for index, segment in enumerate(cut) for node in segment.nodes}
    refuse_shape_changes(program, piece_of)
    results = (value for value in program.output if isinstance(value, fx.Node))
    returned = {program.memory.root[node] for node in results if program.kinds[node] in (Kind.TENSOR, Kind.INPUT)}
    members = [with_numbers(segment.nodes, program) for segment in cut]
    crossings = _crossings(cut, members, returned, program)
    keys = contested(crossings, program.memory)
    if keys and _sink_views(members, crossings, keys, program):
        crossings = _crossings(cut, members, returned, program)
        keys = contested(crossings, program.memory)
    reasons = hazards(crossings, program.memory, keys)
    pieces = [encode_piece(members[c.piece], c.gives, program) for c in crossings]
    reasons.update(_idle(crossings, pieces, reasons, program))
    steps, ids = _numbered(pieces, cut, program)
    written = set(program.memory.writers)
    symbol_names = {s: name for s, name in program.sizes.names.items() if s not in program.sizes.from_data}
    return SplitResult(
        graphs={step.graph: piece.graph for step, piece in zip(steps, pieces, strict=True)},
        steps=steps,
        symbol_names=symbol_names,
        symbols=program.sizes.ranges(symbol_names),
        relations_from_data=program.sizes.relations_from_data(),
        outputs=tuple(_output(value, ids, program) for value in program.output),
        eager_pieces=dict(sorted(reasons.items())),
        mutated_inputs=tuple(i for i, node in enumerate(program.inputs) if program.memory.of(node) & written),
        assignment={node.name: index for node, index in piece_of.items()},
    )


def _crossings(
    cut: Sequence[Segment], members: Sequence[Sequence[fx.Node]], returned: set[fx.Node], program: Program
) -> list[Crossing]:
    takes = [[*takes_of(nodes, program), *donors_of(nodes, program)] for nodes in members]
    wanted = returned.union(*takes)
    # A sunk view is a member of several pieces; its own piece gives it to the others.
    made: set[fx.Node] = set()
    found = []
    for index, segment in enumerate(cut):
        gives = tuple(node for node in segment.nodes if node in wanted and node not in made)
        made.update(gives)
        found.append(
            Crossing(
                piece=index,
                splitting=segment.splitting,
                members=frozenset(members[index]),
                takes=tuple(takes[index]),
                gives=gives,
            )
        )
    return found


def _sink_views(members: list[list[fx.Node]], crossings: Sequence[Crossing], keys: set[int], program: Program) -> bool:
    """Let pieces that take a view of contested memory take the base instead, and recompute the view."""
    base_of: dict[int, fx.Node] = {}
    for node in program.kinds:
        for key in program.memory.of(node):
            if node in program.memory.root:
                base_of.setdefault(key, node)
    changed = False
    for crossing in crossings:
        for node in crossing.takes:
            storages = program.memory.of(node)
            if len(storages) != 1 or not storages <= keys:
                continue
            base = base_of[next(iter(storages))]
            chain = view_chain(node, program.kinds, program.memory, base)
            if chain:
                known = set(members[crossing.piece])
                members[crossing.piece].extend(n for n in chain if n not in known)
                members[crossing.piece].sort(key=program.sizes.order.__getitem__)
                changed = True
    return changed


def _idle(
    crossings: Sequence[Crossing], pieces: Sequence[EncodedPiece], known: Mapping[int, str], program: Program
) -> dict[int, str]:
    """Return the pieces without outputs or writes to memory outside, of which a compiler would leave nothing."""
    found = {}
    for crossing, piece in zip(crossings, pieces, strict=True):
        if not crossing.splitting and not piece.gives and crossing.piece not in known:
            taken = {key for node in piece.takes for key in program.memory.of(node)}
            written = {key for key, nodes in program.memory.writers.items() if crossing.members.intersection(nodes)}
            if not taken & written:
                found[crossing.piece] = "its results are not used"
    return found


def _numbered(
    pieces: Sequence[EncodedPiece], cut: Sequence[Segment], program: Program
) -> tuple[tuple[Step, ...], dict[fx.Node, int]]:
    ids = {node: index for index, node in enumerate(program.inputs)}
    steps = []
    count = len(ids)
    for index, piece in enumerate(pieces):
        for node in piece.gives:
            ids[node] = count
            count += 1
        steps.append(
            Step(
                piece=index,
                splitting=cut[index].splitting,
                graph=piece.graph.identity(),
                symbols={name: program.sizes.names[symbol] for name, symbol in piece.symbols.items()},
                inputs=tuple(ids[node] for node in piece.takes),
                outputs=tuple(ids[node] for node in piece.gives),
            )
        )
    return tuple(steps), ids


def _output(value: Any, ids: Mapping[fx.Node, int], program: Program) -> Json:
    if not isinstance(value, fx.Node):
        return _number(value, program)
    kind = program.kinds[value]
    if kind in (Kind.TENSOR, Kind.INPUT):
        root = program.memory.root[value]
        if root not in ids:
            raise cannot_split(value, "the model returns a constant of the graph; return a clone of it")
        return ["v", ids[root]]
    if kind is Kind.SIZE:
        try:
            return _number(example(value), program)
        except SplitError as error:
            raise cannot_split(value, f"the model returns it, and {error}") from error
    raise cannot_split(value, "the model returns its result, which is neither a tensor nor a size; return tensors")


def _number(value: Any, program: Program) -> Json:
    if isinstance(value, torch.SymInt):
        dim = dim_of(value, program.sizes.names)
        return ["const", dim] if isinstance(dim, int) else ["expr", dim]
    if value is None or type(value) in (bool, int, float, str):
        return ["const", value]
    raise SplitError(f"a plan cannot store a {type(value).__name__}; return a tensor or an integer")
