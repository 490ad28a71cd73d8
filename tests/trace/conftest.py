"""Models are traced, and called, as they are served: without gradients."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_grad():
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        yield
