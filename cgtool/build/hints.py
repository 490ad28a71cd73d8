"""Example sizes for the symbols of a piece: inside their ranges, true to its facts, the same in every process.

A compiler looks at example sizes where it may choose, and takes equal ones for a hint that they belong together. So
they are distinct and, where the facts allow, primes: a prime divides by nothing that a graph holds by chance. Must not
import torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from cgtool.errors import CompileError
from cgtool.graph.expressions import evaluate, symbols_of
from cgtool.pieces import PieceGraph, SymbolRange

_PRIMES = (67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163)
#: Sizes that satisfy "divisible by" facts.
_ROUND = tuple(factor * base for base in (64, 80, 96, 112, 60, 84, 90, 100) for factor in (1, 2, 3, 4, 8, 16, 32, 64))
#: 0 and 1 are sizes that compilers make code of their own for: only where nothing else is allowed.
_FIRST_USUAL = 2
#: How many assignments are tried before giving up.
_BUDGET = 200_000


def choose_hints(graph: PieceGraph) -> dict[str, int]:
    """Return an example size for each symbol of `graph`.

    Raises:
        CompileError: No sizes inside the ranges were found that make every fact true.
    """
    search = _Search(graph)
    found = search.extend({}, 0)
    if found is None:
        ranges = ", ".join(f"{s.name} from {s.min} to {s.max or 'any'}" for s in graph.symbols)
        raise CompileError(
            f"There are no example sizes for {ranges} that satisfy {', '.join(graph.facts)}. Narrow the dynamic "
            "dimensions to sizes that the model accepts.",
            expected=list(graph.facts),
        )
    return found


class _Search:
    """Depth first over the symbols in order; a fact is checked as soon as its last symbol has a size."""

    def __init__(self, graph: PieceGraph) -> None:
        self._symbols = graph.symbols
        self._budget = _BUDGET
        order = {symbol.name: index for index, symbol in enumerate(graph.symbols)}
        self._facts: list[list[str]] = [[] for _ in graph.symbols]
        for fact in graph.facts:
            used = [order[name] for name in symbols_of(fact)]
            if used:
                self._facts[max(used)].append(fact)

    def extend(self, chosen: dict[str, int], index: int) -> dict[str, int] | None:
        if index == len(self._symbols):
            return chosen
        symbol = self._symbols[index]
        for size in self._candidates(symbol, chosen, self._facts[index]):
            self._budget -= 1
            if self._budget < 0:
                return None
            now = {**chosen, symbol.name: size}
            if all(evaluate(fact, now) for fact in self._facts[index]):
                found = self.extend(now, index + 1)
                if found is not None:
                    return found
        return None

    @staticmethod
    def _candidates(symbol: SymbolRange, chosen: Mapping[str, int], facts: list[str]) -> Iterator[int]:
        high = symbol.max
        low = max(symbol.min, _FIRST_USUAL) if high is None or high >= _FIRST_USUAL else symbol.min
        ends = (low, low + 1, low + 3, low + 7) if high is None else (high, high - 1, (low + high) // 2, low)
        tried: set[int] = set()
        sizes = (*equal_to(symbol.name, chosen, facts), *_PRIMES, *_ROUND, *ends)
        for wanted in (False, True):
            for size in (*sizes, *range(low, low + 512)):
                inside = size >= low and (high is None or size <= high)
                # a size that another symbol has comes last
                if inside and size not in tried and (size in chosen.values()) == wanted:
                    tried.add(size)
                    yield size


def equal_to(name: str, chosen: Mapping[str, int], facts: list[str]) -> Iterator[int]:
    """Yield what facts of the form "name == expression" say of `name` once other symbols are chosen."""
    for fact in facts:
        body = ast.parse(fact, mode="eval").body
        if not (isinstance(body, ast.Compare) and isinstance(body.ops[0], ast.Eq)):
            continue
        for side, other in ((body.left, body.comparators[0]), (body.comparators[0], body.left)):
            text = ast.unparse(other)
            if isinstance(side, ast.Name) and side.id == name and all(s in chosen for s in symbols_of(text)):
                yield int(evaluate(text, chosen))
