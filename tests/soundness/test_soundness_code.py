"""A hit is never wrong, whatever becomes of the code or its environment after `warm`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from soundness_code import CODE
from soundness_environment import ENVIRONMENT
from soundness_further import FURTHER
from soundness_harness import cases, judge
from soundness_imports import IMPORTS
from soundness_process import PROCESS

pytestmark = pytest.mark.torch

FEATURES = CODE | IMPORTS | ENVIRONMENT | PROCESS | FURTHER


@pytest.mark.parametrize("case", cases(FEATURES))
def test_a_change_is_named_or_served_right(case):
    outcome = judge(case)
    assert outcome.word in {"refused", "right"}, outcome


@pytest.mark.parametrize("case", cases(FEATURES, ways={"same"}))
def test_what_did_not_change_is_a_hit(case):
    outcome = judge(case)
    assert outcome.word == "right" or (case.feature.refused and outcome.word == "refused"), outcome
