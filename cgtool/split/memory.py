"""Aliasing and mutation: which values share memory, which nodes write to it, and where a cut would be incorrect.

A compiled piece preserves values and writes to its inputs. It may not preserve that two of its inputs, two of its
outputs, or an output and an input share memory. That matters only if the memory is written to:

- *inside*: two inputs of a piece share memory that the piece writes to;
- *later*: an output of a piece shares memory with another value outside, and a later piece writes to that memory.

If possible, such views are recomputed by the pieces that use them (`view_chain`), so that only the base crosses.
Otherwise the piece runs eagerly (`hazards`). An `out` buffer that one piece allocates and the next one fills is no
hazard: nothing else shares its memory.

Unknown ops are assumed to write: a false hazard costs speed, a missed one correctness. The sources of information are:

- the schema of the op, or of the ATen op of the same name, for the overloads that the call can mean;
- names: methods and functions that end in one underscore, `out=`, `inplace=True`, `operator.setitem` and `i...`;
- ops that write although their schema does not declare it (the running statistics of batch norm);
- version counters: memory that was written during the trace by none of these was written by the Python functions that
  took it.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from cgtool.guards._torch import schema_of
from cgtool.split import _torch as private
from cgtool.split.bodies import bodies_of
from cgtool.split.nodes import (
    RUNS,
    Kind,
    cannot_split,
    constant_of,
    described,
    example,
    kind_of,
    short_name,
    tensors_in,
)

#: Functions that return a copy during the trace, but may return their argument in eager mode.
_MAYBE_ITS_ARGUMENT = frozenset({"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"})


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The storages of all values, and the nodes that write to them.

    Args:
        storages: node → the storages of its result; several for a bundle.
        root: tensor node → the first node that returned the same tensor object (in-place ops return their argument).
        writers: storage → the nodes that write to it, in order.
    """

    storages: dict[fx.Node, frozenset[int]]
    root: dict[fx.Node, fx.Node]
    writers: dict[int, list[fx.Node]] = field(default_factory=dict)

    def of(self, node: fx.Node) -> frozenset[int]:
        """Return the storages of the result of `node`."""
        return self.storages.get(node, frozenset())


def read_memory(kinds: dict[fx.Node, Kind]) -> Memory:
    """Determine which values of the graph share memory, and which nodes write to it.

    Raises:
        SplitError: A node writes to a constant of the graph.
    """
    join = _UnionFind()
    memory = Memory(storages={}, root={})
    first: dict[int, fx.Node] = {}
    raw: dict[fx.Node, list[int]] = {}
    for node, kind in kinds.items():
        value = example(node)
        if kind is Kind.CONSTANT and value is None:
            value = constant_of(node)
        tensors = list(tensors_in(value))
        raw[node] = keys = [_key(tensor) for tensor in tensors]
        for tensor in tensors_in(node.meta.get("seen_before")):
            join.join(keys[0], _key(tensor))
        if isinstance(value, torch.Tensor):
            memory.root[node] = first.setdefault(id(value), node)
        for argument in _shares_with(node, kind):
            for key in keys:
                for other in raw.get(argument, ()):
                    join.join(key, other)
    memory.storages.update({node: frozenset(map(join.find, keys)) for node, keys in raw.items()})
    for node, kind in kinds.items():
        if kind in RUNS:
            for argument in written_by(node):
                _note(memory, node, memory.of(argument))
    for node, key in unexplained_writes(kinds, memory.storages, set(memory.writers)):
        _note(memory, node, [key])
    _refuse_written_constants(kinds, memory)
    return memory


def _note(memory: Memory, node: fx.Node, keys: Iterable[int]) -> None:
    for key in keys:
        known = memory.writers.setdefault(key, [])
        if node not in known:
            known.append(node)


def _key(tensor: torch.Tensor) -> int:
    key = private.storage_key(tensor)
    return -id(tensor) if key is None else key


def _shares_with(node: fx.Node, kind: Kind) -> list[fx.Node]:
    """Return the arguments whose memory the result may share even if the fake tensors do not."""
    if kind not in RUNS:
        return []
    if getattr(node.target, "__name__", node.target) in _MAYBE_ITS_ARGUMENT:
        return node.all_input_nodes[:1]
    if not isinstance(node.target, private.OpOverload | private.OpOverloadPacket):
        return []
    if private.op_name(node.target).startswith("aten::"):
        return []
    shared: list[fx.Node] = []
    for op in private.overloads_of(node.target):
        schema = schema_of(op)
        if not any(result.alias_info is not None for result in schema.returns):
            continue
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None:
                value = node.kwargs.get(argument.name, node.args[index] if index < len(node.args) else None)
                fx.map_arg(value, shared.append)
    return shared


def _refuse_written_constants(kinds: dict[fx.Node, Kind], memory: Memory) -> None:
    for node, kind in kinds.items():
        for key in memory.of(node) if kind is Kind.CONSTANT else ():
            for writer in memory.writers.get(key, ()):
                raise cannot_split(writer, "it writes to a constant of the graph; register that tensor as a buffer")


class _UnionFind:
    """Union-find over storages."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def find(self, key: int) -> int:
        while key in self._parent:
            key = self._parent[key]
        return key

    def join(self, one: int, other: int) -> None:
        one, other = self.find(one), self.find(other)
        if one != other:
            self._parent[max(one, other)] = min(one, other)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The nodes of a piece, and those whose values it takes from outside and gives to other pieces."""

    piece: int
    splitting: bool
    members: frozenset[fx.Node]
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]


def contested(crossings: list[Crossing], memory: Memory) -> set[int]:
    """Return the storages that several crossing values share and that another piece than their producer writes to."""
    values: dict[int, set[fx.Node]] = {}
    makers: dict[int, int] = {}
    for crossing in crossings:
        for node in (*crossing.takes, *crossing.gives):
            for key in memory.of(node):
                values.setdefault(key, set()).add(node)
        for node in crossing.members:
            for key in memory.of(node):
                makers.setdefault(key, crossing.piece)
    found: set[int] = set()
    for key, nodes in values.items():
        if len(nodes) > 1 and memory.writers.get(key):
            from_outside = any(node.op == "placeholder" for node in nodes)
            for crossing in crossings:
                writes = any(writer in crossing.members for writer in memory.writers[key])
                if writes and (from_outside or crossing.piece != makers[key]):
                    found.add(key)
    return found


def view_chain(node: fx.Node, kinds: dict[fx.Node, Kind], memory: Memory, base: fx.Node) -> list[fx.Node] | None:
    """Return the nodes that compute `node` from `base` by views only, in order, or None."""
    writers = {writer for key in memory.of(base) for writer in memory.writers.get(key, ())}
    chain: list[fx.Node] = []
    while node is not base:
        tensors = [
            argument
            for argument in node.all_input_nodes
            if memory.of(argument) and kinds[argument] is not Kind.CONSTANT
        ]
        is_view = kinds[node] in (Kind.TENSOR, Kind.BUNDLE) and len(tensors) == 1 and node not in writers
        if not is_view or memory.of(node) != memory.of(tensors[0]) or memory.of(node) != memory.of(base):
            return None
        chain.append(node)
        node = memory.root.get(tensors[0], tensors[0])
    return chain[::-1]


def hazards(crossings: list[Crossing], memory: Memory, keys: set[int]) -> dict[int, str]:
    """Return the pieces that must run eagerly instead of compiled, with reasons; `keys` are the contested storages."""
    reasons: dict[int, str] = {}
    piece_of: dict[fx.Node, int] = {}
    for crossing in crossings:
        for node in crossing.members:
            piece_of.setdefault(node, crossing.piece)
    for crossing in crossings:
        # Keys are addresses, so order them by their first writer to report the same reason in every process.
        for key in sorted(keys, key=lambda k: (piece_of[memory.writers[k][0]], memory.writers[k][0].name)):
            reason = None if crossing.splitting else _hazard(crossing, memory, key, piece_of)
            if reason is not None:
                reasons.setdefault(crossing.piece, reason)
    return reasons


def _hazard(crossing: Crossing, memory: Memory, key: int, piece_of: dict[fx.Node, int]) -> str | None:
    takes = [node for node in crossing.takes if key in memory.of(node)]
    gives = [node for node in crossing.gives if key in memory.of(node)]
    inside = [writer for writer in memory.writers[key] if piece_of[writer] == crossing.piece]
    later = [writer for writer in memory.writers[key] if piece_of[writer] > crossing.piece]
    if inside and len(takes) > 1:
        return (
            f"{described(inside[0])} writes to memory that {len(takes)} inputs of this piece share: "
            f"{', '.join(node.name for node in takes)}"
        )
    if later and (len(gives) > 1 or (gives and takes)):
        shared = [*takes, *gives]
        return (
            f"{', '.join(node.name for node in shared)} share memory, to which {described(later[0])} writes in a "
            "later piece"
        )
    return None


_IN_PLACE_OPERATORS = frozenset(
    {
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "iconcat", "setitem", "delitem"),
    }
)
_IN_PLACE_METHODS = frozenset({f"__{name}__" for name in _IN_PLACE_OPERATORS})
#: Functions that in training write to the arguments in `_STATISTICS`, regardless of their schema → the position of the
#: argument that selects training.
_RUNNING_STATISTICS = {"batch_norm": 5, "instance_norm": 5, "native_batch_norm": 5, "_native_batch_norm_legit": 5}
_STATISTICS = ("running_mean", "running_var", 1, 2, 3, 4)


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of `node` whose memory it writes to, as far as the call itself shows."""
    if any(_writes_to_inputs(body) for body in bodies_of(node)):
        return node.all_input_nodes  # the mapping of arguments to inputs of the body depends on the op
    found: dict[fx.Node, None] = {}
    for value in _written_values(node):
        leaves: list[fx.Node] = []
        fx.map_arg(value, leaves.append)
        found.update((leaf, None) for leaf in leaves if any(True for _ in tensors_in(example(leaf))))
    return list(found)


def _writes_to_inputs(body: fx.GraphModule) -> bool:
    memory = read_memory({node: kind_of(node) for node in body.graph.nodes if node.op != "output"})
    placeholders = body.graph.find_nodes(op="placeholder")
    return any(memory.writers.get(key) for node in placeholders for key in memory.of(node))


def changes_shape(node: fx.Node) -> bool:
    """Return whether `node` changes the shape or strides of an argument in place (`unsqueeze_`, `resize_`, `t_`)."""
    return any(torch.Tag.inplace_view in op.tags or op.__name__.startswith(("resize_", "set_")) for op in _ops_of(node))


def unexplained_writes(
    kinds: dict[fx.Node, Kind], storage_of: dict[fx.Node, frozenset[int]], written: set[int]
) -> Iterator[tuple[fx.Node, int]]:
    """Yield (node, storage) for memory without a known writer, with each function that may have written to it."""
    suspects: set[int] = set()
    for node, kind in kinds.items():
        if kind in (Kind.INPUT, Kind.TENSOR):
            keys = storage_of.get(node, frozenset())
            if not keys & written and any(private.version_of(tensor) > 0 for tensor in tensors_in(example(node))):
                suspects |= keys
    if not suspects:
        return
    for node, kind in kinds.items():
        if kind in RUNS and isinstance(node.target, types.FunctionType):
            for argument in node.all_input_nodes:
                for key in storage_of.get(argument, frozenset()) & suspects:
                    yield node, key


def _written_values(node: fx.Node) -> Iterator[Any]:
    args, kwargs = node.args, node.kwargs
    name = short_name(node)
    yield kwargs.get("out")
    if args and _writes_to_first(node, name):
        yield args[0]
    if name in _RUNNING_STATISTICS and _trains(node, name):
        for place in _STATISTICS:
            yield kwargs.get(place) if isinstance(place, str) else _at(args, place)
    for op in _ops_of(node):
        for index, argument in enumerate(schema_of(op).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield kwargs.get(argument.name) if argument.name in kwargs else _at(args, index)


def _at(args: tuple[Any, ...], index: int) -> Any:
    return args[index] if index < len(args) else None


def _writes_to_first(node: fx.Node, name: str) -> bool:
    if name.endswith("_") and not name.endswith("__"):
        # `and_` and the like are plain operators, whose underscore avoids a keyword
        return getattr(operator, name, None) is not node.target
    if node.op == "call_method":
        return name in _IN_PLACE_METHODS
    if name in _IN_PLACE_OPERATORS:
        return getattr(operator, name, None) is node.target
    inplace = node.kwargs.get("inplace")
    if inplace is None and isinstance(node.target, types.FunctionType):
        position = _position_of_inplace(node.target)
        inplace = _at(node.args, position) if position is not None else None
    return inplace is not None and inplace is not False


@cache
def _position_of_inplace(function: types.FunctionType) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def _trains(node: fx.Node, name: str) -> bool:
    for word in ("training", "train", "use_input_stats"):
        if word in node.kwargs:
            return node.kwargs[word] is not False
    position = _RUNNING_STATISTICS[name]
    return len(node.args) > position and node.args[position] is not False


def _ops_of(node: fx.Node) -> list[Any]:
    """Return the overloads that a call can mean: its own, or those of the ATen op of the same name."""
    target = node.target
    if isinstance(target, private.OpOverload):
        return [target]
    if isinstance(target, private.OpOverloadPacket):
        overloads = private.overloads_of(target)
    elif node.op == "call_method" or not isinstance(target, types.FunctionType):
        overloads = _aten_overloads(short_name(node))
    else:
        return []
    return overloads if len(overloads) == 1 else [op for op in overloads if _can_mean(op, node)]


@cache
def _aten_overloads(short: str) -> list[Any]:
    packet = private.aten_packet(short)
    return [] if packet is None else private.overloads_of(packet)


def _can_mean(op: Any, node: fx.Node) -> bool:
    """Return whether a call has only keywords of an overload, and all of its required ones (`out`)."""
    arguments = schema_of(op).arguments
    if not set(node.kwargs) <= {argument.name for argument in arguments} | {"input", "axis", "keepdims"}:
        return False
    return all(
        not argument.kwarg_only or argument.has_default_value() or argument.name in node.kwargs
        for argument in arguments
    )
