"""A hit is never wrong, whatever becomes of a class after `warm`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from soundness_classes import CLASSES
from soundness_harness import cases, judge
from soundness_special import SPECIAL

pytestmark = pytest.mark.torch

FEATURES = CLASSES | SPECIAL


@pytest.mark.parametrize("case", cases(FEATURES))
def test_a_change_is_named_or_served_right(case):
    outcome = judge(case)
    assert outcome.word in {"refused", "right"}, outcome


@pytest.mark.parametrize("case", cases(FEATURES, ways={"same"}))
def test_what_did_not_change_is_a_hit(case):
    outcome = judge(case)
    assert outcome.word == "right" or (case.feature.refused and outcome.word == "refused"), outcome
