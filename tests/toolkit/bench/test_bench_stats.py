"""The statistics have known properties: order, exact ratios, coverage of the confidence interval."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgtool.toolkit.bench import report
from cgtool.toolkit.bench.report import FEWEST_PAIRS, bootstrap, paired_ratio, summarize

VALUES = st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=30)
MANY = st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=FEWEST_PAIRS, max_size=12)


@given(VALUES)
def test_a_summary_is_ordered_and_independent_of_the_order_of_values(values):
    summary = summarize(values)
    assert summary == summarize(sorted(values, reverse=True))
    slack = 1 + 1e-12
    quartiles = summary.q1 * slack, summary.median * slack**2, summary.q3 * slack**3
    assert summary.low <= quartiles[0] <= quartiles[1] <= quartiles[2] <= summary.high * slack**4
    assert (summary.count, summary.low, summary.high) == (len(values), min(values), max(values))


@settings(max_examples=5)  # each draws thousands of samples
@given(MANY, st.floats(min_value=0.01, max_value=100))
def test_a_constant_factor_is_the_exact_ratio_with_a_zero_width_interval(base, factor):
    rounds = dict(enumerate(base))
    ratio = paired_ratio({number: value * factor for number, value in rounds.items()}, rounds, seed=1)
    assert ratio.pairs == len(base)
    assert [ratio.ratio, ratio.low, ratio.high] == pytest.approx([factor] * 3)


@settings(max_examples=5)  # each draws thousands of samples
@given(MANY)
def test_an_interval_surrounds_the_median_and_is_deterministic_for_a_seed(values):
    rounds = dict(enumerate(values))
    ones = dict.fromkeys(rounds, 1.0)
    ratio = paired_ratio(rounds, ones, seed=3)
    slack = 1 + 1e-12
    assert min(values) <= ratio.low * slack <= ratio.ratio * slack**2 <= ratio.high * slack**3 <= max(values) * slack**4
    assert ratio == paired_ratio(rounds, ones, seed=3)


def test_only_shared_rounds_are_paired():
    ratio = paired_ratio({0: 2.0, 1: 30.0, 5: 8.0}, {1: 10.0, 2: 1.0, 5: 4.0, 7: 0.0}, seed=0)
    assert (ratio.pairs, ratio.ratio) == (2, 2.5)
    assert paired_ratio({0: 1.0}, {1: 1.0}, seed=0) is None


def test_a_disturbed_round_does_not_affect_the_ratio():
    base = dict(enumerate([1.0, 1.0, 50.0, 1.0, 9.0, 1.0, 30.0]))
    ratio = paired_ratio({number: 2 * value for number, value in base.items()}, base, seed=0)
    assert (ratio.ratio, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("count", [1, FEWEST_PAIRS - 1, FEWEST_PAIRS])
def test_too_few_pairs_have_no_interval(count):
    ratio = paired_ratio(dict.fromkeys(range(count), 3.0), dict.fromkeys(range(count), 2.0), seed=0)
    bounded = count >= FEWEST_PAIRS
    # The range of n values misses their median with probability 2 / 2**n, which must not exceed 5 %.
    assert bounded == (2 / 2**count <= 0.05)
    assert (ratio.ratio, ratio.low is not None, ratio.high is not None) == (1.5, bounded, bounded)


def test_the_interval_covers_the_true_median_with_the_stated_confidence(monkeypatch):
    monkeypatch.setattr(report, "RESAMPLES", 1000)
    generator = random.Random(5)
    samples = [[math.exp(generator.gauss(0, 0.3)) for _ in range(15)] for _ in range(60)]
    intervals = [bootstrap(sample, seed=0) for sample in samples]
    assert 52 <= sum(low <= 1.0 <= high for low, high in intervals) < 60
    assert statistics.median(high / low for low, high in intervals[:9]) < 1.6
