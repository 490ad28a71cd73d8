"""A hit is never wrong, whatever becomes of an object after `warm`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from soundness_harness import judge
from soundness_identity import IDENTITY
from soundness_objects import OBJECTS

pytestmark = pytest.mark.torch

FEATURES = IDENTITY | OBJECTS


def test_a_change_is_named_or_served_right(change):
    outcome = judge(change)
    assert outcome.word in {"refused", "right"}, outcome


def test_what_did_not_change_is_a_hit(unchanged):
    outcome = judge(unchanged)
    assert outcome.word == "right" or (unchanged.feature.refused and outcome.word == "refused"), outcome
