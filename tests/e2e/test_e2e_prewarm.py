"""The jobs that README shows for GitHub Actions and GitLab: their steps run here, as the shell script that they are."""

from __future__ import annotations

import re
import subprocess
from subprocess import PIPE

import pytest
import yaml
from cli_harness import REPO, run

from cgtool.store.layout import CacheLayout

BLOCKS = [
    yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
]
GITHUB, GITLAB = BLOCKS

pytestmark = pytest.mark.torch

#: Writes the words of a command, a line each, and reads its exit code.
COMMAND = """cgtool() { printf '%s\\n' "$@" ''; read -r code; return "$code"; }
"""


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
    monkeypatch.setenv("MODEL", str(REPO / "tests" / "cli" / "cli_sample_model.py") + ":build")
    monkeypatch.setenv("CGTOOL_CACHE_DIR", str(tmp_path / ".cgtool"))
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")  # the steps are shown here, and not a compiler
    script = "\n".join(github_steps())

    def sh(script):
        """Run a script whose commands are forks of a process that imported torch; return what came of the last."""
        process = subprocess.Popen(["bash", "-e", "-c", COMMAND + script], stdin=PIPE, stdout=PIPE, text=True)
        words = []
        for line in process.stdout:
            if line != "\n":
                words.append(line.removesuffix("\n"))
                continue
            ran, words = run(*words, cwd=tmp_path), []
            print(ran.code, file=process.stdin, flush=True)
        assert process.wait() == 0, ran.err
        process.stdin.close()
        process.stdout.close()
        return ran

    def compiled():
        return sorted(path.parent.name for path in CacheLayout(root=tmp_path / ".cgtool").units_dir.rglob("unit.json"))

    sh(script)
    units = compiled()
    sh(script)
    assert compiled() == units
    monkeypatch.setenv("CGTOOL_CACHE_DIR", str(tmp_path / "server"))
    served = sh('cgtool import model.tar.zst --trust && cgtool warm "$MODEL" --check --json')
    assert served.report["hit"] is True
