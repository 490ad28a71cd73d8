"""`verify` of thousands of units, where a child helps: what it finds, within a bound with room for a busy machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cache_maker import make_cache
from cli_harness import run

ENTRIES, ARTIFACTS = 100, 50
#: Ten times what it takes where nothing else runs.
MOST_SECS = 12.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verified") / "cache"
    make_cache(root, entries=ENTRIES, artifacts_per_entry=ARTIFACTS)
    return root


def verified(root: Path, jobs: int) -> dict:
    report = run("verify", root, "--json", "--jobs", jobs).report
    return {name: value for name, value in report.items() if name != "secs"}


def test_one_process_and_two_find_the_same_in_time(root):
    begin = time.perf_counter()
    two = verified(root, 2)
    assert time.perf_counter() - begin < MOST_SECS
    assert two == verified(root, 1)
    # of an entry the key, the manifest and three files of its rank; of a unit the record, and the artifact once more
    assert two["files"] == ENTRIES * (5 + ARTIFACTS) + ENTRIES * ARTIFACTS * 2
    assert two["units"]["problems"] == []
    assert [problem for entry in two["entries"] for problem in entry["problems"]] == []


def test_what_is_damaged_is_named_by_two_processes(root):
    record = min(root.rglob("unit.json"))
    artifact = max(path for path in (root / "torch_compile_cache" / "units").rglob("*.pt2"))
    for path in (record, artifact):
        data = path.read_bytes()
        path.unlink()  # an artifact has a name in an entry, too
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    problems = verified(root, 2)["units"]["problems"]
    assert {problem["path"] for problem in problems} == {str(path.relative_to(root)) for path in (record, artifact)}
