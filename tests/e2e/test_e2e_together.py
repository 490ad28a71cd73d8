"""Several processes at once, and processes that are killed: each unit is compiled once and kept."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import cli_harness
import pytest
from e2e_harness import LLAMA, REPO, cgtool, compare, counts, inspect, units, warm

pytestmark = pytest.mark.torch

#: Unique artifacts of a decoder with two layers: three pieces, each for 1, for 8 and for other numbers of tokens.
UNITS = 9
ARGUMENTS = ("--arg", "num_layers=2", "--compile-sizes", "1,8")
NATIVE = [("--adaptor", adaptor) for adaptor in ("aot_inductor", "inductor_standalone")]


def worded(**options):
    """The arguments of an adaptor that compiles in a worker, as the default does, but uses no CPU time."""
    return ("--adaptor", "worded", "--jobs", "1", "--no-proof", "--inductor-config", json.dumps(options))


#: Gives other processes time to request the same units.
SLOW = worded(secs=0.4)


def start(root, *arguments, env=None, layers=2, sizes="1,8"):
    """Start a warm of the decoder in its own session."""
    return start_model(root, LLAMA, "--arg", f"num_layers={layers}", "--compile-sizes", sizes, *arguments, env=env)


def start_model(root, *arguments, env=None):
    """Start a warm in its own session."""
    return cli_harness.start("warm", *arguments, "--cache-dir", root, "--json", env=env)


def reports_of(started):
    """Wait for warms, which must succeed, and return their reports."""
    ended = [running.end() for running in started]
    assert {ran.code for ran in ended} == {0}, [ran.err for ran in ended]
    return [ran.report for ran in ended]


def kill(running):
    """Kill a process together with its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.end()


def check_whole(root: Path):
    """Check that the cache has a single entry, which serves the model."""
    assert counts(inspect(root)) == (5, 2, 3, UNITS)
    check_serves(root)


def check_serves(root, layers=2, env=None):
    sizes = [{"num_tokens": n} for n in (1, 2, 8, 9)]
    assert compare(LLAMA, root, sizes, arguments={"num_layers": layers}, env=env)["failures"] == []


def check_resumes(root: Path, *arguments: str):
    """Check that the next warm compiles only the units that were not stored; return how many were."""
    stored = units(root)
    report = warm(LLAMA, root, *ARGUMENTS, *arguments)
    assert (report["compiled"], report["reused"]) == (UNITS - stored, stored)
    assert report["hit"] == (report["trace_secs"] == 0.0)
    assert units(root) == UNITS
    return stored


@pytest.mark.slow
@pytest.mark.parametrize("adaptor", NATIVE)
def test_four_processes_on_an_empty_cache_compile_each_piece_once(tmp_path, adaptor):
    root = tmp_path / "cache"
    reports = reports_of([start(root, "--quiet", *adaptor) for _ in range(4)])
    assert sum(report["compiled"] for report in reports) == UNITS
    assert all(report["compiled"] + report["reused"] == UNITS for report in reports)
    assert len({report["hash"] for report in reports}) == 1
    assert units(root) == UNITS
    check_whole(root)


@pytest.mark.slow
def test_processes_ranks_and_models_share_equal_units(tmp_path, worded_site):
    """Another rank and prefix, another model: three processes, three entries, nine units."""
    root = tmp_path / "cache"
    asked = [((), 2), (("--rank", "1", "--prefix", "head"), 2), ((), 3)]
    reports = reports_of(
        [start(root, "--quiet", *SLOW, *options, env=worded_site, layers=layers) for options, layers in asked]
    )
    assert sum(report["compiled"] for report in reports) == UNITS == units(root)
    assert all(report["compiled"] + report["reused"] == UNITS for report in reports)
    listing = cgtool("inspect", "cache", root, "--json").report
    named = sorted((entry["rank"], entry["prefix"], entry["pieces"]) for entry in listing["entries"])
    assert named == [(0, "backbone", 5), (0, "backbone", 7), (1, "head", 5)]
    assert listing["warnings"] == []
    check_serves(root, 3, env=worded_site)


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True], ids=["worded", "native"])
def test_a_kill_between_two_compiles_loses_at_most_one(tmp_path, worded_site, native):
    """There is one piece in each of two variants, and the compiler is killed at the second."""
    root, model, gate = tmp_path / "cache", f"{Path(__file__).with_name('e2e_models.py')}:nested", tmp_path / "gate"
    arguments = ("--jobs", "1") if native else worded(log=str(tmp_path / "log"), gate=str(gate))
    process = start_model(root, model, *arguments, env=worded_site)
    process.says("compile 1/")
    kill(process)
    assert units(root) == 1
    gate.touch()
    report = warm(model, root, *arguments, env=worded_site)
    assert (report["compiled"], report["reused"], units(root)) == (1, 1, 2)
    assert {artifact["adaptor"] for artifact in report["artifacts"]} == {"aot_inductor" if native else "worded"}
    assert inspect(root)["hash"] == report["hash"]
    assert compare(model, root, [{"batch": n} for n in (1, 2, 5)], env=worded_site)["failures"] == []


def test_a_process_finishes_alone_when_another_that_compiles_the_same_is_killed(tmp_path, worded_site):
    """A process that waits for a unit compiles it when the process that holds it dies."""
    root, model, gate = tmp_path / "cache", f"{REPO / 'tests/cli/cli_sample_model.py'}:build", tmp_path / "gate"
    arguments = (model, *worded(log=str(tmp_path / "log"), gate=str(gate)), "--compile-sizes", "8")
    first = start_model(root, *arguments, env=worded_site)
    first.says("compile 1/")  # and holds the second unit until the gate opens
    second = start_model(root, *arguments, env=worded_site)
    second.says("split")
    kill(first)
    gate.touch()
    (report,) = reports_of([second])
    assert (report["compiled"], report["reused"]) == (5, 1)
    assert counts(inspect(root)) == (3, 1, 2, 6)
    assert units(root) == 6
    sizes = [{"num_tokens": n} for n in (1, 2, 8, 9)]
    assert compare(model, root, sizes, env=worded_site)["failures"] == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_at_ten_instants_lose_no_stored_unit(tmp_path):
    """Kill before the first unit and soon after each of the nine; only units in flight are lost."""
    rng = random.Random(20260730)
    stored = []
    for finished in range(UNITS + 1):
        root = tmp_path / f"killed-{finished}"
        process = start(root)
        process.says(f"compile {finished}/" if finished else "split")
        time.sleep(rng.uniform(0.0, 1.0))
        kill(process)
        stored.append(check_resumes(root))
        assert counts(inspect(root)) == (5, 2, 3, UNITS)
        assert cgtool("warm", LLAMA, "--cache-dir", root, "--check", *ARGUMENTS).code == 0  # reads every artifact
    check_whole(root)
    assert all(count >= finished for finished, count in enumerate(stored)), stored
    assert len(set(stored)) > 5, f"the instants fell too close together to prove anything: {stored}"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_while_sizes_are_added_keep_the_entry_complete(tmp_path):
    """Further sizes are added to a complete entry, and the process is killed: the entry still serves as before."""
    root = tmp_path / "cache"
    assert warm(LLAMA, root, *ARGUMENTS, *NATIVE[1])["compiled"] == UNITS
    rng = random.Random(7)
    for size in (16, 32, 64):
        process = start(root, *NATIVE[1], sizes=f"1,8,{size}")
        process.says(f"compile {rng.choice([1, 2, 3])}/")
        kill(process)
        report = warm(LLAMA, root, *ARGUMENTS, *NATIVE[1])
        assert (report["hit"], report["compiled"]) == (True, 0)
        sizes = [{"num_tokens": n} for n in (1, 8, size)]
        assert compare(LLAMA, root, sizes, arguments={"num_layers": 2})["failures"] == []
    before = units(root)
    report = warm(LLAMA, root, *NATIVE[1], "--arg", "num_layers=2", "--compile-sizes", "1,8,16,32,64")
    assert report["compiled"] == UNITS + 9 - before
    assert counts(report) == (5, 2, 3, UNITS + 9)
