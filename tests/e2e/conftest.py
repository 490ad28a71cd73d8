"""One cache of the fixtures, compiled with `aot_inductor` once in a session of tests, whichever workers it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hold_harness import warm_fixture

from cgtool.cache.lock import FileLock


@pytest.fixture(scope="session")
def aot_cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[..., Path]:
    """Return a function: name of a fixture (or several) → the root of a cache that serves them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "aot"
    folder.mkdir(exist_ok=True)
    root = folder / "cache"

    def warmed(*names: str) -> Path:
        for name in names:
            with FileLock(folder / f"{name}.lock"):
                if not (folder / name).exists():
                    warm_fixture(name, root)
                    (folder / name).touch()
        return root

    return warmed


@pytest.fixture(scope="session")
def eager_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the root of a cache that serves `tiny_llama` with `eager` artifacts."""
    root = tmp_path_factory.mktemp("eager") / "cache"
    warm_fixture("tiny_llama", root, adaptor="eager")
    return root
