"""The constant tensors within a piece. A compiled piece takes them as inputs, after its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cgtool.graph.values import decode_value
from cgtool.plan.pieces import Json, PieceGraph


def constants_of(graph: PieceGraph) -> list[torch.Tensor]:
    """Return the constant tensors of a piece, in the order in which its nodes use them.

    A compiled piece takes them after its inputs: what torch makes of constants inside a module does not come back from
    a saved artifact.

    Raises:
        ArtifactError: The graph holds a value outside the grammar.
    """
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    for node in graph.nodes:
        for data in (*node.args, *node.kwargs.values()):
            if _may_hold(data):
                with_constants(decode_value(data, lambda ref: ref), note)
    return found


def _may_hold(data: Json) -> bool:
    """Return whether an encoded value has a constant tensor in it: decoding costs ten times as much as this look."""
    if type(data) is list:
        return any(map(_may_hold, data))
    if type(data) is dict:
        return "const" in data or any(map(_may_hold, data.values()))
    return False


def with_constants(value: Any, keep: Callable[[torch.Tensor], Any]) -> Any:
    """Return a decoded value with each constant tensor in it replaced by what `keep` makes of it."""
    if isinstance(value, torch.Tensor):
        return keep(value)
    if isinstance(value, list | tuple):
        return type(value)(with_constants(item, keep) for item in value)
    if isinstance(value, dict):
        return {key: with_constants(item, keep) for key, item in value.items()}
    return value
