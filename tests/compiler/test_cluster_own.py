"""Executors of other distributions: how they are found, and what their workers return or fail to."""

from __future__ import annotations

import re
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")


import hostile_adaptors as hostile
from cli_harness import REPO, run
from worker_harness import compile_on, stored_units

from cgtool.compiler import cluster
from cgtool.compiler.request import factors_here
from cgtool.errors import ConfigError, UnitsFailedError
from cgtool.executors.engines import open_engine

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("forked_children")]

MODEL = f"{REPO / 'tests/cli/cli_sample_model.py'}:build"
HERE = f"{socket.gethostname()}:"


@pytest.fixture
def own(site, worded_here):
    """Make the installed executors known to this process."""


def warm(site, root, *arguments):
    return run("warm", MODEL, "--cache-dir", root, "--adaptor", "worded", *arguments, env=site)


def test_an_installed_executor_compiles_and_proves_and_a_hit_opens_none(site, tmp_path, cache_root):
    log = tmp_path / "log"
    options = ("--json", "--inductor-config", f'{{"log": "{log}"}}')
    done = warm(site, cache_root, *options, "--executor", "threads:2")
    assert done.code == 0, done.err
    assert (done.report["compiled"], done.report["notes"]) == (4, [])
    assert log.read_text().split() == ["-c"] * 4  # children of the workers
    assert f" by {HERE}" in done.err
    assert {artifact["proved"] for artifact in done.report["artifacts"]} == {True}
    assert warm(site, cache_root, *options, "--executor", "dask://127.0.0.1:1").report["hit"]


def test_workers_can_be_processes(own, cache_root):
    events = []
    done = compile_on("processes:1", hostile.work_of(0, 50), cache_root, prove=True, events=events)
    assert [row.artifact.proved for row in done.rows] == [True, True]
    assert all(f" by {HERE}" in event.message for event in events if event.secs is not None)
    messages = [event.message for event in events if event.message.startswith("1 with the executor")]
    assert re.fullmatch(rf"1 with the executor; {HERE}\d+ made 1", messages[-1])


def test_a_unit_that_fails_on_two_workers_fails_alone(own, cache_root):
    numbers = [hostile.number_of(deed) for deed in (hostile.segfault, hostile.leave)]
    with pytest.raises(UnitsFailedError) as caught:
        compile_on("threads:2", hostile.work_of(*numbers, 0, 50), cache_root)
    for reason, words in zip(sorted(caught.value.reasons), ("SIGSEGV", "exit code 3"), strict=True):
        assert f"two attempts on workers failed, so it is not tried again.\n    {HERE}" in reason
        assert words in reason
    assert stored_units(cache_root) == 2


def test_a_unit_that_hangs_times_out_on_its_worker(own, cache_root):
    with pytest.raises(UnitsFailedError, match="took longer than 2 s"):
        compile_on("threads:1", hostile.work_of(hostile.number_of(hostile.hang)), cache_root, timeout_secs=2)


def test_a_rejected_piece_falls_back(own, cache_root):
    done = compile_on("threads:1", hostile.work_of(0, hostile.number_of(hostile.refuse)), cache_root)
    assert [(row.piece_index, row.adaptor) for row in done.rows] == [(0, "hostile"), (1, "eager")]


def test_an_artifact_that_differs_from_the_proved_one_is_refused(own, cache_root):
    with pytest.raises(UnitsFailedError, match="no worker of liars accepts it") as caught:
        compile_on("liars", hostile.work_of(0), cache_root)
    assert "It was submitted 4 times: this executor cannot exclude workers." in str(caught.value)
    reason = rf"{HERE}\d+ \(4 times\): it returned a different artifact from the one it proved"
    assert re.search(reason, str(caught.value))
    assert stored_units(cache_root) == 0


def test_a_worker_with_another_compiler_hash_refuses(own, cache_root, monkeypatch):
    monkeypatch.setattr(hostile.Hostile, "compute_hash", lambda self, options, *, max_autotune=False: "0" * 64)
    with pytest.raises(UnitsFailedError, match="the compiler, its settings or the target differ"):
        compile_on("threads:1", hostile.work_of(0), cache_root)


@pytest.mark.usefixtures("own")
def test_a_worker_with_another_torch_and_gpu_refuses_with_both_reasons(cache_root, monkeypatch):
    factors = factors_here()
    there = {"torch": {"version": "2.99.0"}, "target": {"accelerators": ["NVIDIA H100"]}}
    factors |= {name: factors[name] | changed for name, changed in there.items()}
    monkeypatch.setattr(cluster, "factors_here", lambda: factors)
    work = [replace(unit, tuned=True) for unit in hostile.work_of(0)]
    with pytest.raises(UnitsFailedError, match="no worker of threads:1 accepts it") as caught:
        compile_on("threads:1", work, cache_root)
    for message in ('torch.version was "2.99.0" and is "', "target.accelerators"):
        assert message in str(caught.value)
    assert stored_units(cache_root) == 0


@pytest.mark.parametrize("url", ["dask://127.0.0.1:1", "ray://127.0.0.1:1", "slurm:", "mpi"])
def test_a_missing_library_is_reported_with_its_pip_command(monkeypatch, url):
    for library in ("distributed", "ray", "submitit", "mpi4py"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=r"^The executor '\w+' needs .*Install it with: pip install ['\w]"):
        open_engine(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("no_such://x", "There is no executor 'no_such'; available are dask"),
        ("threads:many", "The executor 'threads' cannot be created: ValueError"),
        ("nothing", "returned a str instead of a concurrent.futures.Executor"),
    ],
)
def test_an_invalid_executor_is_an_error(own, url, message):
    with pytest.raises(ConfigError) as caught:
        open_engine(url)
    assert message in str(caught.value)


def test_an_unknown_executor_is_reported_before_tracing(site, cache_root):
    done = warm(site, cache_root, "--executor", "no_such://x")
    assert done.code == 2
    assert "There is no executor 'no_such'" in done.err
    assert "trace" not in done.err
    assert not Path(cache_root).exists() or stored_units(cache_root) == 0
