from __future__ import annotations

import pytest

from cgtool.store.layout import CacheLayout


@pytest.fixture
def layout(cache_root):
    return CacheLayout(root=cache_root)
