"""`cgtool inspect cache` on 10,000 artifacts: filters, sorting, and generous bounds on time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cache_maker import MODELS, make_cache
from cli_harness import COMMAND, Ran, environment, run

from cgtool.store.layout import CacheLayout

ENTRIES = 200
MEASURE = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
status = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([status, time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss]))
"""
#: Ten times what it takes on an idle machine.
MOST_SECS = 5.0
MOST_MIB = 150


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large")
    make_cache(root, entries=ENTRIES, artifacts_per_entry=50, layers=8)
    return root


@pytest.fixture(scope="module")
def ran(root: Path) -> dict[str, Ran]:
    runs = {
        "all": [],
        "json": ["--json"],
        "filtered": ["--filter", "model~llama", "--filter", "last_used>30d", "--json"],
        "sorted": ["--sort", "created", "--limit", "3", "--json"],
        "limited": ["--filter", "model=GPT-2", "--sort", "hits:asc", "--limit", "2"],
        "none": ["--filter", "size>1TB"],
        "limit zero": ["--limit", "0"],
        "wrong filter": ["--filter", "siez>1GB", "--json"],
        "wrong order": ["--sort", "siez"],
        "wrong limit": ["--limit", "-1"],
    }
    return {name: run("inspect", "cache", root, *arguments) for name, arguments in runs.items()}


def test_every_entry_is_a_line_of_the_same_width(ran):
    lines = ran["all"].out.splitlines()
    assert (ran["all"].code, ran["all"].err) == (0, "")
    assert lines[0].split() == [
        *("hash", "model", "rank", "prefix", "adaptor", "shapes", "pieces", "unique", "artifacts", "size", "unshared"),
        *("saved", "created", "used", "hits"),
    ]
    assert len(lines) == ENTRIES + 2
    hits = lines[0].index("hits")
    assert {len(line) for line in lines[1:-1]} == {len(lines[0])}
    assert {line[hits - 2 : hits] for line in lines[1:-1]} == {"  "}
    assert lines[-1].startswith(f"{ENTRIES} entries in ")
    assert "; hits saved " in lines[-1]


def test_the_json_has_every_artifact(ran):
    report = ran["json"].report
    assert len(report["entries"]) == report["num_entries"] == report["matching"] == ENTRIES
    assert {len(entry["artifacts"]) for entry in report["entries"]} == {50}
    one = report["entries"][0]
    assert one["unshared_bytes"] - one["size_bytes"] == (90 - 50) * 512
    assert one["artifact_secs"] == pytest.approx(sum(artifact["compile_secs"] for artifact in one["artifacts"]))
    assert report["unshared_bytes"] == sum(entry["unshared_bytes"] for entry in report["entries"])
    assert report["saved_secs"] == pytest.approx(sum(entry["saved_secs"] for entry in report["entries"]))
    assert report["matching_bytes"] < report["size_bytes"]  # the keys do not belong to a rank


def test_an_entry_must_match_all_filters(ran):
    report = ran["filtered"].report
    # entry i of n was created n - i days ago; every third was never used, the others were half a day later
    expected = [i for i in range(ENTRIES) if i % len(MODELS) == 0 and ENTRIES - i - (0.5 if i % 3 else 0) > 30]
    assert {entry["model"] for entry in report["entries"]} == {"Llama-3.1-8B"}
    assert report["matching"] == len(report["entries"]) == len(expected)
    assert report["num_entries"] == ENTRIES
    assert report["matching_bytes"] == sum(entry["size_bytes"] for entry in report["entries"])


def test_sorting_and_limits_select_the_first_entries(ran):
    report = ran["sorted"].report
    created = [entry["created"] for entry in report["entries"]]
    assert len(created) == 3
    assert created == sorted(created, reverse=True)
    assert (report["matching"], report["num_entries"]) == (ENTRIES, ENTRIES)
    lines = ran["limited"].out.splitlines()
    assert len(lines) == 4
    assert [line.split()[1] for line in lines[1:3]] == ["GPT-2", "GPT-2"]
    assert [line.split()[-1] for line in lines[1:3]] == ["0", "0"]
    assert lines[3].startswith(f"2 shown of {ENTRIES // 5} of {ENTRIES} entries in ")


def test_a_filter_without_matches_prints_only_the_total(ran, root):
    assert ran["none"].code == 0
    assert ran["none"].out.startswith(f"0 of {ENTRIES} entries in {root}, 0 B of ")
    assert ran["limit zero"].out.startswith(f"0 shown of {ENTRIES} entries in {root}, ")
    assert ran["none"].out.count("\n") == ran["limit zero"].out.count("\n") == 1


def test_an_invalid_filter_sort_field_or_limit_is_a_usage_error(ran):
    assert ran["wrong filter"].code == ran["wrong order"].code == ran["wrong limit"].code == 2
    error = ran["wrong filter"].report["error"]
    assert (error["type"], error["actual"]) == ("UsageError", "siez>1GB")
    assert error["message"].startswith("'siez>1GB' does not name a field. Use one of: hash, model, ")
    assert ran["wrong order"].err.startswith("Error: 'siez' does not name a field. Use one of: hash, model, ")


@pytest.mark.parametrize("arguments", [[], ["--filter", "model~llama"], ["--json"]], ids=["all", "filtered", "json"])
def test_it_takes_little_time_and_memory(root, arguments):
    # Until it calls exec, a child counts the memory of its parent, so a small process starts the command.
    command = [sys.executable, "-S", "-c", MEASURE, *COMMAND, "inspect", "cache", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    status, secs, cpu_secs, most_kib = json.loads(done.stdout)
    assert status == 0
    assert min(secs, cpu_secs) < MOST_SECS
    assert most_kib / 1024 < MOST_MIB


def test_only_an_entry_without_torn_ranks_can_be_complete(tmp_path):
    names = make_cache(tmp_path, entries=1, artifacts_per_entry=6, ranks=2)
    command = ("inspect", "entry", "--cache-dir", tmp_path)
    text, as_json = run(*command), run(*command, "--json")
    assert text.out.endswith(
        "shape         rank 0, 1 pieces 0-8 by 2\n"
        "general       proved\n"
        "num_tokens=8  proved\n"
        "\n"
        "6 artifacts for 20 rows, 3.0 KiB\n"
        "No holes: every piece covers every shape.\n"
    )
    assert as_json.report["complete"] is True
    manifest = CacheLayout(root=tmp_path).manifest_file(names[1])
    manifest.write_bytes(manifest.read_bytes()[:-9])
    text, as_json = run(*command), run(*command, "--json")
    assert "No holes" not in text.out
    assert (as_json.report["complete"], as_json.report["holes"]) == (False, [])
    assert len(as_json.report["warnings"]) == 1


@pytest.mark.parametrize("what", [["entry"], ["key"], ["graph"], ["artifact", "ab"]], ids=lambda what: what[0])
def test_a_folder_without_entries_is_an_error(tmp_path, what):
    (tmp_path / "file").touch()
    for folder in ("nowhere", "file", "."):
        ran = run("inspect", *what, "--cache-dir", folder, cwd=tmp_path)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.endswith(" holds no entry. Fill it with: cgtool warm MODEL\n")
