"""Specialization of a piece's graph to one size or a range of sizes. Must not import torch.

The remaining symbols keep their names, so that guards on them also apply to the symbols of the general graph.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from cgtool.errors import UsageError
from cgtool.graph.expressions import evaluate, holds, rename, symbols_of
from cgtool.plan.pieces import Dim, PieceGraph, SymbolRange, TensorMeta


def restrict(graph: PieceGraph, ranges: Mapping[str, tuple[int, int | None]]) -> PieceGraph:
    """Return `graph` with narrower ranges of its symbols; a range of one size fixes the symbol.

    Raises:
        UsageError: A range does not overlap that of its symbol, or violates a fact of the graph.
    """
    symbols = []
    fixed = {}
    for symbol in graph.symbols:
        low, high = ranges.get(symbol.name, (symbol.min, symbol.max))
        _check_range(symbol, low, high)
        narrowed = symbol.within(low, high)
        if narrowed.min == narrowed.max:
            fixed[symbol.name] = narrowed.min
        else:
            symbols.append(narrowed)
    narrowed_graph = replace(graph, symbols=tuple(symbols))
    if not fixed:
        return narrowed_graph
    return replace(
        narrowed_graph,
        facts=_facts(graph.facts, fixed),
        inputs=tuple(_meta(meta, fixed) for meta in graph.inputs),
        results=tuple(_meta(meta, fixed) for meta in graph.results),
    )


def _check_range(symbol: SymbolRange, low: int, high: int | None) -> None:
    below = high is not None and (high < symbol.min or high < low)
    if below or (symbol.max is not None and low > symbol.max):
        wanted = str(low) if low == high else f"{low} to {high or 'any'}"
        raise UsageError(
            f"size {wanted} is outside {symbol.min} to {symbol.max or 'any'}, the sizes that this graph was traced "
            f"for; choose a size within that range, or widen the dynamic dimension",
            expected=[symbol.min, symbol.max],
            actual=[low, high],
        )


def _facts(facts: tuple[str, ...], fixed: Mapping[str, int]) -> tuple[str, ...]:
    kept = []
    for fact in facts:
        if any(name not in fixed for name in symbols_of(fact)):
            kept.append(_substitute(fact, fixed))
        elif not holds(fact, fixed):
            raise UsageError(
                f"sizes {dict(fixed)} violate '{fact}', which the model requires; choose other sizes",
                expected=fact,
                actual=dict(fixed),
            )
    return tuple(str(fact) for fact in kept)


def _meta(meta: TensorMeta, fixed: Mapping[str, int]) -> TensorMeta:
    return replace(
        meta,
        shape=tuple(_substitute(dim, fixed) for dim in meta.shape),
        stride=tuple(_substitute(dim, fixed) for dim in meta.stride),
    )


def _substitute(dim: Dim, fixed: Mapping[str, int]) -> Dim:
    names = symbols_of(dim)
    if all(name in fixed for name in names):
        return int(evaluate(dim, fixed))
    if not any(name in fixed for name in names):
        return dim
    return rename(dim, {name: str(value) for name, value in fixed.items()})
