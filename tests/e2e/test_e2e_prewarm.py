"""README's steps for GitHub Actions, GitLab, Kubernetes and Docker, run in a shell."""

from __future__ import annotations

import re
import subprocess
from subprocess import PIPE

import pytest
import yaml
from cli_harness import REPO, run
from remote_servers import s3

from cgtool.store.layout import CacheLayout

README = (REPO / "README.md").read_text()
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)]
#: The first of each kind keeps a folder between runs; the second uses a bucket.
GITHUB, GITHUB_BUCKET = (block for block in BLOCKS if "jobs" in block)
GITLAB, GITLAB_BUCKET = (block for block in BLOCKS if "prewarm" in block)
(POD,) = (block for block in BLOCKS if "initContainers" in block)

pytestmark = pytest.mark.torch

#: Prints the arguments of a command, one per line, and reads its exit code.
COMMAND = """cgtool() { printf '%s\\n' "$@" ''; read -r code; return "$code"; }
"""


def steps_of(lines):
    """Return the lines of a job that call cgtool."""
    return [line for line in lines if line.startswith("cgtool ")]


def github_steps(workflow=GITHUB):
    runs = [step["run"] for step in workflow["jobs"]["prewarm"]["steps"] if "run" in step]
    return steps_of(line for run in runs for line in run.splitlines())


def test_both_jobs_run_the_same_steps():
    assert github_steps() == steps_of(GITLAB["prewarm"]["script"])
    assert [line.split()[1] for line in github_steps()] == ["warm", "prune", "export"]


def test_both_jobs_keep_the_cache_folder():
    job = GITHUB["jobs"]["prewarm"]
    (kept,) = [step["with"]["path"] for step in job["steps"] if step.get("uses", "").startswith("actions/cache@")]
    assert job["env"]["CGTOOL_CACHE_DIR"].endswith("/" + kept)
    assert GITLAB["prewarm"]["variables"]["CGTOOL_CACHE_DIR"].endswith("/" + GITLAB["prewarm"]["cache"]["paths"][0])


@pytest.fixture
def sh(tmp_path, monkeypatch):
    """Runs scripts in the folder of the test, with MODEL and CGTOOL_CACHE_DIR set."""
    monkeypatch.setenv("MODEL", str(REPO / "tests" / "cli" / "cli_sample_model.py") + ":build")
    monkeypatch.setenv("CGTOOL_CACHE_DIR", str(tmp_path / ".cgtool"))
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")  # the test is about the steps, not about a compiler

    def sh(script):
        """Run a script, with each command as a fork of a process that has imported torch; return the last result."""
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

    return sh


def test_the_steps_compile_once_and_export_an_entry_that_hits(sh, tmp_path, monkeypatch):
    """A first run compiles, a second one reuses all units, and a machine that imports the bundle hits."""
    script = "\n".join(github_steps())

    def compiled():
        return sorted(path.parent.name for path in CacheLayout(root=tmp_path / ".cgtool").units_dir.rglob("unit.json"))

    sh(script)
    units = compiled()
    sh(script)
    assert compiled() == units
    monkeypatch.setenv("CGTOOL_CACHE_DIR", str(tmp_path / "server"))
    served = sh('cgtool import model.tar.zst --trust && cgtool warm "$MODEL" --check --json')
    assert served.report["hit"] is True


def test_both_jobs_push_to_a_bucket(sh, tmp_path, monkeypatch):
    steps = github_steps(GITHUB_BUCKET)
    assert steps == steps_of(GITLAB_BUCKET["prewarm"]["script"])
    variables = GITHUB_BUCKET["jobs"]["prewarm"]["env"]
    assert variables.items() <= GITLAB_BUCKET["prewarm"]["variables"].items()
    with s3(monkeypatch):
        monkeypatch.setenv("CGTOOL_REMOTE", variables["CGTOOL_REMOTE"])
        for machine, hit in (("first", False), ("second", True)):
            monkeypatch.setenv("CGTOOL_CACHE_DIR", str(tmp_path / machine))
            assert sh("\n".join(steps) + " --json").report["hit"] is hit


def test_an_init_container_pulls_an_entry_that_hits(sh, tmp_path, monkeypatch):
    (pull,) = POD["initContainers"]
    (mount,), (volume,) = pull["volumeMounts"], POD["volumes"]
    variables = {variable["name"]: variable["value"] for variable in pull["env"]}
    assert (mount["mountPath"], mount["name"]) == (variables["CGTOOL_CACHE_DIR"], volume["name"])
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("STORE", f"file://{tmp_path / 'store'}")
    sh('cgtool warm "$MODEL" && cgtool push "$STORE" --all')
    monkeypatch.setenv("CGTOOL_CACHE_DIR", str(tmp_path / "pod"))
    shell, option, script = pull["command"]
    assert (shell, option) == ("sh", "-c")
    assert sh(f'{script} && cgtool warm "$MODEL" --check --json').report["hit"] is True


def test_an_image_contains_an_entry_that_hits(sh, tmp_path, monkeypatch):
    (step,) = re.findall(r"`RUN ([^`]*)`", README)
    source, target = re.search(r"`COPY --from=warm (\S+) (\S+)`", README).groups()
    assert f"ENV CGTOOL_CACHE_DIR={target}" in README
    layer = str(tmp_path / "layer")
    sh(step.replace("serve/model.py:build", '"$MODEL"').replace(f"{source} ", f"{layer} "))
    monkeypatch.setenv("CGTOOL_CACHE_DIR", layer)
    assert sh('cgtool warm "$MODEL" --check --json').report["hit"] is True
