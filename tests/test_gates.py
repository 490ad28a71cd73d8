"""The checks of CI: ruff, mypy, and a reason for each ignored rule."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _run(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing():
    _run("ruff", "check", "--output-format=concise", ".")


def test_mypy_finds_nothing():
    _run("mypy")


def test_every_ignored_rule_has_its_reason():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rules = tomllib.loads(text)["tool"]["ruff"]["lint"]
    ignored = [*rules["ignore"], *(rule for group in rules["per-file-ignores"].values() for rule in group)]
    reasons = [line for line in text.splitlines() if line.lstrip().startswith('"') and '", ' in line and "# " in line]
    assert len(ignored) > 10
    assert len(reasons) == len(ignored)
