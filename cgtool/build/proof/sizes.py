"""Which sizes a piece is proved for: the smallest that it serves, and the largest that is worth its time.

Sizes lie inside the symbols' ranges and satisfy the graph's facts and the compiler's guards. The largest is as large as
the range allows, within a number of bytes and an estimate of the work. Must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from cgtool.build.hints import choose_hints, equal_to
from cgtool.errors import CompileError
from cgtool.graph.expressions import evaluate, symbols_of
from cgtool.pieces import PieceGraph, SymbolRange, TensorMeta

Sizes = dict[str, int]

_ITEM_BYTES = {"64": 8, "32": 4, "16": 2, "8": 1, "128": 16}
#: How many assignments are tried for one shape.
_BUDGET = 20_000
#: No dimension is tried beyond it.
_MOST = 1 << 20
#: As large as this even where the estimate of the work is beyond its limit.
_LEAST_LARGE = 19


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one run may take.

    Args:
        num_bytes: Of all inputs and results whose size a symbol decides.
        num_flops: Of two for each element of a weight and each row, an estimate.
    """

    num_bytes: int
    num_flops: float

    @classmethod
    def usual(cls, *, on_accelerator: bool) -> Limits:
        """Return limits under which a proof takes a fraction of a second."""
        if on_accelerator:
            return cls(num_bytes=64 << 20, num_flops=2e11)
        return cls(num_bytes=1 << 20, num_flops=4e8)

    def smaller(self) -> Limits:
        """Return a quarter of these limits."""
        return Limits(num_bytes=self.num_bytes // 4, num_flops=self.num_flops / 4)


def shapes_to_prove(graph: PieceGraph, guards: tuple[str, ...], limits: Limits) -> list[Sizes]:
    """Return the sizes to run a piece at, each different from the others.

    Args:
        graph: The piece.
        guards: Facts beyond the graph's own.
        limits: What the largest may take.

    Raises:
        CompileError: No sizes satisfy the facts and the guards.
    """
    if not graph.symbols:
        return [{}]
    full = replace(graph, facts=(*graph.facts, *guards))
    smallest = _search(full, _upward)
    found = [smallest] if smallest is not None else []
    if smallest is None or _is_empty(full, smallest):  # of empty tensors, everything is true
        try:
            found.append(choose_hints(full))
        except CompileError:
            if not found:
                raise
    large = (_at_its_limits(full), _largest(full, limits))
    found += [sizes for sizes in large if sizes is not None and _fits(full, sizes, limits)]
    return [sizes for index, sizes in enumerate(found) if sizes not in found[:index]]


def _at_its_limits(graph: PieceGraph) -> Sizes | None:
    """Return sizes where what has a limit is at it, and the rest is small."""
    if not any(symbol.max for symbol in graph.symbols) or all(symbol.max for symbol in graph.symbols):
        return None
    return _search(graph, lambda symbol, chosen: _downward(symbol, chosen) if symbol.max else _upward(symbol, chosen))


def _largest(graph: PieceGraph, limits: Limits) -> Sizes | None:
    """Return the sizes nearest to the largest target that stays within the limits, by bisection over its logarithm."""
    found = []
    low, high = 0.0, math.log2(min(_MOST, max((s.max or _MOST) for s in graph.symbols) + 1))
    for _ in range(14):
        middle = (low + high) / 2
        # an odd size: the rest of a vector or a block is where code is wrong
        target = int(2**middle) | 1
        sizes = _search(graph, partial(_downward, target=target))
        fits = sizes is not None and _fits(graph, sizes, limits)
        if sizes is not None and fits:
            found.append(sizes)
        # far below the target, a fact or a guard is what bounds it: a lower target may come nearer
        if sizes is not None and fits and max(sizes.values()) > target // 2:
            low = middle
        else:
            high = middle
    top = _search(graph, _downward)
    if top is not None and _fits(graph, top, limits):
        found.append(top)
    return max(found, key=lambda sizes: math.prod(sizes.values()), default=None)


def _upward(symbol: SymbolRange, _chosen: Sizes) -> Iterator[int]:
    yield from range(symbol.min, symbol.min + 600)


def _downward(symbol: SymbolRange, chosen: Sizes, target: int = _MOST) -> Iterator[int]:
    high = max(symbol.min, target if symbol.max is None else min(symbol.max, target))
    # a size that no other symbol has: two that are equal could be taken for one another
    near = range(high, max(symbol.min, high - 600) - 1, -1)
    yield from (size for size in near if size not in chosen.values())
    coarse = high // 2
    while coarse > symbol.min:
        for divisor in (1, 8, 64):
            yield max(symbol.min, coarse // divisor * divisor)
        coarse //= 2
    yield from near


def _search(graph: PieceGraph, candidates: Callable[[SymbolRange, Sizes], Iterator[int]]) -> Sizes | None:
    """Return the first assignment, depth first, that makes every fact true."""
    order = {symbol.name: index for index, symbol in enumerate(graph.symbols)}
    facts: list[list[str]] = [[] for _ in graph.symbols]
    for fact in graph.facts:
        used = [order[name] for name in symbols_of(fact) if name in order]
        if used:
            facts[max(used)].append(fact)
    budget = _BUDGET

    def extend(chosen: Sizes, index: int) -> Sizes | None:
        nonlocal budget
        if index == len(graph.symbols):
            return chosen
        symbol = graph.symbols[index]
        for size in chain(equal_to(symbol.name, chosen, facts[index]), candidates(symbol, chosen)):
            budget -= 1
            if budget < 0:
                return None
            now = {**chosen, symbol.name: size}
            inside = size >= symbol.min and (symbol.max is None or size <= symbol.max)
            if inside and all(evaluate(fact, now) for fact in facts[index]):
                found = extend(now, index + 1)
                if found is not None:
                    return found
        return None

    return extend({}, 0)


def _is_empty(graph: PieceGraph, sizes: Sizes) -> bool:
    return any(evaluate(dim, sizes) == 0 for meta in graph.inputs for dim in meta.shape if not isinstance(dim, int))


def _fits(graph: PieceGraph, sizes: Sizes, limits: Limits) -> bool:
    bytes_of_symbols = sum(_num_bytes(m, sizes) for m in (*graph.inputs, *graph.results) if _is_symbolic(m))
    if bytes_of_symbols > limits.num_bytes:
        return False
    if max(sizes.values()) <= _LEAST_LARGE:
        return True
    matrix = 2
    weights = sum(_numel(m, {}) for m in graph.inputs if len(m.shape) >= matrix and not _is_symbolic(m))
    rows = max((_rows(m, sizes) for m in graph.inputs if _is_symbolic(m)), default=1)
    return 2.0 * rows * weights <= limits.num_flops


def _rows(meta: TensorMeta, sizes: Mapping[str, int]) -> int:
    return math.prod(evaluate(dim, sizes) for dim in meta.shape if not isinstance(dim, int))


def _numel(meta: TensorMeta, sizes: Mapping[str, int]) -> int:
    return math.prod(evaluate(dim, sizes) for dim in meta.shape)


def _num_bytes(meta: TensorMeta, sizes: Mapping[str, int]) -> int:
    item = next((size for text, size in _ITEM_BYTES.items() if text in meta.dtype), 1)
    return _numel(meta, sizes) * item


def _is_symbolic(meta: TensorMeta) -> bool:
    return any(not isinstance(dim, int) for dim in meta.shape)
