"""The cut: matching of splitting ops by name, and the segments between them.

Ops are named as follows::

    ns::op   ns.op   torch.ops.ns.op        a custom op or an ATen op, any overload
    any of these with .overload             that overload only
    torch.nn.functional.f, torch.f          a Python function or builtin that a Dynamo graph calls
    torch.Tensor.f                          a method

ATen names match the builtins and methods that call them (`aten::mm` matches `torch.mm(a, b)` and `a.mm(b)`).

Nodes, and so their side effects, keep their order. Adjacent splitting ops form one piece, a segment that only allocates
or reshapes joins its neighbor, and a getitem stays with its producer. An op whose body contains a splitting op is a
splitting op.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from torch import fx

from cgtool.errors import SplitError, UnmatchedSplittingOpError
from cgtool.graph.targets import target_name
from cgtool.ops import COLLECTIVE_OPS, KNOWN_ATTENTION_OPS, registered_splitting_ops
from cgtool.split import _torch as private
from cgtool.split.bodies import nodes_with_bodies
from cgtool.split.memory import Memory
from cgtool.split.nodes import RUNS, Kind, example, is_getitem_of_bundle, short_name
from cgtool.split.program import Program

_MAX_LISTED = 20
#: Python operators whose ATen op has a different name.
_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and_": "__and__", "or_": "__or__"}


def splitting_nodes(kinds: dict[fx.Node, Kind], names: Sequence[str] | None) -> tuple[set[fx.Node], tuple[str, ...]]:
    """Return the nodes to split at, and the names that matched, sorted, as `ns::op` or dotted names.

    Args:
        kinds: Every node of the graph and its kind.
        names: The ops to split at. None means known and registered ops, as far as the graph contains them.

    Raises:
        UnmatchedSplittingOpError: A name in `names` matches no node.
    """
    running = {
        node: frozenset().union(*map(names_of, nodes_with_bodies([node])))
        for node, kind in kinds.items()
        if kind in RUNS
    }
    wanted = (*KNOWN_ATTENTION_OPS, *COLLECTIVE_OPS, *registered_splitting_ops()) if names is None else tuple(names)
    splitting: set[fx.Node] = set()
    matched: set[str] = set()
    for name in wanted:
        spellings = _spellings(name)
        nodes = [node for node, node_names in running.items() if spellings & node_names]
        if names is None and splitting.issuperset(nodes):
            continue  # not in the graph, or another name of the same ops
        if nodes:
            splitting.update(nodes)
            matched.update(sorted(spellings & running[nodes[0]])[:1])
        elif names is not None:
            raise _unmatched(name, running.values())
    return splitting, tuple(sorted(matched))


@cache
def _spellings(name: str) -> frozenset[str]:
    """Return the canonical names that a user's name may mean."""
    plain = name.strip().removeprefix("torch.ops.")
    if "::" in plain:
        return frozenset({plain})
    namespace, _, rest = plain.partition(".")
    if name.strip().startswith("torch.ops."):
        return frozenset({f"{namespace}::{rest}"})
    return frozenset({plain, f"{namespace}::{rest}"} if rest else {plain})


def names_of(node: fx.Node) -> frozenset[str]:
    """Return every canonical name of the op that `node` calls."""
    if node.op == "call_method":
        return frozenset({f"torch.Tensor.{node.target}"}) | _aten_names(str(node.target))
    if node.op != "call_function":
        return frozenset()
    return _names_of_function(node.target)


@cache
def _names_of_function(target: Any) -> frozenset[str]:
    if isinstance(target, private.OpOverload):
        name = private.op_name(target)
        return frozenset({name, name.rpartition(".")[0]})
    if isinstance(target, private.OpOverloadPacket):
        name = private.op_name(target)
        return frozenset({name, *(f"{name}.{overload}" for overload in private.overload_names(target))})
    short = getattr(target, "__name__", "")
    names = {f"{getattr(target, '__module__', None) or 'torch'}.{short}"}
    try:
        names.add(target_name(target))
    except SplitError:
        return frozenset(names)
    if getattr(F, short, None) is target:
        names.add(f"torch.nn.functional.{short}")
    if getattr(operator, short, None) is target:
        return frozenset(names) | _aten_names(_OPERATORS.get(short, short))
    return frozenset(names) | _aten_names(short)


def _aten_names(short: str) -> frozenset[str]:
    packet = private.aten_packet(short)
    if packet is None:
        return frozenset()
    return frozenset({f"aten::{short}", *(f"aten::{short}.{overload}" for overload in private.overload_names(packet))})


def _unmatched(name: str, graph: Iterable[frozenset[str]]) -> UnmatchedSplittingOpError:
    shown = sorted({_shown(names) for names in graph if names}, key=lambda n: (_is_common(n), n))
    everything = sorted({spelling for names in graph for spelling in names})
    near = difflib.get_close_matches(name.replace("::", "."), [n.replace("::", ".") for n in everything], n=1)
    hint = next((f" Did you mean {n}?" for n in everything if near and n.replace("::", ".") == near[0]), "")
    listed = ", ".join(shown[:_MAX_LISTED]) or "none"
    more = f" and {len(shown) - _MAX_LISTED} more" if len(shown) > _MAX_LISTED else ""
    return UnmatchedSplittingOpError(
        f"The graph does not contain the splitting op {name!r}.{hint} Its ops are: {listed}{more}. "
        f"Name one of these, or leave splitting_ops out to split at the known attention ops.",
        expected=name,
        actual=tuple(shown),
    )


def _shown(names: frozenset[str]) -> str:
    """Return the name of an op for the error: the dotted name of a function, else `ns::op`."""
    dotted = sorted((n for n in names if "::" not in n), key=lambda n: (not _is_functional(n), len(n), n))
    return dotted[0] if dotted else min(names, key=len)


def _is_functional(name: str) -> bool:
    return name.startswith("torch.nn.functional.")


def _is_common(name: str) -> tuple[bool, bool, bool]:
    """Sort custom ops first, then functions of torch.nn.functional, then other functions and ops, then operators."""
    is_custom = "::" in name and not name.startswith("aten::")
    return not is_custom, not _is_functional(name), not name.startswith(("torch.", "aten::"))


_ALLOCATES = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"),
    }
)
#: Ops that return a view or a copy: at most one kernel, the same as in eager.
_RESHAPES = frozenset({"reshape", "reshape_as", "flatten", "unflatten", "contiguous", "clone", "ravel"})


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive nodes of the graph that run as one piece."""

    splitting: bool
    nodes: tuple[fx.Node, ...]


def segments(program: Program, splitting: set[fx.Node]) -> list[Segment]:
    """Cut the graph into segments, alternately splitting and compiled ones."""
    owner: dict[fx.Node, int] = {}
    runs: list[tuple[bool, list[fx.Node]]] = []
    for node, kind in program.kinds.items():
        if kind not in RUNS:
            continue
        if is_getitem_of_bundle(node, program.kinds):
            owner[node] = owner[node.args[0]]  # type: ignore[index]  # a node, as just checked
            runs[owner[node]][1].append(node)
            continue
        cut = node in splitting
        if not runs or runs[-1][0] is not cut:
            runs.append((cut, []))
        owner[node] = len(runs) - 1
        runs[-1][1].append(node)
    return _joined([Segment(splitting=cut, nodes=tuple(nodes)) for cut, nodes in runs], program)


def _joined(cut: list[Segment], program: Program) -> list[Segment]:
    """Move trivial segments into an adjacent splitting segment, then join adjacent segments of one kind."""
    if not any(segment.splitting for segment in cut):
        return cut
    joined: list[Segment] = []
    for segment in cut:
        splitting = segment.splitting or all(_is_trivial(node, program.memory) for node in segment.nodes)
        if joined and joined[-1].splitting is splitting:
            joined[-1] = Segment(splitting=splitting, nodes=(*joined[-1].nodes, *segment.nodes))
        else:
            joined.append(Segment(splitting=splitting, nodes=segment.nodes))
    place = program.sizes.order.__getitem__
    return [Segment(splitting=s.splitting, nodes=tuple(sorted(s.nodes, key=place))) for s in joined]


def _is_trivial(node: fx.Node, memory: Memory) -> bool:
    """Return whether `node` only allocates, reshapes or views, and writes to nothing."""
    if any(node in memory.writers.get(key, ()) for argument in node.all_input_nodes for key in memory.of(argument)):
        return False
    if short_name(node) in _ALLOCATES | _RESHAPES:
        return True
    value = example(node)
    shared = {key for argument in node.all_input_nodes for key in memory.of(argument)}
    return isinstance(value, torch.Tensor | tuple | list) and bool(memory.of(node)) and memory.of(node) <= shared
