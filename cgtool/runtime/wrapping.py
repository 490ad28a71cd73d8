"""What those who wrap the compiled pieces of a loaded model are told of each piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cgtool.graph.expressions import symbols_of
from cgtool.plan.pieces import PieceGraph
from cgtool.plan.records import Variant
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.pieces import op_names


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A compiled piece of a variant.

    Args:
        name: What errors call it.
        dynamic_dims: Names of the dimensions of its inputs that change from call to call.
        is_static: Whether the variant serves one size only, so that no piece has a dynamic dimension.
        returned_by_ops: Its inputs that splitting ops return, by position: position → op. They lie anywhere, unlike
            tensors that a piece allocated and such an op wrote into.
    """

    name: str
    dynamic_dims: tuple[str, ...]
    is_static: bool = False
    returned_by_ops: Mapping[int, str]


#: Takes a piece and its function, returns the function to call in its place.
WrapPiece = Callable[[Piece, Boxed], Boxed]


def pieces_of(variant: Variant, graphs: Mapping[str, PieceGraph]) -> list[Piece]:
    """Return the compiled pieces of a variant in the order of its steps."""
    names = {symbol: name for name, symbols in variant.dims.items() for symbol in symbols}
    returned: dict[int, str] = {}
    pieces = []
    for step in variant.steps:
        graph = graphs[step.graph]
        if step.splitting or step.piece < 0:
            returned |= dict.fromkeys(step.outputs, ", ".join(op_names(graph)[:2]))
            continue
        symbols = (symbol for text in step.symbols.values() for symbol in symbols_of(text))
        pieces.append(
            Piece(
                name=f"piece {step.piece}",
                dynamic_dims=tuple(dict.fromkeys(names.get(symbol, symbol) for symbol in symbols)),
                is_static=not variant.symbols,
                returned_by_ops={i: returned[value] for i, value in enumerate(step.inputs) if value in returned},
            )
        )
    return pieces
