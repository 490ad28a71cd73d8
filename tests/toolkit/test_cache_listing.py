from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cache_maker import make_cache
from cache_samples import UNIT, add_sizes, files_of, manifest_of, publish, put_row, resealed, writer

from cgtool.errors import CacheError
from cgtool.plan.shapes import shape_text
from cgtool.store.layout import CacheLayout
from cgtool.store.lookup import StateStore
from cgtool.store.records import Artifact
from cgtool.store.units import UnitStore
from cgtool.toolkit import listing as listing_module
from cgtool.toolkit.listing import list_entry, scan


def disk_usage(folder: Path) -> int:
    return sum({path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}.values())


def test_pieces_that_share_an_artifact_are_one_row_per_shape(cache_root):
    to = writer(cache_root)
    rows = [
        put_row(to, shape=shape, piece=piece, data=f"{shape}-{kind}".encode())
        for shape in ("n=8", "general", "n=2-4", "batch=1:seq=2", "n=1")
        for piece, kind in ((0, "first"), (2, "middle"), (4, "middle"), (6, "middle"), (8, "last"))
    ]
    to.publish(manifest_of(to, tuple(rows)), files_of("x"))
    artifacts = scan(cache_root).entries[0].to_json()["artifacts"]
    assert [(shape_text(one["shape"]), one["piece_index"]) for one in artifacts] == [
        (shape, pieces)
        for shape in ("general", "n=2-4", "batch=1:seq=2", "n=1", "n=8")
        for pieces in ([0], [2, 4, 6], [8])
    ]


def test_bytes_shared_by_pieces_ranks_and_units_count_once(cache_root):
    layout = CacheLayout(root=cache_root)
    data = bytes(50_000)
    units = UnitStore(layout)
    record = Artifact.of(data, kind="eager", compile_secs=1, kernels=1)
    units.put(UNIT, data, record)
    for rank in (0, 1):
        to = writer(cache_root, rank=rank)
        units.link_into(to.objects, UNIT, record)
        to.publish(manifest_of(to, tuple(put_row(to, piece=piece, data=data) for piece in (0, 2))), files_of("x"))
    listing = scan(cache_root)
    assert [entry.manifest.rank for entry in listing.entries] == [0, 1]
    assert [50_000 < entry.size_bytes < 60_000 for entry in listing.entries] == [True, True]
    assert [entry.unshared_bytes - entry.size_bytes for entry in listing.entries] == [50_000, 50_000]
    unit_records = sum(path.stat().st_size for path in layout.units_dir.rglob("unit.json"))
    assert listing.size_bytes == disk_usage(layout.base) - unit_records
    assert listing.size_bytes < 60_000
    key = layout.key_file(listing.entries[0].manifest.hash).stat().st_size
    assert listing.bytes_of(listing.entries) == listing.size_bytes - key
    assert 50_000 < listing.bytes_of(listing.entries[:1]) < listing.bytes_of(listing.entries) < 60_000


def test_bytes_of_units_and_of_unnamed_artifacts_count(cache_root):
    layout = CacheLayout(root=cache_root)
    units = UnitStore(layout)
    name = publish(cache_root)
    before = scan(cache_root).size_bytes
    units.put(UNIT, bytes(50_000), Artifact.of(bytes(50_000), kind="eager", compile_secs=1, kernels=1))
    assert scan(cache_root).size_bytes == before + 50_000
    (layout.entry_dir(name.hash) / "artifacts" / "stray").write_bytes(bytes(1000))
    assert scan(cache_root).size_bytes == before + 51_000


def test_every_copy_of_an_artifact_that_is_not_hard_linked_counts(cache_root):
    layout = CacheLayout(root=cache_root)
    units = UnitStore(layout)
    record = Artifact.of(bytes(50_000), kind="eager", compile_secs=1, kernels=1)
    units.put(UNIT, bytes(50_000), record)
    for level in (1, 2):
        to = writer(cache_root, level=level)
        to.publish(manifest_of(to, (put_row(to, data=bytes(50_000)),)), files_of("x"))
    assert 150_000 < scan(cache_root).size_bytes < 160_000
    units.link_into(writer(cache_root, level=3).objects, UNIT, record)
    assert 150_000 < scan(cache_root).size_bytes < 160_000


def test_an_entry_lists_its_shapes_and_the_seconds_its_hits_saved(cache_root):
    to = writer(cache_root)
    rows = [put_row(to, shape=shape, piece=piece, data=b"one") for shape in ("n=8", "general") for piece in (0, 2)]
    rows.append(put_row(to, shape="n=2-4", data=b"other"))
    to.publish(manifest_of(to, tuple(rows)), files_of("x"))
    for _ in range(3):
        StateStore(CacheLayout(root=cache_root)).record_hit(to.name)
    for artifacts in (True, False):
        (entry,) = scan(cache_root, artifacts=artifacts).entries
        assert entry.shapes == ({}, {"n": (2, 4)}, {"n": (8, 8)})
        assert (len(entry.artifact_files), entry.usage.hits, entry.artifact_secs, entry.saved_secs) == (2, 3, 3.0, 9.0)
        assert entry.unshared_bytes - entry.size_bytes == 3 * len(b"one")
        assert len(entry.to_json()["artifacts"]) == (3 if artifacts else 0)


def test_an_unlistable_entry_does_not_hide_the_others(cache_root):
    layout = CacheLayout(root=cache_root)
    names = [publish(cache_root, level=level) for level in (1, 2)]
    folder = layout.entry_dir(names[0].hash)
    (folder / "artifacts").rename(folder / "elsewhere")
    (folder / "artifacts").symlink_to(folder / "artifacts")  # a link loop: listing it fails with ELOOP
    listing = scan(cache_root)
    assert {entry.manifest.hash for entry in listing.entries} == {name.hash for name in names}
    assert any(f"{folder}/artifacts is a link" in text for text in listing.warnings)
    assert any("names 1 artifacts that are missing" in text for text in listing.warnings)


def test_a_missing_root_is_an_error_unless_missing_ok(cache_root, tmp_path):
    with pytest.raises(CacheError, match=r"does not exist\. Name the folder of a cache, or warm a model"):
        scan(cache_root)
    assert scan(cache_root, missing_ok=True).entries == ()
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="is a file"):
        scan(tmp_path / "file", missing_ok=True)


def test_a_folder_without_a_cache_is_empty(tmp_path):
    listing = scan(tmp_path)
    assert (listing.entries, listing.size_bytes, listing.warnings) == ((), 0, ())


def test_junk_torn_and_newer_files_are_skipped_with_warnings(cache_root):
    layout = CacheLayout(root=cache_root)
    good, torn, newer = (publish(cache_root, level=level) for level in (1, 2, 3))
    layout.manifest_file(torn).write_bytes(b'{"schema": 1')
    path = layout.manifest_file(newer)
    path.write_bytes(resealed(path.read_bytes(), {"record": "manifest-5"}))
    (layout.base / "junk").mkdir()
    (layout.base / ".DS_Store").touch()
    (layout.base / ("ef" * 32)).touch()
    (layout.entry_dir(good.hash) / "notes.txt").touch()
    (layout.entry_dir(good.hash) / "rank_1" / "backbone").mkdir(parents=True)
    listing = scan(cache_root)
    assert [entry.manifest.hash for entry in listing.entries] == [good.hash]
    warnings = "\n".join(listing.warnings)
    for text in ("junk", ".DS_Store", "ef" * 32, "notes.txt", "is corrupt", "has schema 5"):
        assert text in warnings
    assert len(listing.warnings) == 6


def test_missing_artifacts_and_keys_are_warnings(cache_root):
    layout = CacheLayout(root=cache_root)
    name = publish(cache_root)
    next((layout.entry_dir(name.hash) / "artifacts").iterdir()).unlink()
    layout.key_file(name.hash).unlink()
    listing = scan(cache_root)
    assert len(listing.entries) == 1
    assert [("names 1 artifacts that are missing" in text, "has no key.json" in text) for text in listing.warnings] == [
        (True, False),
        (False, True),
    ]


def test_a_scan_opens_manifests_only_and_writes_nothing(cache_root):
    publish(cache_root)
    add_sizes(cache_root, (1, 8))
    code = (
        "import sys\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append((str(args[0]), args[2])) if event == 'open' else None)\n"
        "from pathlib import Path\n"
        "from cgtool.toolkit.listing import scan\n"
        "opened.clear()\n"
        f"scan(Path({str(cache_root)!r}))\n"
        f"print([name for name, _ in opened if name.startswith({str(cache_root)!r}) and '/manifest.json' not in name])"
    )
    before = sorted((path, path.stat().st_mtime_ns) for path in cache_root.rglob("*"))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
    assert sorted((path, path.stat().st_mtime_ns) for path in cache_root.rglob("*")) == before


def test_list_entry_equals_the_entry_of_a_scan(cache_root):
    name = publish(cache_root)
    layout = CacheLayout(root=cache_root)
    assert list_entry(layout, name).to_json() == scan(cache_root).entries[0].to_json()
    layout.manifest_file(name).unlink()
    assert list_entry(layout, name) is None


def test_a_read_only_cache_is_listed(cache_root, read_only):
    publish(cache_root)
    read_only(cache_root)
    assert len(scan(cache_root).entries) == 1
    assert os.statvfs(cache_root).f_flag & os.ST_RDONLY


def test_a_large_cache_reads_unit_folders_only_if_units_may_hold_more(cache_root, monkeypatch):
    monkeypatch.setattr(listing_module, "_MAX_UNITS_ALWAYS_READ", 0)  # as with 100,000 units
    layout = CacheLayout(root=cache_root)
    make_cache(cache_root, entries=2, artifacts_per_entry=4, artifact_bytes=1000)
    read = []
    scandir = listing_module._scandir
    monkeypatch.setattr(listing_module, "_scandir", lambda folder: (read.append(folder), scandir(folder))[1])
    before = scan(cache_root).size_bytes
    assert str(layout.units_dir) in read
    assert not [folder for folder in read if folder.count("/units/") and len(Path(folder).name) == 64]
    UnitStore(layout).put(UNIT, bytes(50_000), Artifact.of(bytes(50_000), kind="eager", compile_secs=1, kernels=1))
    assert scan(cache_root).size_bytes == before + 50_000  # more units than artifacts
    shutil.rmtree(layout.unit_dir(UNIT))
    for artifact in layout.base.glob("*/artifacts/*"):
        data = artifact.read_bytes()
        artifact.unlink()
        artifact.write_bytes(data)
    assert scan(cache_root).size_bytes == before + 8 * 1000  # copies have one link each
