"""The wheel contains exactly the package, its command and its man pages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
#: The build backend's version in pyproject.toml.
LEAST_SETUPTOOLS = 77

_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def _has_backend():
    try:
        return int(metadata.version("setuptools").split(".")[0]) >= LEAST_SETUPTOOLS
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The members of a wheel, built from a copy without a network."""
    if not _has_backend():
        pytest.skip(f"the build backend is not installed: pip install 'setuptools>={LEAST_SETUPTOOLS}'")
    copy, built = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(REPO / name, copy)
    for name in ("cgtool", "man"):
        shutil.copytree(REPO / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(built)], cwd=copy, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (file,) = built.glob("cgtool-*.whl")
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_man_pages_are_installed(wheel):
    found = {name.split(".data/data/")[1]: data for name, data in wheel.items() if ".data/data/" in name}
    expected = {f"share/man/man{page.suffix[1:]}/{page.name}": page.read_bytes() for page in (REPO / "man").iterdir()}
    assert found == expected
    assert {"share/man/man1/cgtool.1", "share/man/man5/cgtool-cache.5"} <= set(found)


def test_the_wheel_contains_exactly_the_package(wheel):
    modules = {path.relative_to(REPO).as_posix() for path in (REPO / "cgtool").rglob("*.py")}
    inside = {name for name in wheel if ".data/" not in name and ".dist-info/" not in name}
    assert inside == modules | {"cgtool/py.typed"}


def test_the_command_is_installed(wheel):
    (entry_points,) = [data for name, data in wheel.items() if name.endswith("/entry_points.txt")]
    assert "cgtool = cgtool.cli.main:main" in entry_points.decode()
