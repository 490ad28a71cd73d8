"""Folders with a flaw: a small disk, a read-only mount. Skipped where this process may not mount."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def _mount(*arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")


def _unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], check=True, capture_output=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", "size=512k,mode=755", "tmpfs", str(folder))
    yield folder
    _unmount(folder)


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], Path]]:
    """Makes a folder read-only for everyone, root too."""
    mounted = []

    def make(folder: Path) -> Path:
        _mount("--bind", str(folder), str(folder))
        mounted.append(folder)
        _mount("-o", "remount,ro,bind", str(folder))
        return folder

    yield make
    for folder in mounted:
        _unmount(folder)
