"""Starts models from a cache as a server would: in processes that have only Python, torch and that cache."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli_harness import forked
from e2e_harness import FIXTURES, REPO, Ran, warm

CHILD = Path(__file__).with_name("hold_child.py")
NAMES = ("llama", "vision")
#: Tools that compiling needs and serving does not.
TOOLS = ("g++", "gcc", "c++", "cc", "clang", "clang++", "cpp", "ld", "as", "ptxas", "nvcc")


def warm_model(model: str, root: Path, *, adaptor: str = "aot_inductor") -> None:
    """Compile a model without a proof, and check that no artifact fell back to another adaptor."""
    report = warm(model, root, "--no-proof", "--adaptor", adaptor, "--jobs", 0)
    assert {artifact["adaptor"] for artifact in report["artifacts"]} == {adaptor}


class Bare:
    """An environment with an empty home, empty cache folders, and compilers that fail and record their use.

    Args:
        folder: Created to hold all of this.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "poison.log"
        self.places = {name: folder / name for name in ("home", "tmp", "inductor", "triton", "work")}
        for place in self.places.values():
            place.mkdir(parents=True)
        self.tools = folder / "tools"
        self.tools.mkdir()
        for tool in TOOLS:
            path = self.tools / tool
            path.write_text(f'#!/bin/sh\necho "{tool} $*" >> "{self.log}"\nexit 1\n')
            path.chmod(0o755)

    def environment(self, **changes: str | None) -> dict[str, str]:
        """Return the complete environment of a process; None removes a variable."""
        values: dict[str, str | None] = {
            "PATH": str(self.tools),
            "HOME": str(self.places["home"]),
            "TMPDIR": str(self.places["tmp"]),
            "TORCHINDUCTOR_CACHE_DIR": str(self.places["inductor"]),
            "TRITON_CACHE_DIR": str(self.places["triton"]),
            "PYTHONPATH": os.pathsep.join([str(REPO), str(FIXTURES)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            **changes,
        }
        return {name: value for name, value in values.items() if value is not None}

    def written(self) -> list[str]:
        """Return every file that was written to these folders."""
        return [str(path) for place in self.places.values() for path in place.rglob("*")]

    def tried(self) -> list[str]:
        """Return the command lines of the failing tools that were run."""
        return sorted(set(self.log.read_text().splitlines())) if self.log.exists() else []

    def run(self, command: list[str], **options: Any) -> Ran:
        """Run a command in this environment to its end."""
        env = self.environment(**options.pop("env", {}))
        options = {"cwd": self.places["work"], "timeout": 300, "capture_output": True, "text": True, **options}
        done = subprocess.run(command, env=env, check=False, **options)
        return Ran(code=done.returncode, out=done.stdout or "", err=done.stderr or "")

    def fork(self, source: str, *arguments: object, env: Mapping[str, str | None] | None = None) -> Ran:
        """Run a program in this environment, in a fork of a process that has imported torch and the runtime."""
        ran = forked(source, *arguments, cwd=self.places["work"], env=self.environment(**(env or {})))
        return Ran(code=ran.code, out=ran.out, err=ran.err)

    def start(self, name: str, root: Path, *, before: str = "", env: Mapping[str, str | None] | None = None) -> Any:
        """Load a model in a fork and call it once; return the report of tests/e2e/hold_child.py.

        Args:
            name: The name of its factory in served.py.
            root: The root of the cache.
            before: Code to run first.
            env: Changes to the environment.
        """
        source = f"{before}\nimport runpy\nrunpy.run_path({str(CHILD)!r}, run_name='__main__')"
        return self.fork(source, json.dumps([name, str(root)]), env=env).report

    def start_fresh(self, name: str, root: Path) -> Any:
        """Do the same in a fresh process."""
        return self.run([sys.executable, str(CHILD), json.dumps([name, str(root)])]).report


def fixture_spec(name: str) -> Any:
    """Build a model of served.py in this process."""
    return getattr(importlib.import_module("served"), name)()
