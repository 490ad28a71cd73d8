"""A hit is never wrong, however a class changes after `warm`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from soundness_classes import CLASSES
from soundness_harness import (  # noqa: F401 - run on the features below
    test_a_change_is_refused_by_name_or_served_correctly,
    test_an_unchanged_project_is_a_hit,
)
from soundness_special import SPECIAL

pytestmark = pytest.mark.torch

FEATURES = CLASSES | SPECIAL
