"""Parametrizes the tests of this folder on request: collecting ten thousand slow ones takes seconds."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `change` with the changes of the module's features, and `unchanged` with the features."""
    for name in {"change", "unchanged"} & set(metafunc.fixturenames):
        from soundness_harness import WAYS, cases  # imports torch

        ways = WAYS if name == "change" else {"same"}
        slow = "not slow" not in metafunc.config.option.markexpr
        metafunc.parametrize(name, cases(metafunc.module.FEATURES, ways, slow=slow))
