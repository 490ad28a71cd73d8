"""Signals to a warm whose compilers never end: none of its processes survives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from cli_harness import start
from worker_harness import is_alive, processes_with, wait_until

pytestmark = pytest.mark.torch

MODEL = Path(__file__).with_name("doomed_model.py")


@pytest.fixture
def warming(tmp_path, cache_root, worded_site):
    """A `cgtool warm` that is compiling two pieces, with a mark in its compilers' command lines."""
    config = json.dumps({"mark": str(tmp_path)})
    arguments = ("warm", f"{MODEL}:build", "--jobs", 2, "--no-proof", "--adaptor", "worded")
    running = start(*arguments, "--cache-dir", cache_root, "--inductor-config", config, env=worded_site)
    pids = tmp_path / "pids"
    wait_until(lambda: running.is_over() or (pids.exists() and len(pids.read_text().split()) == 2), secs=180)
    assert not running.is_over(), running.end()
    yield running
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="SIGINT"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, id="SIGKILL"),
    ],
)
def test_no_process_outlives_a_killed_warm(warming, tmp_path, cache_root, signum, code):
    compilers = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    workers = workers_of(compilers)
    assert len(compilers) == len(workers) == 2
    os.kill(warming.pid, signum)
    ran = warming.end(secs=180)  # other work may keep the machine busy
    assert ran.code == code
    if signum != signal.SIGKILL:  # it ends them before it ends itself
        assert not [pid for pid in (*compilers, *workers) if is_alive(pid)]
    wait_until(lambda: not processes_with(str(tmp_path)), secs=180)
    wait_until(lambda: not [pid for pid in (*compilers, *workers) if is_alive(pid)], secs=180)
    assert list(cache_root.rglob("unit.json")) == []
    if signum == signal.SIGINT:
        assert "Finished work is kept" in ran.err


def workers_of(compilers):
    """Return the parents of compilers, which are the workers."""
    return [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in compilers]
