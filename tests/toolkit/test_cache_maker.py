"""`cache_maker` writes the same files as the real writers, so that every reader accepts its caches."""

from __future__ import annotations

import re
from pathlib import Path

from cache_maker import make_cache

from cgtool.plan.records import parse_plan
from cgtool.store.entry import EntryWriter, read_entry
from cgtool.store.key import read_key
from cgtool.store.layout import PLAN_FILE, RANK_FILES, CacheLayout
from cgtool.store.units import UnitStore
from cgtool.toolkit.listing import scan

DIGEST = re.compile(r"[0-9a-f]{64}|units/[0-9a-f]{2}")


def shape_of_tree(root: Path) -> set[str]:
    """The relative paths of all files, without digests, and their modes."""
    return {
        f"{DIGEST.sub('*', str(path.relative_to(root)))} {path.stat().st_mode:o}"
        for path in root.rglob("*")
        if path.is_file()
    }


def test_a_made_entry_equals_a_published_one_file_by_file(cache_root, tmp_path):
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


def test_a_made_cache_has_no_warnings_and_links_artifacts_to_units(cache_root):
    names = make_cache(cache_root, entries=2, artifacts_per_entry=50, ranks=2, layers=6)
    layout = CacheLayout(root=cache_root)
    listing = scan(cache_root)
    assert listing.warnings == ()
    assert sorted(name.flat for name in names) == sorted(entry.manifest.name.flat for entry in listing.entries)
    artifacts = list(layout.base.glob("*/artifacts/*"))
    assert len(artifacts) == 100
    assert {path.stat().st_nlink for path in artifacts} == {2}
    assert len(list(layout.units_dir.glob("*/*/unit.json"))) == 100
