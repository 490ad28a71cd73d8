"""Which pieces must run as they stand whatever the compiler could make of them, and why.

A compiler draws random numbers of its own, which are not those that eager draws from torch's generator; and it looks
into a custom op that is composed of others, whose Python nobody can look at again at load.
"""

from __future__ import annotations

import torch

from cgtool.compiler import _torch
from cgtool.compiler.fx_piece import rebuild
from cgtool.guards.ops import is_composite
from cgtool.model import is_torchs_own
from cgtool.plan.pieces import PieceGraph


def why_as_it_stands(graph: PieceGraph) -> str | None:
    """Return why a piece may not be compiled, or None.

    Raises:
        CompileError: The graph cannot be rebuilt.
    """
    composed = [name for name in graph.ops if not is_torchs_own(name) and is_composite(name)]
    if composed:
        return (
            f"the op {composed[0]} is composed of other ops (CompositeImplicitAutograd), by code that cannot be watched"
        )
    with _torch.SeenOps() as seen:
        rebuild(graph)
    draws = dict.fromkeys(str(op.overloadpacket) for op in seen.ops if torch.Tag.nondeterministic_seeded in op.tags)
    if draws:
        return f"it draws random numbers ({', '.join(draws)}), and compiled code would draw others than eager does"
    return None
