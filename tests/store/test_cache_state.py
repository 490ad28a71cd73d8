from __future__ import annotations

import multiprocessing
from datetime import UTC, datetime, timedelta

import pytest
from cache_samples import publish

from cgtool.store.layout import CacheLayout
from cgtool.store.lookup import StateStore, Usage

SPAWN = multiprocessing.get_context("spawn")


def hit_often(root, name, times):
    for _ in range(times):
        StateStore(CacheLayout(root=root)).record_hit(name)


def test_an_entry_that_was_never_loaded_has_no_stamp(cache_root):
    name = publish(cache_root)
    assert StateStore(CacheLayout(root=cache_root)).usage(name) == Usage(hits=0, last_used=None)


def test_hits_are_counted_and_the_last_one_is_stamped(cache_root):
    name = publish(cache_root)
    hit_often(cache_root, name, 3)
    usage = StateStore(CacheLayout(root=cache_root)).usage(name)
    assert usage.hits == 3
    stamped = datetime.fromisoformat(usage.last_used)
    assert abs(datetime.now(UTC) - stamped) < timedelta(seconds=10)


def test_hits_of_processes_that_load_together_are_all_counted(cache_root):
    name = publish(cache_root)
    processes = [SPAWN.Process(target=hit_often, args=(cache_root, name, 50)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert StateStore(CacheLayout(root=cache_root)).usage(name).hits == 150


def test_a_hit_is_no_part_of_the_entry(cache_root):
    name = publish(cache_root)
    entry = CacheLayout(root=cache_root).entry_dir(name.hash)
    before = sorted((path, path.stat().st_mtime_ns) for path in entry.rglob("*"))
    hit_often(cache_root, name, 1)
    assert sorted((path, path.stat().st_mtime_ns) for path in entry.rglob("*")) == before


@pytest.mark.parametrize("first", [False, True], ids=["again", "first hit"])
def test_a_read_only_cache_is_not_stamped_and_not_an_error(cache_root, read_only, first):
    name = publish(cache_root)
    if not first:
        hit_often(cache_root, name, 1)
    read_only(cache_root)
    hit_often(cache_root, name, 1)
    assert StateStore(CacheLayout(root=cache_root)).usage(name).hits == (0 if first else 1)


def test_a_full_disk_is_not_an_error(small_disk):
    name = publish(small_disk)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "ballast").write_bytes(bytes(1_000_000))
    hit_often(small_disk, name, 2)
