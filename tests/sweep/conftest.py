from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def warm_root(tmp_path_factory) -> Path:
    """Return a cache with one entry: that of `sweep_subject`, which no test writes to."""
    import sweep_subject as subject
    import torch

    from cgtool.compiler.pipeline import warm
    from cgtool.config import CompilationConfig

    root = tmp_path_factory.mktemp("sweep") / "cache"
    with torch.no_grad():
        warm(subject.build(), config=CompilationConfig(adaptor="eager"), cache_dir=root)
    return root
