"""A hit is never wrong, however the code or its environment changes after `warm`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from soundness_code import CODE
from soundness_environment import ENVIRONMENT
from soundness_further import FURTHER
from soundness_harness import (  # noqa: F401 - run on the features below
    test_a_change_is_refused_by_name_or_served_correctly,
    test_an_unchanged_project_is_a_hit,
)
from soundness_imports import IMPORTS
from soundness_process import PROCESS

pytestmark = pytest.mark.torch

FEATURES = CODE | IMPORTS | ENVIRONMENT | PROCESS | FURTHER
