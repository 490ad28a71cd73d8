"""Several processes at once, and processes that are killed: what is compiled is compiled once, and stays."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e_harness import LLAMA, cgtool, compare, counts, environment, inspect, units, warm

pytestmark = pytest.mark.torch

#: Unique artifacts of a decoder of two layers: three pieces, each of general shape, of 1 and of 8 tokens.
UNITS = 9
ARGUMENTS = ("--arg", "num_layers=2", "--compile-sizes", "1,8")


def start(root, *arguments, layers=2, sizes="1,8"):
    """Start a warm in a process group of its own."""
    model = (LLAMA, "--arg", f"num_layers={layers}", "--compile-sizes", sizes)
    return subprocess.Popen(
        [sys.executable, "-m", "cgtool", "warm", *model, "--cache-dir", root, "--json", *arguments],
        env=environment({"PYTHONUNBUFFERED": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill(process):
    """Kill a process and all that it started, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def check_whole(root: Path):
    """The cache holds one entry, which serves the model."""
    entry = inspect(root)
    assert counts(entry) == (5, 2, 3, UNITS)
    assert cgtool("warm", LLAMA, "--cache-dir", root, "--check", *ARGUMENTS).code == 0
    sizes = [{"num_tokens": n} for n in (1, 2, 8, 9)]
    assert compare(LLAMA, root, sizes, arguments={"num_layers": 2})["failures"] == []


def check_goes_on(root: Path, *arguments: str):
    """The next warm compiles only what had not been stored."""
    stored = units(root)
    report = warm(LLAMA, root, *ARGUMENTS, *arguments)
    assert (report["compiled"], report["reused"]) == (UNITS - stored, stored)
    assert report["hit"] == (report["trace_secs"] == 0.0)
    assert units(root) == UNITS
    return stored


def test_four_processes_on_an_empty_cache_compile_each_piece_once(tmp_path):
    root = tmp_path / "cache"
    processes = [start(root, "--quiet") for _ in range(4)]
    reports = []
    for process in processes:
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, err
        reports.append(json.loads(out))
    assert sum(report["compiled"] for report in reports) == UNITS
    assert all(report["compiled"] + report["reused"] == UNITS for report in reports)
    assert len({report["hash"] for report in reports}) == 1
    assert units(root) == UNITS
    check_whole(root)


def test_four_ranks_and_two_models_share_what_is_equal(tmp_path):
    """Ranks of one entry and entries of one cache: four processes, four plans, nine units."""
    root = tmp_path / "cache"
    processes = [
        start(root, "--quiet", "--rank", "0"),
        start(root, "--quiet", "--rank", "1"),
        start(root, "--quiet", "--prefix", "head"),
        start(root, "--quiet", layers=3),
    ]
    compiled = 0
    for process in processes:
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, err
        compiled += json.loads(out)["compiled"]
    assert compiled == UNITS
    listing = cgtool("inspect", "cache", root, "--json").report
    named = sorted((entry["rank"], entry["prefix"], entry["pieces"]) for entry in listing["entries"])
    assert named == [(0, "backbone", 5), (0, "backbone", 7), (0, "head", 5), (1, "backbone", 5)]
    assert listing["warnings"] == []


def test_a_kill_between_two_compiles_loses_at_most_one(tmp_path):
    root = tmp_path / "cache"
    process = start(root)
    for line in process.stderr:
        if line.startswith("compile 4/"):
            break
    kill(process)
    stored = check_goes_on(root)
    assert 4 <= stored < UNITS
    check_whole(root)


def test_a_kill_of_one_of_two_leaves_the_other_to_finish(tmp_path):
    """The one that waits for a unit goes on by itself when its holder dies."""
    root = tmp_path / "cache"
    first = start(root)
    for line in first.stderr:
        if line.startswith("split"):
            break
    second = start(root)
    for line in first.stderr:
        if line.startswith("compile 3/"):
            break
    kill(first)
    out, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    assert json.loads(out)["compiled"] <= UNITS - 3
    assert units(root) == UNITS
    check_whole(root)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_at_ten_instants_lose_nothing_that_was_stored(tmp_path):
    """Ten seeded instants, one in each tenth of a run's time; most fall between the first unit and the last."""
    began = time.monotonic()
    out, err = start(tmp_path / "whole").communicate(timeout=500)
    duration = time.monotonic() - began
    assert json.loads(out)["compiled"] == UNITS, err
    rng = random.Random(20260730)
    stored = []
    for tenth in range(10):
        root = tmp_path / f"killed-{tenth}"
        process = start(root)
        try:
            process.communicate(timeout=duration * (tenth + rng.random()) / 10)
        except subprocess.TimeoutExpired:
            kill(process)
        stored.append(check_goes_on(root))
        assert counts(inspect(root)) == (5, 2, 3, UNITS)
        assert cgtool("warm", LLAMA, "--cache-dir", root, "--check", *ARGUMENTS).code == 0  # reads every artifact
    check_whole(root)
    assert len(set(stored)) > 3, f"the instants fell too close together to prove anything: {stored}"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_while_an_entry_grows_leave_it_serving_what_it_served(tmp_path):
    """An entry that is whole gets further sizes, and is killed meanwhile: what it held is still there and serves."""
    root = tmp_path / "cache"
    assert warm(LLAMA, root, *ARGUMENTS)["compiled"] == UNITS
    rng = random.Random(7)
    for size in (16, 32, 64):
        process = start(root, sizes=f"1,8,{size}")
        for line in process.stderr:
            if line.startswith(f"compile {rng.choice([1, 2, 3])}/"):
                break
        kill(process)
        report = warm(LLAMA, root, *ARGUMENTS)
        assert (report["hit"], report["compiled"]) == (True, 0)
        sizes = [{"num_tokens": n} for n in (1, 8, size)]
        assert compare(LLAMA, root, sizes, arguments={"num_layers": 2})["failures"] == []
    before = units(root)
    report = warm(LLAMA, root, "--arg", "num_layers=2", "--compile-sizes", "1,8,16,32,64")
    assert report["compiled"] == UNITS + 9 - before
    assert counts(report) == (5, 2, 3, UNITS + 9)
