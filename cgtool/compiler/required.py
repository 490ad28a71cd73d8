"""Which sizes a plan serves, and which it lacks of those that its user requires. Must not import torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cgtool.errors import UsageError
from cgtool.graph.expressions import holds, symbols_of
from cgtool.plan.records import Variant

#: Dimension → its smallest and its largest size, inclusive: every size between them must be served.
Required = Mapping[str, tuple[int, int]]

#: So many combinations of sizes are looked at one by one; of more, the ends of all ranges and the smallest sizes.
_MOST_POINTS = 65536
_MOST_SMALL = 256


def check_required(require: Required, bounds: Mapping[str, tuple[int, int | None]]) -> None:
    """Refuse to require what the model's dynamic dimensions do not allow.

    Raises:
        UsageError: A dimension is not dynamic, or a range is empty or beyond its dimension's.
    """
    for name, (low, high) in require.items():
        if name not in bounds:
            known = ", ".join(bounds) or "none"
            msg = f"{name} is required and is no dynamic dimension of this model (it has: {known})."
            raise UsageError(msg, path=name, expected=sorted(bounds), actual=name)
        least, most = bounds[name]
        if not least <= low <= high or (most is not None and high > most):
            allowed = f"{least} to {'any' if most is None else most}"
            msg = f"{name} is required from {low} to {high} and is declared as {allowed}. Require a part of that."
            raise UsageError(msg, path=name, expected=allowed, actual=(low, high))


def serves(variant: Variant, sizes: Mapping[str, int]) -> bool:
    """Return whether a variant's ranges and relations take these sizes of its dimensions."""
    if any(variant.fixed.get(name, size) != size for name, size in sizes.items()):
        return False
    values = {symbol: size for name, size in sizes.items() for symbol in variant.dims.get(name, ())}
    for symbol in variant.symbols:
        value = values.get(symbol.name)
        if value is not None and (value < symbol.min or (symbol.max is not None and value > symbol.max)):
            return False
    return all(holds(text, values) for text in variant.relations if set(symbols_of(text)) <= values.keys())


def required_sizes(
    require: Required, others: Mapping[str, int], variants: Iterable[Variant]
) -> Iterator[dict[str, int]]:
    """Yield the combinations of sizes to look at, in rising order, with the size of each other dimension."""
    every = [range(low, high + 1) for low, high in require.values()]
    if math.prod(map(len, every)) <= _MOST_POINTS:
        candidates: Sequence[Sequence[int]] = every
    else:
        ends = {name: _ends(name, variants) for name in require}
        candidates = [
            sorted({*sizes[:_MOST_SMALL], sizes[-1], *(size for size in ends[name] if size in sizes)})
            for name, sizes in zip(require, every, strict=True)
        ]
    for point in itertools.islice(itertools.product(*candidates), _MOST_POINTS):
        yield {**others, **dict(zip(require, point, strict=True))}


def _ends(name: str, variants: Iterable[Variant]) -> set[int]:
    """Return the sizes of a dimension at which a range of a variant begins or ends, and those beside them."""
    found: set[int] = set()
    for variant in variants:
        carried = set(variant.dims.get(name, ()))
        ends = [end for s in variant.symbols if s.name in carried for end in (s.min, s.max)]
        found.update(size + step for size in ends if size is not None for step in (-1, 0, 1))
    return found


def unserved(
    variants: Sequence[Variant], require: Required, others: Mapping[str, Mapping[str, int]]
) -> tuple[str, ...]:
    """Return a sentence for each example call with the first sizes that are required and that no variant serves.

    `others` has the size of each dynamic dimension that a call passes, by the call's name.
    """
    found = []
    for name, sizes in others.items():
        own = [variant for variant in variants if variant.name == name]
        asked = {dim: bounds for dim, bounds in require.items() if dim in sizes}
        for point in required_sizes(asked, sizes, own) if asked else ():
            if not any(serves(variant, point) for variant in own):
                said = " and ".join(f"{dim} = {point[dim]}" for dim in asked)
                found.append(f"{said} is required of the call {name!r}, and no variant serves it")
                break
    return tuple(found)
