"""What the runtime's tests share: no gradients, a small model, and a cache of it."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_grad():
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        yield
