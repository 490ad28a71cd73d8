"""The statistics of a bench: medians with their spread, and ratios of pairs with a bound.

Must not import torch; the standard library is enough.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import field

from cgtool.plan.grammar import Count, Record

#: How sure the bound of a ratio is.
CONFIDENCE = 0.95
RESAMPLES = 4000
#: Fewer pairs than this cannot bound a median with 95 %: even their whole range holds it less often, 1 - 2 / 2**n.
FEWEST_PAIRS = 6


class Summary(Record, frozen=True, kw_only=True):
    """Numbers in short: how many, the median, the quartiles (linear between neighbours) and the range."""

    count: Count
    median: float
    q1: float
    q3: float
    low: float = field(name="min")
    high: float = field(name="max")


class Ratio(Record, frozen=True, kw_only=True):
    """The median of ratios of pairs, and where it lies with 95 % confidence.

    Args:
        ratio: The median.
        low: The lower bound; None where there are too few pairs.
        high: The upper bound; likewise.
        pairs: How many pairs there were.
    """

    ratio: float
    low: float | None
    high: float | None
    pairs: Count


def summarise(values: Sequence[float]) -> Summary | None:
    """Return `values` in short; None where there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return Summary(
        count=len(ordered),
        median=median(ordered),
        q1=quantile(ordered, 0.25),
        q3=quantile(ordered, 0.75),
        low=ordered[0],
        high=ordered[-1],
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a share of sorted values lies, linear between neighbours.

    Args:
        ordered: One value or more, in rising order.
        share: From 0 to 1.
    """
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def paired_ratio(values: Mapping[int, float], base: Mapping[int, float], *, seed: int) -> Ratio | None:
    """Return how much larger `values` are than `base`, round by round: what disturbed a round disturbed both.

    The bound is the percentile bootstrap of the median over rounds.

    Args:
        values: Measured value by round.
        base: What it is compared with, by round; rounds that only one of the two has are left out.
        seed: Of the resampling: the same numbers give the same bound.

    Returns:
        The ratio, without a bound where there are fewer than `FEWEST_PAIRS` pairs; None where there is no pair.
    """
    ratios = [values[number] / base[number] for number in sorted(values) if base.get(number, 0) > 0]
    if not ratios:
        return None
    low, high = bootstrap(ratios, seed=seed) if len(ratios) >= FEWEST_PAIRS else (None, None)
    return Ratio(ratio=median(ratios), low=low, high=high, pairs=len(ratios))


def bootstrap(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Return the bounds of the median of `values` by the percentile bootstrap.

    Args:
        values: One value or more.
        seed: Of the resampling.

    Source:
        Efron, "Bootstrap methods: another look at the jackknife", 1979; percentile interval.
    """
    draw = random.Random(seed)  # noqa: S311  a reproducible sample, no secret
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    return quantile(medians, tail), quantile(medians, 1 - tail)
