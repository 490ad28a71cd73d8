"""A hit is never wrong, whatever becomes of the code or its environment after `warm`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from soundness_code import CODE
from soundness_environment import ENVIRONMENT
from soundness_further import FURTHER
from soundness_harness import judge
from soundness_imports import IMPORTS
from soundness_process import PROCESS

pytestmark = pytest.mark.torch

FEATURES = CODE | IMPORTS | ENVIRONMENT | PROCESS | FURTHER


def test_a_change_is_named_or_served_right(change):
    outcome = judge(change)
    assert outcome.word in {"refused", "right"}, outcome


def test_what_did_not_change_is_a_hit(unchanged):
    outcome = judge(unchanged)
    assert outcome.word == "right" or (unchanged.feature.refused and outcome.word == "refused"), outcome
