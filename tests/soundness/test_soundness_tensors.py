"""A hit is never wrong, whatever becomes of a tensor, an argument or torch's state after `warm`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from soundness_harness import (  # noqa: F401 - run on the features below
    test_a_change_is_named_or_served_right,
    test_what_did_not_change_is_a_hit,
)
from soundness_state import STATE
from soundness_tensors import ARGUMENTS, TENSORS

pytestmark = pytest.mark.torch

FEATURES = STATE | ARGUMENTS | TENSORS
