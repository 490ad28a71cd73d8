"""Where the graph is cut: nodes in order become segments, each splitting or to be compiled.

Nodes keep their order, so effects keep theirs. Neighbouring splitting ops are one piece; a segment that only allocates
or only reshapes joins its neighbour; a getitem stays with its producer. Owns nothing of memory or sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from cgtool.split.alias import Memory
from cgtool.split.nodes import RUNS, Kind, example, is_getitem_of_bundle

_ALLOCATES = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"),
    }
)
#: These give a view or, where there is none, a copy: one kernel at most, the same in eager.
_RESHAPES = frozenset({"reshape", "reshape_as", "flatten", "unflatten", "contiguous", "clone", "ravel"})


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Nodes that run together, in the graph's order."""

    splitting: bool
    nodes: tuple[fx.Node, ...]


def segments(kinds: dict[fx.Node, Kind], splitting: set[fx.Node], memory: Memory) -> list[Segment]:
    """Cut the graph.

    Args:
        kinds: Every node in order, and its kind.
        splitting: The nodes that are splitting ops.
        memory: Who shares memory: what makes a reshape a reshape.

    Returns:
        Segments in order; no two neighbours are of one sort.
    """
    owner: dict[fx.Node, int] = {}
    runs: list[tuple[bool, list[fx.Node]]] = []
    for node, kind in kinds.items():
        if kind not in RUNS:
            continue
        if is_getitem_of_bundle(node, kinds):
            owner[node] = owner[node.args[0]]  # type: ignore[index]  # a node: asked just now
            runs[owner[node]][1].append(node)
            continue
        cut = node in splitting
        if not runs or runs[-1][0] is not cut:
            runs.append((cut, []))
        owner[node] = len(runs) - 1
        runs[-1][1].append(node)
    return _joined([Segment(splitting=cut, nodes=tuple(nodes)) for cut, nodes in runs], memory, kinds)


def _joined(cut: list[Segment], memory: Memory, kinds: dict[fx.Node, Kind]) -> list[Segment]:
    """Give segments that are not worth a piece to a splitting neighbour, then join neighbours of one sort."""
    if not any(segment.splitting for segment in cut):
        return cut
    joined: list[Segment] = []
    for segment in cut:
        splitting = segment.splitting or all(_is_trivial(node, memory) for node in segment.nodes)
        if joined and joined[-1].splitting is splitting:
            joined[-1] = Segment(splitting=splitting, nodes=(*joined[-1].nodes, *segment.nodes))
        else:
            joined.append(Segment(splitting=splitting, nodes=segment.nodes))
    order = {node: index for index, node in enumerate(kinds)}
    return [Segment(splitting=s.splitting, nodes=tuple(sorted(s.nodes, key=order.__getitem__))) for s in joined]


def _is_trivial(node: fx.Node, memory: Memory) -> bool:
    """Return whether `node` computes nothing: it allocates, reshapes or views, and writes nowhere."""
    if any(node in memory.writers.get(key, ()) for argument in node.all_input_nodes for key in memory.of(argument)):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name.partition(".")[0] in _ALLOCATES | _RESHAPES:
        return True
    value = example(node)
    shared = {key for argument in node.all_input_nodes for key in memory.of(argument)}
    return isinstance(value, torch.Tensor | tuple | list) and bool(memory.of(node)) and memory.of(node) <= shared
