"""A hit is never wrong, whatever becomes of an object after `warm`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from soundness_harness import (  # noqa: F401 - run on the features below
    test_a_change_is_named_or_served_right,
    test_what_did_not_change_is_a_hit,
)
from soundness_identity import IDENTITY
from soundness_objects import OBJECTS

pytestmark = pytest.mark.torch

FEATURES = IDENTITY | OBJECTS
