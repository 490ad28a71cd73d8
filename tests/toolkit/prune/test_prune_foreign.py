"""Caches of other systems: whole entries go where nothing else needs them, and it is said where that is not so."""

from __future__ import annotations

import os
import tarfile
import time
from pathlib import Path

import pytest
from prune_samples import DAY, files_in

from cgtool.errors import UsageError
from cgtool.toolkit.foreign.detect import read_cache
from cgtool.toolkit.prune.foreign import make_foreign_plan
from cgtool.toolkit.prune.plan import Rules
from cgtool.toolkit.prune.removal import disk_usage
from cgtool.toolkit.prune.run import plan_prune

SAMPLES = Path(__file__).parents[3] / "fixtures" / "caches"


@pytest.fixture
def unpacked(tmp_path):
    """Return what unpacks a sample, as if all of it had been written and read last so many days ago."""

    def unpack(name, days=40):
        with tarfile.open(SAMPLES / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
        at = time.time() - days * DAY
        for path in sorted((tmp_path / name).rglob("*"), reverse=True):
            os.utime(path, (at, at))
        return tmp_path / name

    return unpack


@pytest.mark.parametrize(
    ("name", "entries", "shared"),
    [("vllm", 3, 0), ("vllm-old", 1, 0), ("atom", 2, 0), ("torch_inductor", 2, 2), ("triton", 3, 0)],
)
def test_old_entries_go_whole_and_shared_files_stay(unpacked, name, entries, shared):
    root = unpacked(name)
    before = disk_usage(str(root))
    plan = make_foreign_plan(root, Rules(older_than_secs=30 * DAY))
    assert len(plan.entries) == entries
    assert [kept.why for kept in plan.kept] == ["shared"] * shared
    assert all("removed" in kept.sentence for kept in plan.kept)
    outcome = plan.execute()
    assert (len(outcome.removed), outcome.kept, outcome.failed) == (entries, (), ())
    assert outcome.freed_bytes == plan.frees_bytes == before - disk_usage(str(root))
    assert not any(entry.deletable for entry in read_cache(root).entries) if shared else not files_in(root)


def test_entries_of_the_last_hour_stay_unless_they_are_named(unpacked):
    root = unpacked("vllm", days=0)
    plan = make_foreign_plan(root, Rules(max_bytes=0))
    assert plan.entries == ()
    assert {kept.why for kept in plan.kept} == {"in_use"}
    named = make_foreign_plan(root, Rules(entries=("1572",)))
    assert [entry.hash for entry in named.entries] == ["1572951577"]


def test_the_size_is_reached_by_what_was_used_longest_ago(unpacked):
    root = unpacked("triton")
    names = [entry.name for entry in read_cache(root).entries]
    last = next(entry for entry in read_cache(root).entries if entry.name == names[1])
    for path in (last.path, *last.path.iterdir()):
        at = time.time() - 90 * DAY
        os.utime(path, (at, at))
    plan = make_foreign_plan(root, Rules(max_bytes=disk_usage(str(root)) - 1))
    assert [entry.hash for entry in plan.entries] == [names[1]]


def test_what_was_written_after_the_plan_stays(unpacked):
    root = unpacked("vllm")
    plan = make_foreign_plan(root, Rules(older_than_secs=DAY))
    first = next(entry.path for entry in read_cache(root).entries if entry.name == plan.entries[0].hash)
    time.sleep(0.01)
    (first / "new").touch()
    outcome = plan.execute()
    assert [kept.hash for kept in outcome.kept] == [plan.entries[0].hash]
    assert first.exists()
    assert len(outcome.removed) == len(plan.entries) - 1


def test_what_a_killed_prune_left_is_removed_by_the_next(unpacked):
    root = unpacked("triton")
    plan = make_foreign_plan(root, Rules(older_than_secs=DAY))
    first = next(entry.path for entry in read_cache(root).entries if entry.name == plan.entries[0].hash)
    first.rename(first.with_name(f".{first.name}.1.{'0' * 12}.cgtool-pruned"))
    again = make_foreign_plan(root, Rules())
    assert ([file.kind for file in again.files], again.entries) == (["trash"], ())
    assert again.execute().removed_files == 1
    assert not list(root.rglob("*.cgtool-pruned"))


@pytest.mark.parametrize("rules", [{"stale": True}, {"orphans": True}, {"units": True}, {"keep_last": 1}])
def test_rules_without_a_meaning_there_are_refused(unpacked, rules):
    with pytest.raises(UsageError, match="cannot be told of a cache of triton"):
        make_foreign_plan(unpacked("triton"), Rules(**rules))


def test_without_a_rule_nothing_is_chosen_and_it_is_said_what_may_go(unpacked):
    plan = make_foreign_plan(unpacked("torch_inductor"), Rules())
    assert plan.is_empty
    assert "may be removed" in plan.notes[-1]


def test_the_command_finds_out_whose_cache_it_is(unpacked):
    root = unpacked("vllm") / "torch_compile_cache"
    planned = plan_prune(Rules(older_than_secs=DAY), cache_dir=root)
    assert planned.to_json()["system"] == "vllm"
    assert len(planned.execute().removed) == 3
