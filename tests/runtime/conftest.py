"""Shared fixtures of the runtime's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_grad():
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        yield
