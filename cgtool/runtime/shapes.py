"""What a shape means for the symbols of a variant and of its pieces. Must not import torch."""

from __future__ import annotations

from collections.abc import Mapping

from cgtool.errors import ArtifactError
from cgtool.graph.expressions import evaluate, symbols_of
from cgtool.plan.pieces import PieceGraph
from cgtool.plan.records import Step, Variant
from cgtool.plan.shapes import Shape, shape_text

#: Symbol of a variant → its smallest and its largest size, inclusive.
Bounds = Mapping[str, tuple[int, int]]


def symbol_bounds(variant: Variant, shape: Shape) -> Bounds:
    """Return the bounds that a shape sets to the symbols of its variant; none where it serves all of the variant.

    Raises:
        ArtifactError: The shape names a dimension that the variant does not have.
    """
    bounds: dict[str, tuple[int, int]] = {}
    for name, limits in shape.items():
        if name in variant.fixed:
            continue
        if name not in variant.dims:
            msg = f"The manifest names the shape {shape_text(shape)}, whose dimension {name} its plan does not have."
            raise ArtifactError(f"{msg} Warm the model again.", expected=sorted(variant.dims), actual=name)
        bounds.update(dict.fromkeys(variant.dims[name], limits))
    return bounds


def graph_at(graph: PieceGraph, step: Step, bounds: Bounds) -> PieceGraph:
    """Return a piece's graph with its own symbols at the sizes, or within the ranges, of the variant's."""
    if not bounds:
        return graph
    from cgtool.graph.specialise import restrict  # most starts know one shape, the general one

    fixed = {symbol: low for symbol, (low, high) in bounds.items() if low == high}
    own: dict[str, tuple[int, int | None]] = {}
    for symbol, text in step.symbols.items():
        if text in bounds:
            own[symbol] = bounds[text]
        elif set(symbols_of(text)) <= fixed.keys():
            size = int(evaluate(text, fixed))
            own[symbol] = size, size
    return restrict(graph, own)
