"""The statistics against results known without them: order, exact ratios, coverage."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgtool.toolkit.bench.report import FEWEST_PAIRS, bootstrap, paired_ratio, summarise

VALUES = st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=30)
MANY = st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=FEWEST_PAIRS, max_size=12)


@given(VALUES)
def test_a_summary_is_in_order_whatever_the_order_of_its_values(values):
    found = summarise(values)
    assert found == summarise(sorted(values, reverse=True))
    slack = 1 + 1e-12
    assert found.low <= found.q1 * slack <= found.median * slack**2 <= found.q3 * slack**3 <= found.high * slack**4
    assert (found.count, found.low, found.high) == (len(values), min(values), max(values))


@settings(max_examples=20)  # each draws thousands of samples
@given(MANY, st.floats(min_value=0.01, max_value=100))
def test_a_way_that_is_always_so_many_times_slower_has_exactly_that_ratio_and_no_width(base, factor):
    rounds = dict(enumerate(base))
    found = paired_ratio({number: value * factor for number, value in rounds.items()}, rounds, seed=1)
    assert found.pairs == len(base)
    assert [found.ratio, found.low, found.high] == pytest.approx([factor] * 3)


@settings(max_examples=20)  # each draws thousands of samples
@given(MANY)
def test_a_bound_lies_within_the_ratios_around_their_median_and_comes_again_with_its_seed(values):
    rounds = dict(enumerate(values))
    ones = dict.fromkeys(rounds, 1.0)
    found = paired_ratio(rounds, ones, seed=3)
    slack = 1 + 1e-12
    assert min(values) <= found.low * slack <= found.ratio * slack**2 <= found.high * slack**3 <= max(values) * slack**4
    assert found == paired_ratio(rounds, ones, seed=3)


def test_only_rounds_that_both_have_are_paired():
    found = paired_ratio({0: 2.0, 1: 30.0, 5: 8.0}, {1: 10.0, 2: 1.0, 5: 4.0, 7: 0.0}, seed=0)
    assert (found.pairs, found.ratio) == (2, 2.5)
    assert paired_ratio({0: 1.0}, {1: 1.0}, seed=0) is None


def test_what_disturbs_a_round_disturbs_no_ratio():
    quiet, busy = [1.0] * 7, [1.0, 1.0, 50.0, 1.0, 9.0, 1.0, 30.0]
    base = {number: a * b for number, (a, b) in enumerate(zip(quiet, busy, strict=True))}
    found = paired_ratio({number: 2 * value for number, value in base.items()}, base, seed=0)
    assert (found.ratio, found.low, found.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("count", range(1, FEWEST_PAIRS + 2))
def test_too_few_pairs_have_no_bound(count):
    found = paired_ratio(dict.fromkeys(range(count), 3.0), dict.fromkeys(range(count), 2.0), seed=0)
    bounded = count >= FEWEST_PAIRS
    # The range of n values misses their median with a chance of 2 / 2**n, which must not be above 5 %.
    assert bounded == (2 / 2**count <= 0.05)
    assert (found.ratio, found.low is not None, found.high is not None) == (1.5, bounded, bounded)


def test_the_bound_holds_the_true_median_about_as_often_as_it_says():
    draw = random.Random(5)
    samples = [[math.exp(draw.gauss(0, 0.3)) for _ in range(15)] for _ in range(60)]
    held = sum(low <= 1.0 <= high for low, high in (bootstrap(sample, seed=0) for sample in samples))
    assert 52 <= held < 60
    assert statistics.median(high / low for low, high in (bootstrap(sample, seed=0) for sample in samples[:9])) < 1.6
