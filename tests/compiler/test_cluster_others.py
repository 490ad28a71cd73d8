"""Whole warms on Ray, on local Slurm jobs and on MPI, with proofs by the workers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch")


import hostile_adaptors as hostile
from cli_harness import REPO, environment, run
from worker_harness import compile_on, interrupt, processes_with, stored_units, wait_until

from cgtool.errors import ConfigError, UnitsFailedError
from cgtool.executors.engines import open_engine

pytestmark = pytest.mark.torch

MODEL = f"{REPO / 'tests/cli/cli_sample_model.py'}:build"


@pytest.fixture
def found(site):
    """The environment in which workers find cgtool and the tests' adaptors and executors."""
    return {"PYTHONPATH": os.pathsep.join([site["PYTHONPATH"], str(REPO / "tests/compiler")])}


def options(root, executor):
    return ("warm", MODEL, "--adaptor", "worded", "--cache-dir", str(root), "--json", "--executor", executor)


def mpi():
    """Return the start of a command that runs cgtool with one MPI worker."""
    pytest.importorskip("mpi4py")
    if shutil.which("mpiexec") is None:
        pytest.skip("there is no mpiexec: apt-get install openmpi-bin")
    start = ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    return [*start, sys.executable, "-m", "mpi4py.futures", "-m", "cgtool"]


def all_are_proved(report):
    proved = [artifact["proved"] for artifact in report["artifacts"]]
    return report["compiled"] == len(proved) == 4 and all(proved)


@pytest.mark.slow
def test_a_warm_on_slurm(found, cache_root, tmp_path):
    pytest.importorskip("submitit")
    done = run(*options(cache_root, f"slurm:cluster=local,folder={tmp_path / 'jobs'}"), env=found)
    assert done.code == 0, done.err
    assert all_are_proved(done.report)


@pytest.mark.slow
def test_a_unit_that_kills_two_jobs_of_slurm_fails(found, cache_root, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", found["PYTHONPATH"])
    work = hostile.work_of(hostile.number_of(hostile.kill_worker), 0)
    with pytest.raises(UnitsFailedError, match=r"piece 0 \(general\): two attempts on workers failed") as caught:
        compile_on(f"slurm:cluster=local,folder={tmp_path / 'jobs'}", work, cache_root)
    assert str(caught.value).count("a worker: Job ") == 2
    assert stored_units(cache_root) == 1


@pytest.mark.slow
def test_a_warm_on_mpi(found, cache_root):
    command = [*mpi(), *options(cache_root, "mpi")]
    done = subprocess.run(command, env=environment(**found), capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert all_are_proved(json.loads(done.stdout))


@pytest.mark.slow
def test_an_interruption_ends_processes_of_mpi(found, cache_root, tmp_path):
    command = [*mpi(), "warm", MODEL, "--executor", "mpi"]
    code, output, begun = interrupt(command, cache_root, tmp_path, num_begun=2, variables=found)
    assert code != 0
    assert "Finished work is kept" in output
    assert begun() == 2
    assert stored_units(cache_root) == 1


@pytest.fixture
def ray_head(found, tmp_path):
    """The URLs of a Ray head with two cores: directly, and through its Ray Client server."""
    pytest.importorskip("ray")
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    with socket.socket() as sock, socket.socket() as other:
        sock.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, client_port = sock.getsockname()[1], other.getsockname()[1]
    start = ["start", "--head", "--port", str(port), "--num-cpus", "2", "--include-dashboard=false"]
    start += ["--ray-client-server-port", str(client_port)]
    start += ["--disable-usage-stats", "--object-store-memory", "80000000", "--block"]
    log = tmp_path / "ray"
    with log.open("wb") as out:
        head = subprocess.Popen([*ray, *start], env=environment(**found), stdout=out, stderr=out)
    wait_until(lambda: "Ray runtime started" in log.read_text())
    yield f"ray:127.0.0.1:{port}", f"ray://127.0.0.1:{client_port}"
    head.terminate()  # with all its children
    head.wait(60)


@pytest.mark.slow
def test_a_warm_on_ray(ray_head, found, cache_root, tmp_path):
    on_the_machine, by_client = ray_head
    for _ in range(4):  # Ray forks a server for each client, which gRPC's threads sometimes stop
        done = run(*options(cache_root, by_client), env=found)
        if "Starting Ray client server failed" not in done.err:
            break
    assert done.code == 0, done.err
    assert all_are_proved(done.report)
    killer = hostile.number_of(hostile.kill_worker)
    with pytest.raises(UnitsFailedError, match=r"piece 0 \(general\): two attempts on workers failed"):
        compile_on(on_the_machine, hostile.work_of(killer, 0, 50), cache_root / "other")
    assert stored_units(cache_root / "other") == 2
    command = [sys.executable, "-m", "cgtool", "warm", MODEL, "--executor", on_the_machine]
    code, output, begun = interrupt(command, cache_root / "third", tmp_path, num_begun=3, variables=found)
    assert code == 130
    assert "Finished work is kept" in output
    site = found["PYTHONPATH"].partition(os.pathsep)[0]
    wait_until(lambda: not processes_with(site))  # children of the workers, while the gate is shut
    assert begun() == 3
    assert stored_units(cache_root / "third") == 1


def test_an_unknown_parameter_of_slurm_is_an_error(tmp_path):
    pytest.importorskip("submitit")
    with pytest.raises(ConfigError, match=r"The executor 'slurm' does not accept 'cluster=local,folder=.*,no_such=1'"):
        open_engine(f"slurm:cluster=local,folder={tmp_path},no_such=1")
