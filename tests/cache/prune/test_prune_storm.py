"""Writers, readers and prunes on one cache at once: nothing fails that was not asked to, nothing in use is removed."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from prune_samples import facts_of, is_whole, lay, units_in

from cgtool.cache.entry import read_entry
from cgtool.cache.layout import CacheLayout, RankName
from cgtool.cache.leases import hold
from cgtool.cache.lookup import LookupStore
from cgtool.cache.prune.execute import carry_out
from cgtool.cache.prune.plan import make_plan
from cgtool.cache.prune.records import Rules
from cgtool.cache.state import StateStore
from cgtool.cache.units import UnitStore
from cgtool.cache.verify.digests import verify_entry
from cgtool.errors import CacheCorruptError

SPAWN = multiprocessing.get_context("spawn")
ENTRIES = 4
SECS = 4.0


def started(ready: Barrier) -> float:
    """Wait for the others, and return when to end."""
    ready.wait(60)
    return time.time() + SECS


def write_forever(root: Path, seed: int, ready: Barrier, report: Path) -> None:
    chance, done = random.Random(seed), 0
    until = started(ready)
    while time.time() < until:
        number = chance.randrange(ENTRIES)
        # A unit that goes between the look and the link is compiled again, as a warm does.
        while True:
            try:
                lay(root, number, model=f"M{number}", pieces=("own", "both"), rank=chance.randrange(2))
                break
            except CacheCorruptError as error:
                if "units" not in str(error.path):
                    raise
        done += 1
    report.write_text(json.dumps(done))


def read_forever(root: Path, seed: int, ready: Barrier, report: Path) -> None:
    layout, chance, loads, lost = CacheLayout(root=root), random.Random(seed), 0, 0
    kept = None
    until = started(ready)
    while time.time() < until:
        number = chance.randrange(ENTRIES)
        for hash_ in LookupStore(layout).candidates(facts_of(f"M{number}")):
            name = RankName(hash=hash_, rank=0, prefix="backbone")
            lease = hold(layout, name)
            entry = read_entry(layout, name)
            if entry is None:
                continue
            try:
                for row in entry.manifest.rows:
                    entry.artifact(row)
            except CacheCorruptError:  # it went before it was held: a miss with a sentence
                if layout.manifest_file(name).exists() and lease is not None and lease.is_current:
                    time.sleep(0.05)
                    if read_entry(layout, name) == entry:
                        raise
                lost += 1
                continue
            StateStore(layout).record_hit(name)
            loads += 1
            if kept is None and number == 0 and lease is not None:
                kept = name  # from here on it must stay
            elif name != kept and lease is not None:
                lease.release()  # as if this process had ended
            if kept is not None and not is_whole(root, kept):
                raise AssertionError("an entry in use was removed")
    report.write_text(json.dumps([loads, lost]))


def prune_forever(root: Path, seed: int, ready: Barrier, report: Path) -> None:
    layout, chance, removed = CacheLayout(root=root), random.Random(seed), 0
    until = started(ready)
    while time.time() < until:
        rules = chance.choice([Rules(keep_last=0, orphans=True), Rules(units=True), Rules(max_bytes=3000), Rules()])
        outcome = carry_out(make_plan(layout, rules))
        if outcome.failed:
            raise AssertionError(outcome.failed)
        removed += len(outcome.removed)
    report.write_text(json.dumps(removed))


@pytest.mark.parametrize("seed", [1])
def test_writers_readers_and_prunes_on_one_cache(cache_root, tmp_path, seed):
    lay(cache_root, 0, model="M0")
    jobs = [write_forever, write_forever, read_forever, prune_forever]
    reports = [tmp_path / f"report{number}" for number in range(len(jobs))]
    ready = SPAWN.Barrier(len(jobs))
    processes = [
        SPAWN.Process(target=job, args=(cache_root, seed * 10 + number, ready, report))
        for number, (job, report) in enumerate(zip(jobs, reports, strict=True))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    first, second, (loads, _), removed = (json.loads(report.read_text()) for report in reports)
    assert first
    assert second
    assert loads
    assert removed
    layout = CacheLayout(root=cache_root)
    for hash_ in layout.hashes():
        assert verify_entry(layout, hash_).problems == ()
    units = UnitStore(layout)
    for key in units_in(cache_root):
        assert units.find(key) is not None or not (layout.unit_dir(key) / "unit.json").exists()
    carry_out(make_plan(layout, Rules()))
    assert not list((layout.state_dir / "trash").iterdir())
