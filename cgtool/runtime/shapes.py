"""What a shape of the manifest means for the symbols of a variant and of its pieces. Must not import torch."""

from __future__ import annotations

from collections.abc import Mapping

from cgtool.cache.shapes import GENERAL, Shape
from cgtool.graph.expressions import evaluate, symbols_of
from cgtool.pieces import PieceGraph
from cgtool.plan import Step, Variant
from cgtool.records import dataclass


@dataclass(frozen=True, kw_only=True)
class ShapeSpec:
    """One shape of one variant: sizes of its symbols, or ranges of them."""

    shape: Shape
    sizes: Mapping[str, int]
    ranges: Mapping[str, tuple[int, int | None]]
    max_autotune: bool


def spec_of(variant: Variant, shape: Shape, size_dim: str | None) -> ShapeSpec:
    """Return the sizes of the variant's symbols that a shape of the manifest means.

    Args:
        variant: The variant.
        shape: As the manifest writes it.
        size_dim: The dimension that a range speaks of; None where the model has but one.
    """
    if shape in (GENERAL, base_shape(variant)):
        return ShapeSpec(shape=shape, sizes={}, ranges={}, max_autotune=False)
    if isinstance(shape, tuple):
        name = size_dim if size_dim in variant.dims else next(iter(variant.dims))
        ranges = {symbol: (max(shape[0], 2), shape[1]) for symbol in variant.dims[name]}
        return ShapeSpec(shape=shape, sizes={}, ranges=ranges, max_autotune=False)
    by_name = {next(iter(variant.dims)): shape} if isinstance(shape, int) else dict(shape)  # type: ignore[arg-type]  # pairs
    sizes = {symbol: by_name[name] for name in variant.dims if name in by_name for symbol in variant.dims[name]}
    return ShapeSpec(shape=shape, sizes=sizes, ranges={}, max_autotune=True)


def base_shape(variant: Variant) -> Shape:
    """Return the shape that serves all of a variant: "general", or the sizes that it fixes."""
    if not variant.fixed:
        return GENERAL
    if len(variant.fixed) == 1 and not variant.dims:
        return next(iter(variant.fixed.values()))
    return dict(variant.fixed)


def graph_at(graph: PieceGraph, step: Step, spec: ShapeSpec) -> PieceGraph:
    """Return a piece's graph with its own symbols at the sizes, or within the ranges, of the variant's."""
    if not spec.sizes and not spec.ranges:
        return graph
    from cgtool.graph.specialise import restrict, specialise  # most starts know one shape, the general one

    if spec.sizes:
        known = {
            symbol: evaluate(text, dict(spec.sizes))
            for symbol, text in step.symbols.items()
            if set(symbols_of(text)) <= set(spec.sizes)
        }
        return specialise(graph, known)
    return restrict(graph, {s: spec.ranges[text] for s, text in step.symbols.items() if text in spec.ranges})
