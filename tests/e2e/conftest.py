"""Caches that are warmed once per session, by whichever worker needs them first."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import LLAMA, SERVED, warm

from cgtool.store.lock import file_lock


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """A cache filled by a single warm, and the report of that warm. Tests must not write to it."""

    root: Path
    report: Any

    def copy(self, root: Path) -> Path:
        """Copy the cache, including its hard links, for tests that write."""
        root.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", self.root, root], check=True)
        return root


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[..., Path]:
    """Return a function that fills a named folder; whichever worker needs it first does the work for all."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "shared"
    shared.mkdir(exist_ok=True)

    def filled(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with file_lock(shared / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return filled


@pytest.fixture(scope="session")
def warmed_once(once: Callable[..., Path]) -> Callable[..., Warmed]:
    """Return a function that warms a model in a cache of its own, once per session."""

    def warmed(name: str, model: str, *arguments: object) -> Warmed:
        def fill(folder: Path) -> None:
            report = warm(model, folder / "cache", "--jobs", 0, *arguments, forks=True)
            (folder / "report.json").write_text(json.dumps(report))

        folder = once(name, fill)
        return Warmed(root=folder / "cache", report=json.loads((folder / "report.json").read_text()))

    return warmed


@pytest.fixture(scope="session")
def native_llama(warmed_once: Callable[..., Warmed]) -> Warmed:
    """`llama` of served.py as native code: three artifacts, for two tokens and more."""
    return warmed_once("native-llama", f"{SERVED}:llama", "--adaptor", "aot_inductor")


@pytest.fixture(scope="session")
def native_vision(warmed_once: Callable[..., Warmed]) -> Warmed:
    """`vision` of served.py as native code: two artifacts, one of them for a single image."""
    return warmed_once("native-vision", f"{SERVED}:vision", "--adaptor", "aot_inductor", "--no-proof")


@pytest.fixture(scope="session")
def eager_llama(warmed_once: Callable[..., Warmed]) -> Warmed:
    """The Llama fixture with `eager` artifacts: three each for one token, for eight, and for other numbers."""
    return warmed_once("eager-llama", LLAMA, "--adaptor", "eager", "--compile-sizes", "1,8")
