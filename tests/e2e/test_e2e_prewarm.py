"""The jobs that README shows for GitHub Actions and GitLab: their steps run here, as the shell script that they are."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cgtool.store.layout import CacheLayout

REPO = Path(__file__).resolve().parents[2]
BLOCKS = [
    yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
]
GITHUB, GITLAB = BLOCKS

pytestmark = pytest.mark.torch


def steps_of(lines):
    """The lines of a job that call cgtool."""
    return [line for line in lines if line.startswith("cgtool ")]


def github_steps():
    runs = [step["run"] for step in GITHUB["jobs"]["prewarm"]["steps"] if "run" in step]
    return steps_of(line for run in runs for line in run.splitlines())


def test_both_jobs_do_the_same():
    assert github_steps() == steps_of(GITLAB["prewarm"]["script"])
    assert [line.split()[1] for line in github_steps()] == ["warm", "prune", "export"]


def test_both_jobs_keep_the_folder_that_cgtool_fills():
    job = GITHUB["jobs"]["prewarm"]
    (kept,) = [step["with"]["path"] for step in job["steps"] if step.get("uses", "").startswith("actions/cache@")]
    assert job["env"]["CGTOOL_CACHE_DIR"].endswith("/" + kept)
    assert GITLAB["prewarm"]["variables"]["CGTOOL_CACHE_DIR"].endswith("/" + GITLAB["prewarm"]["cache"]["paths"][0])


def test_the_steps_warm_once_and_hand_over_what_serves(tmp_path, monkeypatch):
    """A first run compiles, a second one finds all of it, and a machine that imports the bundle is served."""
    command = tmp_path / "bin" / "cgtool"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-m", "cgtool"])} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("MODEL", str(REPO / "tests" / "cli" / "cli_sample_model.py") + ":build")
    monkeypatch.setenv("CGTOOL_CACHE_DIR", str(tmp_path / ".cgtool"))
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")  # the steps are shown here, and not a compiler
    script = "\n".join(github_steps())

    def sh(text):
        return subprocess.run(
            ["bash", "-e", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )

    def compiled():
        return sorted(path.parent.name for path in CacheLayout(root=tmp_path / ".cgtool").units_dir.rglob("unit.json"))

    first = sh(script)
    assert first.returncode == 0, first.stderr
    units = compiled()
    again = sh(script)
    assert again.returncode == 0, again.stderr
    assert compiled() == units
    monkeypatch.setenv("CGTOOL_CACHE_DIR", str(tmp_path / "server"))
    served = sh('cgtool import model.tar.zst --trust && cgtool warm "$MODEL" --check --json')
    assert served.returncode == 0, served.stderr
    assert json.loads(served.stdout[served.stdout.index("{") :])["hit"] is True
