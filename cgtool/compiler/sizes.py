"""Sizes for the symbols of a piece: within their ranges, satisfying its facts, and the same in every process.

Compilers use example sizes as hints and may treat equal ones as related. So the sizes are distinct and, if the facts
allow, prime, so that none is divisible by a number in the graph by coincidence. A proof runs a piece at both ends of
its ranges: at the smallest sizes, and at the largest that can be run in reasonable time.

Must not import torch.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

from msgspec import structs

from cgtool.errors import CompileError
from cgtool.graph.expressions import evaluate, holds, symbols_of
from cgtool.plan.pieces import Dim, PieceGraph, SymbolRange, TensorMeta

Sizes = dict[str, int]

_PRIMES = (67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163)
#: Sizes that satisfy divisibility facts.
_ROUND = tuple(factor * base for base in (64, 80, 96, 112, 60, 84, 90, 100) for factor in (1, 2, 3, 4, 8, 16, 32, 64))
#: Compilers specialize code for sizes 0 and 1, so these are used only if no other size is allowed.
_FIRST_USUAL = 2
#: How many assignments are tried: for example sizes, and for one attempt at an end of the ranges.
_BUDGET, _END_BUDGET = 200_000, 5_000
#: How many sizes next to an end are tried.
_NEAR_END = 600
#: The largest size that a proof tries.
_MAX_SIZE = 1 << 20
#: Sizes up to this one are proved even if the estimated work exceeds its limit.
_ALWAYS_ALLOWED = 19
_ITEM_BYTES = {"64": 8, "32": 4, "16": 2, "8": 1, "128": 16}


def choose_hints(graph: PieceGraph) -> Sizes:
    """Return an example size for each symbol of `graph`.

    Raises:
        CompileError: No sizes within the ranges satisfy every fact.
    """
    found = _search(graph, _usual, budget=_BUDGET)
    if found is None:
        ranges = ", ".join(f"{s.name} from {s.min} to {s.max or 'any'}" for s in graph.symbols)
        raise CompileError(
            f"No example sizes for {ranges} satisfy {', '.join(graph.facts)}. Narrow the dynamic dimensions to sizes "
            "that the model accepts.",
            expected=list(graph.facts),
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The cost limits of one run of a proof.

    Args:
        num_bytes: The bytes of all inputs and results with symbolic shapes.
        num_flops: The estimated work: two for each element of a weight and each row.
        attends: Whether the work includes attention, which compares each row with every other.
        num_places: The length of an integer input whose elements must differ; None is no limit.
    """

    num_bytes: int
    num_flops: float
    attends: bool = False
    num_places: int | None = None

    def hold(self, graph: PieceGraph, sizes: Sizes) -> bool:
        """Return whether a run of `graph` at `sizes` stays within the limits."""
        symbolic = [meta for meta in (*graph.inputs, *graph.results) if _is_symbolic(meta)]
        if sum(_num_bytes(meta, sizes) for meta in symbolic) > self.num_bytes:
            return False
        if self.num_places is not None and any(
            meta.shape and "int" in meta.dtype and evaluate(meta.shape[-1], sizes) > self.num_places
            for meta in graph.inputs
        ):
            return False
        if max(sizes.values()) <= _ALWAYS_ALLOWED:
            return True
        weights = sum(_numel(m.shape, {}) for m in graph.inputs if len(m.shape) > 1 and not _is_symbolic(m))
        rows = max((_numel([d for d in m.shape if not isinstance(d, int)], sizes) for m in graph.inputs), default=1)
        width = max((dim for m in graph.inputs for dim in m.shape if isinstance(dim, int)), default=1)
        compared = 4.0 * rows * rows * width if self.attends else 0.0
        return 2.0 * rows * weights + compared <= self.num_flops


def sizes_to_prove(graph: PieceGraph, guards: tuple[str, ...], limits: Limits) -> list[Sizes]:
    """Return the sizes to prove a piece at: the smallest, and the largest within the limits.

    Raises:
        CompileError: No sizes satisfy the facts and the guards.
    """
    if not graph.symbols:
        return [{}]
    full = structs.replace(graph, facts=(*graph.facts, *guards))
    smallest = _search(full, lambda symbol, _: iter(range(symbol.min, symbol.min + _NEAR_END)))
    found = [] if smallest is None else [smallest]
    if smallest is None or _is_empty(full, smallest):  # empty tensors prove nothing
        try:
            found.append(choose_hints(full))
        except CompileError:
            if not found:
                raise
    largest = _largest(full, limits)
    if largest is not None:
        found.append(largest)
    return [sizes for index, sizes in enumerate(found) if sizes not in found[:index]]


def _largest(graph: PieceGraph, limits: Limits) -> Sizes | None:
    """Return the largest sizes within the limits: first only unbounded sizes are halved to fit, then all sizes."""
    bounds = [symbol.max for symbol in graph.symbols if symbol.max is not None]
    for keeps_bounds in (True, False):
        most = _MAX_SIZE if len(bounds) < len(graph.symbols) else 1 if keeps_bounds else min(_MAX_SIZE, max(bounds))
        while most:
            # an odd size leaves a partial vector or block, where generated code is most often wrong
            sizes = _search(graph, partial(_from_above, most=most | 1, keeps_bounds=keeps_bounds))
            if sizes is not None and limits.hold(graph, sizes):
                return sizes
            most //= 2
    return None


def _usual(symbol: SymbolRange, chosen: Sizes) -> Iterator[int]:
    high = symbol.max
    low = max(symbol.min, _FIRST_USUAL) if high is None or high >= _FIRST_USUAL else symbol.min
    ends = (low, low + 1, low + 3, low + 7) if high is None else (high, high - 1, (low + high) // 2, low)
    sizes = (size for size in (*_PRIMES, *_ROUND, *ends, *range(low, low + 512)) if size >= low)
    yield from _distinct(sizes, chosen)


def _from_above(symbol: SymbolRange, chosen: Sizes, *, most: int, keeps_bounds: bool) -> Iterator[int]:
    high = most if symbol.max is None else min(symbol.max, _MAX_SIZE if keeps_bounds else most)
    high = max(symbol.min, high)
    yield from _distinct(range(high, max(symbol.min, high - _NEAR_END) - 1, -1), chosen)


def _distinct(sizes: Iterable[int], chosen: Sizes) -> Iterator[int]:
    """Yield each size once; sizes that another symbol already has come last."""
    yield from sorted(dict.fromkeys(sizes), key=lambda size: size in chosen.values())


def _search(
    graph: PieceGraph, candidates: Callable[[SymbolRange, Sizes], Iterator[int]], *, budget: int = _END_BUDGET
) -> Sizes | None:
    """Return the first sizes that satisfy every fact, by depth-first search over the symbols in order.

    A fact is checked as soon as its last symbol has a size.
    """
    order = {symbol.name: index for index, symbol in enumerate(graph.symbols)}
    facts: list[list[str]] = [[] for _ in graph.symbols]
    for fact in graph.facts:
        used = [order[name] for name in symbols_of(fact) if name in order]
        if used:
            facts[max(used)].append(fact)

    def extend(chosen: Sizes, index: int) -> Sizes | None:
        nonlocal budget
        if index == len(graph.symbols):
            return chosen
        symbol = graph.symbols[index]
        for size in chain(_equal_to(symbol.name, chosen, facts[index]), candidates(symbol, chosen)):
            budget -= 1
            if budget < 0:
                return None
            now = {**chosen, symbol.name: size}
            inside = size >= symbol.min and (symbol.max is None or size <= symbol.max)
            if inside and all(holds(fact, now) for fact in facts[index]):
                found = extend(now, index + 1)
                if found is not None:
                    return found
        return None

    return extend({}, 0)


def _equal_to(name: str, chosen: Sizes, facts: list[str]) -> Iterator[int]:
    """Yield the sizes that facts of the form "name == expression" require of `name`, given the chosen sizes."""
    for fact in facts:
        body = ast.parse(fact, mode="eval").body
        if not (isinstance(body, ast.Compare) and isinstance(body.ops[0], ast.Eq)):
            continue
        for side, other in ((body.left, body.comparators[0]), (body.comparators[0], body.left)):
            text = ast.unparse(other)
            if isinstance(side, ast.Name) and side.id == name and all(s in chosen for s in symbols_of(text)):
                yield int(evaluate(text, chosen))


def _is_empty(graph: PieceGraph, sizes: Sizes) -> bool:
    return any(evaluate(dim, sizes) == 0 for meta in graph.inputs for dim in meta.shape if not isinstance(dim, int))


def _is_symbolic(meta: TensorMeta) -> bool:
    return any(not isinstance(dim, int) for dim in meta.shape)


def _numel(shape: Iterable[Dim], sizes: Mapping[str, int]) -> int:
    return math.prod(evaluate(dim, sizes) for dim in shape)


def _num_bytes(meta: TensorMeta, sizes: Sizes) -> int:
    return _numel(meta.shape, sizes) * next((size for text, size in _ITEM_BYTES.items() if text in meta.dtype), 1)
