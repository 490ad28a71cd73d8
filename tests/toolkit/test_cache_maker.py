"""The maker of large caches lays what the real writers lay: everything that reads a cache is at home in it."""

from __future__ import annotations

import re
from pathlib import Path

from cache_maker import make_cache

from cgtool.plan.records import parse_plan
from cgtool.store.entry import EntryWriter, read_entry
from cgtool.store.key import read_key
from cgtool.store.layout import PLAN_FILE, RANK_FILES, CacheLayout
from cgtool.store.lookup import LookupStore, StateStore
from cgtool.store.records import timestamp
from cgtool.store.units import UnitStore
from cgtool.toolkit.listing import scan

DIGEST = re.compile(r"[0-9a-f]{64}|units/[0-9a-f]{2}")


def shape_of_tree(root: Path) -> set[str]:
    """The relative paths of all files with their digests left out, and their modes."""
    return {
        f"{DIGEST.sub('*', str(path.relative_to(root)))} {path.stat().st_mode:o}"
        for path in root.rglob("*")
        if path.is_file()
    }


def test_a_made_entry_reads_as_a_published_one_and_lies_as_one(cache_root, tmp_path):
    (name,) = make_cache(cache_root, entries=1, artifacts_per_entry=6)
    layout = CacheLayout(root=cache_root)
    entry = read_entry(layout, name, files=RANK_FILES)
    key = read_key(layout, name.hash)
    assert entry is not None
    assert key is not None
    assert len({row.artifact.digest for row in entry.manifest.rows}) == 6
    assert len(entry.manifest.rows) == 10  # five compiled pieces for two shapes
    assert len(parse_plan(entry.files[PLAN_FILE], path=cache_root).variants[0].steps) == 9

    units = UnitStore(layout)
    again = CacheLayout(root=tmp_path / "again")
    copies = UnitStore(again)
    writer = EntryWriter(again, key, rank=name.rank, prefix=name.prefix)
    for folder in sorted(layout.units_dir.glob("*/*")):
        record = units.find(folder.name)
        assert record is not None
        data = units.data(folder.name, record)
        assert data is not None
        with copies.lock(folder.name):
            copies.put(folder.name, data, record)
        copies.link_into(writer.objects, folder.name, record)
    writer.publish(entry.manifest, entry.files)
    assert shape_of_tree(cache_root) == shape_of_tree(again.root)
    assert layout.manifest_file(name).read_bytes() == again.manifest_file(name).read_bytes()
    assert layout.key_file(name.hash).read_bytes() == again.key_file(name.hash).read_bytes()


def test_a_made_cache_has_no_warning_and_every_artifact_is_one_file_with_its_unit(cache_root):
    names = make_cache(cache_root, entries=4, artifacts_per_entry=50, ranks=2, layers=6)
    layout = CacheLayout(root=cache_root)
    listing = scan(cache_root)
    assert listing.warnings == ()
    assert sorted(name.flat for name in names) == sorted(entry.manifest.name.flat for entry in listing.entries)
    artifacts = list(layout.base.glob("*/artifacts/*"))
    assert len(artifacts) == 200
    assert {path.stat().st_nlink for path in artifacts} == {2}
    assert len(list(layout.units_dir.glob("*/*/unit.json"))) == 200


def test_entries_take_over_artifacts_of_those_before_them(cache_root):
    make_cache(cache_root, entries=3, artifacts_per_entry=6, shared=2)
    layout = CacheLayout(root=cache_root)
    assert len(list(layout.units_dir.glob("*/*/unit.json"))) == 6 + 4 + 4
    assert len(list(layout.base.glob("*/artifacts/*"))) == 18


def test_made_entries_were_created_a_day_apart_and_all_but_every_third_were_used(cache_root):
    names = make_cache(cache_root, entries=4, artifacts_per_entry=1, now=86400.0 * 100)
    state = StateStore(CacheLayout(root=cache_root))
    usages = [state.usage(name) for name in names]
    assert [usage.hits for usage in usages] == [0, 2, 3, 0]
    assert usages[2].last_used == timestamp(86400.0 * 98.5)
    created = {entry.manifest.hash: entry.manifest.created for entry in scan(cache_root).entries}
    assert created[names[3].hash] == timestamp(86400.0 * 99)


def test_the_same_seed_makes_the_same_names_and_another_seed_makes_others(cache_root, tmp_path):
    first = make_cache(cache_root, entries=2, artifacts_per_entry=2)
    assert make_cache(tmp_path / "again", entries=2, artifacts_per_entry=2) == first
    other = make_cache(cache_root, entries=2, artifacts_per_entry=2, seed=1)
    assert not set(first) & set(other)
    assert len(scan(cache_root).entries) == 4


def test_facts_lead_to_every_made_entry_of_a_model(cache_root):
    names = make_cache(cache_root, entries=6, artifacts_per_entry=1)
    layout = CacheLayout(root=cache_root)
    entry = read_entry(layout, names[0])
    assert entry is not None
    found = LookupStore(layout).candidates(entry.manifest.lookup[0])
    assert sorted(found) == sorted((names[0].hash, names[5].hash))
