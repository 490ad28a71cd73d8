"""The lookup from digests to entries, and hit counters."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta

import pytest
from cache_samples import FACTS, manifest_of, publish, put_row, run_beside, writer
from msgspec.structs import replace

from cgtool.errors import CacheError
from cgtool.store.layout import CacheLayout
from cgtool.store.lookup import LookupStore, StateStore

OTHER = "ef" * 32


def test_lookup_digest_finds_every_entry_published_under_it(cache_root, layout):
    hashes = {publish(cache_root, level=level).hash for level in (1, 2, 3)}
    assert set(LookupStore(layout).candidates(FACTS)) == hashes
    assert tuple(LookupStore(layout).candidates(OTHER)) == ()


def test_lookup_in_a_missing_cache_finds_nothing_and_creates_nothing(cache_root, layout):
    assert tuple(LookupStore(layout).candidates(FACTS)) == ()
    assert not cache_root.exists()


def test_copied_entry_is_found(cache_root, layout, tmp_path):
    here = publish(cache_root, level=3)
    there = publish(tmp_path / "there", level=2)
    shutil.copytree(CacheLayout(root=tmp_path / "there").entry_dir(there.hash), layout.entry_dir(there.hash))
    assert set(LookupStore(layout).candidates(FACTS)) == {here.hash, there.hash}


def test_rank_copied_into_an_indexed_entry_is_found(cache_root, layout):
    name = publish(cache_root)
    to = writer(cache_root, rank=1)
    manifest = manifest_of(to, (put_row(to),))
    to.publish(replace(manifest, lookup=(OTHER,)), {"plan.json": b"{}"})
    shutil.rmtree(layout.lookup_dir / OTHER)
    (layout.lookup_dir / "indexed" / to.name.flat).unlink()
    assert tuple(LookupStore(layout).candidates(OTHER)) == (name.hash,)


def test_removed_entry_is_not_a_candidate(cache_root, layout):
    name = publish(cache_root)
    shutil.rmtree(layout.entry_dir(name.hash))
    assert tuple(LookupStore(layout).candidates(FACTS)) == ()


def test_junk_and_corrupt_manifests_are_ignored(cache_root, layout):
    name = publish(cache_root, level=3)
    torn = publish(cache_root, level=2)
    shutil.rmtree(layout.lookup_dir)
    layout.manifest_file(torn).write_bytes(b"{")
    (layout.base / "junk").mkdir()
    assert tuple(LookupStore(layout).candidates(FACTS)) == (name.hash,)
    (layout.lookup_dir / FACTS / "junk").touch()
    assert tuple(LookupStore(layout).candidates(FACTS)) == (name.hash,)


def test_read_only_cache_without_a_lookup_is_searched(cache_root, layout, read_only):
    name = publish(cache_root)
    shutil.rmtree(layout.lookup_dir)
    read_only(cache_root)
    assert tuple(LookupStore(layout).candidates(FACTS)) == (name.hash,)
    assert not layout.lookup_dir.exists()


def test_unreadable_lookup_is_an_error_and_not_a_miss(cache_root, layout):
    publish(cache_root)
    folder = layout.lookup_dir / FACTS
    shutil.rmtree(folder)
    folder.symlink_to(folder)
    with pytest.raises(CacheError, match=FACTS):
        list(LookupStore(layout).candidates(FACTS))


def hit_often(root, name, times):
    for _ in range(times):
        StateStore(CacheLayout(root=root)).record_hit(name)


def test_hits_and_time_of_last_use_are_recorded(cache_root):
    name = publish(cache_root)
    hit_often(cache_root, name, 3)
    usage = StateStore(CacheLayout(root=cache_root)).usage(name)
    assert usage.hits == 3
    stamped = datetime.fromisoformat(usage.last_used)
    assert abs(datetime.now(UTC) - stamped) < timedelta(seconds=10)


def test_concurrent_hits_are_all_counted(cache_root):
    name = publish(cache_root)
    run_beside(*[(hit_often, (cache_root, name, 50))] * 3)
    assert StateStore(CacheLayout(root=cache_root)).usage(name).hits == 150


def test_recording_a_hit_does_not_change_the_entry(cache_root):
    name = publish(cache_root)
    entry = CacheLayout(root=cache_root).entry_dir(name.hash)
    before = sorted((path, path.stat().st_mtime_ns) for path in entry.rglob("*"))
    hit_often(cache_root, name, 1)
    assert sorted((path, path.stat().st_mtime_ns) for path in entry.rglob("*")) == before


@pytest.mark.parametrize("first", [False, True], ids=["again", "first hit"])
def test_hit_on_a_read_only_cache_is_not_an_error(cache_root, read_only, first):
    name = publish(cache_root)
    if not first:
        hit_often(cache_root, name, 1)
    read_only(cache_root)
    hit_often(cache_root, name, 1)
    assert StateStore(CacheLayout(root=cache_root)).usage(name).hits == (0 if first else 1)


def test_hit_on_a_full_disk_is_not_an_error(small_disk):
    name = publish(small_disk)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "ballast").write_bytes(bytes(1_000_000))
    hit_often(small_disk, name, 2)
