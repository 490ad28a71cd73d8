"""Caches of the fixtures, compiled with `aot_inductor` once in a session of tests, whichever workers it has."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import FIXTURES, SIZES, warm
from hold_harness import warm_fixture

from cgtool.store.lock import file_lock


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """A cache that one warm filled from nothing, and what that warm reported; nobody writes to it."""

    root: Path
    report: Any

    def copy(self, root: Path) -> Path:
        """Copy the cache with the links between its files, for a test that writes."""
        root.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", self.root, root], check=True)
        return root


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[..., Path]:
    """Return a function: a name and what fills a folder → the folder, filled by whichever worker came first."""
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
def sized_cache(once: Callable[..., Path]) -> Callable[[str], Warmed]:
    """Return a function: name of a fixture → its cache, warmed for `SIZES` from an empty folder."""

    def warmed(name: str) -> Warmed:
        def fill(folder: Path) -> None:
            arguments = ("--adaptor", "aot_inductor", "--compile-sizes", SIZES[name])
            report = warm(f"{FIXTURES / name}.py:build", folder / "cache", *arguments)
            (folder / "report.json").write_text(json.dumps(report))

        folder = once(f"sized-{name}", fill)
        return Warmed(root=folder / "cache", report=json.loads((folder / "report.json").read_text()))

    return warmed


@pytest.fixture(scope="session")
def aot_cache(once: Callable[..., Path], sized_cache: Callable[[str], Warmed]) -> Callable[..., Path]:
    """Return a function: name of a fixture (or several) → the root of a cache that serves them.

    `llama` has its sizes, the others have none.
    """

    def warmed(*names: str) -> Path:
        # One root for all names, which a name fills when it is first asked for.
        root = once("aot", lambda folder: None) / "cache"
        for name in names:
            once(f"aot-{name}", lambda _, name=name: add(name, root))
        return root

    def add(name: str, root: Path) -> None:
        if name == "llama":
            shutil.copytree(sized_cache("tiny_llama").root, root, copy_function=_copy_new, dirs_exist_ok=True)
        else:
            warm_fixture(name, root)

    return warmed


def _copy_new(source: str, target: str) -> None:
    if not Path(target).exists():
        shutil.copy2(source, target)


@pytest.fixture(scope="session")
def eager_cache(once: Callable[..., Path]) -> Path:
    """Return the root of a cache that serves `llama` with `eager` artifacts."""
    return once("eager", lambda folder: warm_fixture("llama", folder / "cache", adaptor="eager")) / "cache"
