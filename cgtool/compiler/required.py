"""Required sizes: the sizes that the user asked a plan to serve, and those it does not. Must not import torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cgtool.errors import UsageError
from cgtool.graph.expressions import holds, symbols_of
from cgtool.plan.records import Variant

#: Dimension → its smallest and largest required size, inclusive.
Required = Mapping[str, tuple[int, int]]

#: Up to this many combinations of sizes are all checked; beyond it, only small sizes and the ends of all ranges.
_MAX_POINTS = 65536
_MAX_SMALL = 256


def check_required(require: Required, bounds: Mapping[str, tuple[int, int | None]]) -> None:
    """Check required sizes against the model's dynamic dimensions.

    Raises:
        UsageError: A dimension is not dynamic, or a range is empty or exceeds its dimension's range.
    """
    for name, (low, high) in require.items():
        if name not in bounds:
            known = ", ".join(bounds) or "none"
            msg = f"{name} is required but is not a dynamic dimension of this model (it has: {known})."
            raise UsageError(msg, path=name, expected=sorted(bounds), actual=name)
        least, most = bounds[name]
        if not least <= low <= high or (most is not None and high > most):
            allowed = f"{least} to {'any' if most is None else most}"
            msg = f"{name} is required from {low} to {high} but is declared as {allowed}. Require sizes in that range."
            raise UsageError(msg, path=name, expected=allowed, actual=(low, high))


def serves(variant: Variant, sizes: Mapping[str, int]) -> bool:
    """Return whether a variant's ranges and relations allow these sizes of its dimensions."""
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
    """Yield the combinations of required sizes to check, in rising order, each with the sizes in `others`."""
    every = [range(low, high + 1) for low, high in require.values()]
    if math.prod(map(len, every)) <= _MAX_POINTS:
        candidates: Sequence[Sequence[int]] = every
    else:
        ends = {name: _ends(name, variants) for name in require}
        candidates = [
            sorted({*sizes[:_MAX_SMALL], sizes[-1], *(size for size in ends[name] if size in sizes)})
            for name, sizes in zip(require, every, strict=True)
        ]
    for point in itertools.islice(itertools.product(*candidates), _MAX_POINTS):
        yield {**others, **dict(zip(require, point, strict=True))}


def _ends(name: str, variants: Iterable[Variant]) -> set[int]:
    """Return the sizes of a dimension at and next to the ends of the variants' ranges."""
    found: set[int] = set()
    for variant in variants:
        carried = set(variant.dims.get(name, ()))
        ends = [end for s in variant.symbols if s.name in carried for end in (s.min, s.max)]
        found.update(size + step for size in ends if size is not None for step in (-1, 0, 1))
    return found


def unserved(
    variants: Sequence[Variant], require: Required, others: Mapping[str, Mapping[str, int]]
) -> tuple[str, ...]:
    """Return a reason for each example call with required sizes that no variant serves; it names the first of them.

    `others` maps each call's name to the size of each dynamic dimension that the call passes.
    """
    reasons = []
    for name, sizes in others.items():
        of_call = [variant for variant in variants if variant.name == name]
        required = {dim: bounds for dim, bounds in require.items() if dim in sizes}
        for point in required_sizes(required, sizes, of_call) if required else ():
            if not any(serves(variant, point) for variant in of_call):
                text = " and ".join(f"{dim} = {point[dim]}" for dim in required)
                reasons.append(f"{text} is required of the call {name!r}, and no variant serves it")
                break
    return tuple(reasons)
