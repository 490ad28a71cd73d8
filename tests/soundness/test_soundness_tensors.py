"""A hit is never wrong, however a tensor, an argument or torch's state changes after `warm`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from soundness_harness import (  # noqa: F401 - run on the features below
    test_a_change_is_refused_by_name_or_served_correctly,
    test_an_unchanged_project_is_a_hit,
)
from soundness_state import STATE
from soundness_tensors import ARGUMENTS, TENSORS

pytestmark = pytest.mark.torch

FEATURES = STATE | ARGUMENTS | TENSORS
