"""A Dask cluster on loopback: workers that differ, die, hang and come late, and a scheduler that dies."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading

import pytest

pytest.importorskip("torch")

distributed = pytest.importorskip("distributed")

import hostile_adaptors as hostile  # noqa: E402
from cli_harness import REPO, run, start  # noqa: E402
from worker_harness import compile_on, stored_units, wait_until  # noqa: E402

from cgtool.errors import ExecutorError, UnitsFailedError  # noqa: E402
from cgtool.executors import engines  # noqa: E402
from cgtool.executors.engines import open_engine  # noqa: E402

pytestmark = pytest.mark.torch

MODEL = f"{REPO / 'tests/cli/cli_sample_model.py'}:build"


def made_by(events):
    """Return the worker that made each unit, according to the progress events."""
    workers = [event.message.partition(" by ")[2] for event in events if event.secs is not None]
    return [worker for worker in workers if worker]


def test_two_workers_share_a_model(dask, site, cache_root, tmp_path):
    dask.add_workers(site, site)
    log = tmp_path / "log"
    options = ("--adaptor", "worded", "--inductor-config", f'{{"log": "{log}", "secs": 1}}', "--no-proof")
    done = run("warm", MODEL, "--executor", dask.url, "--cache-dir", cache_root, "--json", *options, env=site)
    assert done.code == 0, done.err
    assert (done.report["compiled"], done.report["notes"]) == (4, [])
    workers = {line.partition(" by ")[2].split()[0] for line in done.err.splitlines() if " by " in line}
    assert len(workers) == 2
    assert all(worker.startswith("tcp://127.0.0.1:") for worker in workers)


@pytest.fixture
def edited(tmp_path):
    """A folder with a different cgtool: this checkout with one more line."""
    folder = tmp_path / "edited"
    shutil.copytree(REPO / "cgtool", folder / "cgtool", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "cgtool" / "compiler" / "fx_piece.py").open("a") as file:
        file.write("\n_EDITED = True\n")
    return folder


def test_workers_that_differ_refuse_with_the_difference(dask, edited, cache_root):
    dask.add_workers(
        {"PYTHONPATH": str(edited)}, {"ATEN_CPU_CAPABILITY": "default"}, {"PYTHONPATH": dask.without_cgtool}
    )
    with pytest.raises(UnitsFailedError, match="no worker of dask://127") as caught:
        compile_on(dask.url, hostile.work_of(0), cache_root)
    (reason,) = caught.value.__cause__.args
    assert "cgtool.compiler has changed (its digest was" in reason
    assert 'target.cpu.capability was "' in reason
    assert 'the environment variable ATEN_CPU_CAPABILITY was unset and is "default" now' in reason
    assert "ImportError: there is no cgtool here" in reason
    assert len(reason.splitlines()) == 4
    dask.add_worker()
    events = []
    done = compile_on(dask.url, hostile.work_of(0, 50, 100 + 50), cache_root, events=events)
    assert done.compiled == 3
    assert len(set(made_by(events))) == 1


def test_the_unit_of_a_killed_worker_is_compiled_by_another_one(dask, site, worded_here, cache_root, tmp_path):
    log, gate = tmp_path / "log", tmp_path / "gate"
    first = dask.add_worker(**site)

    def kill_and_replace():
        wait_until(lambda: stored_units(cache_root) == 1 and len(log.read_text().split()) == 2)
        first.kill()
        dask.add_worker(**site)
        gate.touch()

    helper = threading.Thread(target=kill_and_replace)
    helper.start()
    work = hostile.work_of(0, 50, adaptor="worded")
    done = compile_on(dask.url, work, cache_root, options={"log": str(log), "gate": str(gate)})
    helper.join()
    assert done.compiled == stored_units(cache_root) == 2
    assert len(log.read_text().split()) == 3


def test_a_unit_that_kills_two_workers_fails_alone(dask, cache_root):
    workers = dask.add_workers({}, {}, {})
    with pytest.raises(UnitsFailedError, match=r"piece 0 \(general\): two attempts on workers failed") as caught:
        compile_on(dask.url, hostile.work_of(hostile.number_of(hostile.kill_worker), 0, 50), cache_root)
    assert str(caught.value).count("tcp://127.0.0.1:") == 2
    assert stored_units(cache_root) == 2
    assert sum(worker.poll() is None for worker in workers) == 1


@pytest.mark.slow
def test_a_unit_that_kills_all_workers_fails(dask, cache_root):
    workers = dask.add_workers({}, {})
    with pytest.raises(UnitsFailedError, match="two attempts on workers failed") as caught:
        compile_on(dask.url, hostile.work_of(hostile.number_of(hostile.kill_worker)), cache_root)
    assert str(caught.value).count("it died while compiling this unit") == 2
    assert all(worker.wait(10) for worker in workers)


@pytest.mark.slow  # Dask waits for ten seconds, and then does as with a worker that died
@pytest.mark.parametrize("own_dask", [{"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "10s"}], indirect=True)
def test_the_unit_of_a_hanging_worker_is_compiled_by_another_one(own_dask, cache_root, tmp_path):
    log, events = tmp_path / "log", []
    first = own_dask.add_worker()

    def stop_and_replace():
        wait_until(lambda: log.exists() and log.read_text())
        first.send_signal(signal.SIGSTOP)
        own_dask.add_worker()
        (tmp_path / "go").touch()

    helper = threading.Thread(target=stop_and_replace)
    helper.start()
    options = {"log": str(log), "gate": str(tmp_path / "go")}
    done = compile_on(own_dask.url, hostile.work_of(hostile.WAIT), cache_root, options=options, events=events)
    helper.join()
    assert done.compiled == 1
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_late_worker_compiles_what_others_refused_and_left(dask, cache_root, tmp_path):
    log, events = tmp_path / "log", []
    _, fit = dask.add_workers({"ATEN_CPU_CAPABILITY": "default"}, {})

    def replace():
        wait_until(lambda: log.exists() and log.read_text())
        dask.add_worker()
        fit.kill()
        (tmp_path / "go").touch()

    helper = threading.Thread(target=replace)
    helper.start()
    options = {"log": str(log), "gate": str(tmp_path / "go")}
    work = hostile.work_of(hostile.WAIT, 0, 50)
    done = compile_on(dask.url, work, cache_root, options=options, events=events)
    helper.join()
    assert done.compiled == stored_units(cache_root) == 3


def test_an_interruption_cancels_queued_units_and_keeps_finished_ones(dask, site, cache_root, tmp_path):
    dask.add_worker(**site)
    log, gate = tmp_path / "log", tmp_path / "gate"
    options = ("--adaptor", "worded", "--inductor-config", f'{{"log": "{log}", "gate": "{gate}"}}')
    warm = start("warm", MODEL, "--executor", dask.url, "--cache-dir", cache_root, *options, env=site)
    wait_until(lambda: log.exists() and len(log.read_text().split()) == 2, secs=180)
    wait_until(lambda: stored_units(cache_root) == 1)
    os.kill(warm.pid, signal.SIGINT)
    ended = warm.end(secs=60)
    assert ended.code == 130
    assert "Finished work is kept" in ended.err
    gate.touch()
    with distributed.Client(dask.address, set_as_default=False) as client:
        wait_until(lambda: not any(client.processing().values()))
    assert len(log.read_text().split()) == 2
    assert stored_units(cache_root) == 1


def test_finished_units_are_stored_when_the_scheduler_dies(own_dask, cache_root):
    own_dask.add_workers({}, {})  # one hangs

    def kill():
        wait_until(lambda: stored_units(cache_root) == 1)
        own_dask.scheduler.kill()

    helper = threading.Thread(target=kill)
    helper.start()
    with pytest.raises(ExecutorError, match=r"is gone .*Finished artifacts are stored"):
        compile_on(own_dask.url, hostile.work_of(0, hostile.number_of(hostile.hang)), cache_root)
    helper.join()
    assert stored_units(cache_root) == 1


def test_a_cluster_without_workers_is_abandoned_after_a_while(dask, cache_root):
    events = []
    with pytest.raises(ExecutorError, match=r"has had no workers for 0\.1 s"):
        compile_on(dask.url, hostile.work_of(0, 50), cache_root, patience_secs=0.1, events=events)
    messages = [event.message for event in events if "waiting" in event.message]
    assert messages == [f"waiting for workers: {dask.url} has none (for at most 0.1 s)"]


def test_a_scheduler_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(engines, "_CONNECT_SECS", 0.2)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(ExecutorError, match=r"The Dask scheduler at 127\.0\.0\.1:.* does not respond"):
            open_engine(f"dask://127.0.0.1:{bound.getsockname()[1]}")
