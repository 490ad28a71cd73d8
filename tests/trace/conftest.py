"""Traces and calls models without gradients, as they are served."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_grad():
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        yield
