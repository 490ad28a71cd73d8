"""Repairs without a compiler: from units, other entries and other ranks; what cannot be restored is set aside."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_samples import FACTS, no_flock, publish, resealed
from syscalls import each_kill
from verify_samples import HASH, NATIVE, Flip, lay

from cgtool.errors import CacheError
from cgtool.plan.grammar import sha256_hex
from cgtool.store.entry import read_entry
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.lookup import LookupStore
from cgtool.toolkit.verify.checks import Findings, check_entries, check_entry, check_units
from cgtool.toolkit.verify.hashing import Hasher
from cgtool.toolkit.verify.repair import Repair, repair_entry, repair_units

RANK = RankName(hash=HASH, rank=0, prefix="backbone")


def actions(layout: CacheLayout) -> list[str]:
    return [repair.action for repair in repairs(layout)]


def repairs(layout: CacheLayout) -> list[Repair]:
    return list(repair_entry(layout, check_entry(layout, HASH)))


def units_of(layout: CacheLayout) -> Findings:
    return check_units(layout, Hasher())


def artifact(layout: CacheLayout, data: bytes = NATIVE) -> Path:
    return layout.entry_dir(HASH) / "artifacts" / f"{sha256_hex(data)}.eager"


def replace_file(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["corrupt", "missing", "folder", "fifo"])
def test_an_artifact_is_restored_from_its_unit(cache_root: Path, what: str) -> None:
    layout = lay(cache_root)
    path = artifact(layout)
    path.unlink()
    if what == "corrupt":
        path.write_bytes(b"x")
    elif what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    assert actions(layout) == ["linked"]
    assert check_entry(layout, HASH).problems == []
    assert path.read_bytes() == NATIVE


def test_an_artifact_is_restored_from_another_entry(cache_root: Path) -> None:
    layout = lay(cache_root)
    publish(cache_root, "8", level=1)
    path = artifact(layout, b"8")
    replace_file(path, b"9")
    assert actions(layout) == ["linked"]
    assert check_entry(layout, HASH).problems == []


@pytest.mark.parametrize("what", ["no marker", "no folder", "file for a folder"])
def test_a_missing_lookup_marker_is_recreated(cache_root: Path, what: str) -> None:
    layout = lay(cache_root)
    folder = layout.lookup_dir / FACTS
    (folder / HASH).unlink()
    if what != "no marker":
        folder.rmdir()
    if what == "file for a folder":
        folder.write_bytes(b"")
    assert tuple(LookupStore(layout).candidates(FACTS)) == ()
    assert actions(layout) == ["rewritten"]
    assert check_entry(layout, HASH).problems == []
    assert tuple(LookupStore(layout).candidates(FACTS)) == (HASH,)


def test_a_lookup_marker_behind_a_link_is_left_alone(cache_root: Path, tmp_path: Path) -> None:
    layout = lay(cache_root)
    folder = layout.lookup_dir / FACTS
    shutil.rmtree(folder)
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert actions(layout) == ["not_repaired"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_artifact_without_a_copy_is_left_to_the_compiler(cache_root: Path) -> None:
    layout = lay(cache_root)
    path = artifact(layout, b"rank 0")
    replace_file(path, b"x")
    assert actions(layout) == []
    assert path.read_bytes() == b"x"


def test_a_unit_hard_linked_to_a_corrupt_artifact_is_removed(cache_root: Path) -> None:
    layout = lay(cache_root)
    Flip(path=artifact(layout), at=3, bit=1).do()
    assert actions(layout) == []
    assert [repair.action for repair in repair_units(layout, units_of(layout))] == ["removed"]
    assert units_of(layout).problems == []


def test_a_corrupt_orphan_is_removed(cache_root: Path) -> None:
    layout = lay(cache_root)
    path = layout.entry_dir(HASH) / "artifacts" / f"{'0' * 64}.eager"
    path.write_bytes(b"x")
    assert actions(layout) == ["removed"]
    assert not path.exists()


def test_a_plan_is_restored_from_a_rank_with_the_same_plan(cache_root: Path) -> None:
    layout = lay(cache_root)
    twin = RankName(hash=HASH, rank=1, prefix="backbone")
    from cache_samples import files_of, manifest_of, put_row, writer

    to = writer(cache_root, rank=1)
    to.publish(manifest_of(to, (put_row(to, data=NATIVE),)), files_of("rank 0"))
    replace_file(layout.rank_dir(RANK) / "plan.json", b"x")
    assert actions(layout) == ["rewritten"]
    assert check_entry(layout, HASH).problems == []
    assert (layout.rank_dir(RANK) / "plan.json").read_bytes() == (layout.rank_dir(twin) / "plan.json").read_bytes()


@pytest.mark.parametrize("name", ["manifest.json", "plan.json"])
def test_a_rank_that_cannot_be_restored_is_set_aside_and_others_are_kept(cache_root: Path, name: str) -> None:
    layout = lay(cache_root)
    replace_file(layout.rank_dir(RANK) / name, b"x")
    (repair,) = repairs(layout)
    assert repair.action == "set_aside"
    assert repair.sentence.endswith("Warm the model again.")
    found = check_entry(layout, HASH)
    assert found.problems == []
    assert [manifest.rank for manifest in found.manifests] == [1]
    assert read_entry(layout, RANK) is None


def test_an_entry_without_its_key_is_set_aside_and_can_be_published_again(cache_root: Path) -> None:
    layout = lay(cache_root)
    layout.key_file(HASH).unlink()
    assert actions(layout) == ["set_aside"]
    assert layout.hashes() == []
    lay(cache_root)
    assert check_entry(layout, HASH).problems == []


def test_a_record_of_a_newer_version_is_left_alone(cache_root: Path) -> None:
    layout = lay(cache_root)
    data = resealed(layout.manifest_file(RANK).read_bytes(), {"record": "manifest-99"})
    layout.manifest_file(RANK).write_bytes(data)
    assert actions(layout) == ["not_repaired"]
    assert layout.manifest_file(RANK).read_bytes() == data


@pytest.mark.parametrize("name", ["key.json", "manifest.json", "plan.json", "unit.json"])
def test_a_file_that_cannot_be_read_is_left_alone(cache_root: Path, name: str) -> None:
    layout = lay(cache_root)
    path = next(layout.base.rglob(name))
    path.unlink()
    path.symlink_to("/proc/self/mem")  # reading its first byte is an I/O error
    (repair,) = [*repairs(layout), *repair_units(layout, units_of(layout))]
    assert (repair.action, layout.root / repair.path) == ("not_repaired", path)
    assert f"{path} could not be read: Input/output error" in repair.sentence
    assert path.is_symlink()


def test_a_file_whose_copy_cannot_be_read_is_left_alone(cache_root: Path) -> None:
    layout = lay(cache_root)
    units = next(layout.units_dir.rglob("*.eager"))
    plan = layout.rank_dir(RANK) / "plan.json"
    twin = plan.parent.parent.parent / "rank_1" / "backbone" / "plan.json"
    for path in (units, plan):
        replace_file(path, b"x")
    for copy in (artifact(layout), twin):
        copy.unlink()
        copy.symlink_to("/proc/self/mem")
    done = {layout.root / repair.path: repair for repair in [*repairs(layout), *repair_units(layout, units_of(layout))]}
    assert {done[path].action for path in (units, plan)} == {"not_repaired"}
    assert f"{artifact(layout)} could not be read" in done[units].sentence
    assert f"{twin} could not be read" in done[plan].sentence
    assert units.read_bytes() == plan.read_bytes() == b"x"


def test_a_units_artifact_is_restored_from_an_entry(cache_root: Path) -> None:
    layout = lay(cache_root)
    path = next(layout.units_dir.rglob("*.eager"))
    replace_file(path, b"x")
    assert [repair.action for repair in repair_units(layout, units_of(layout))] == ["linked"]
    assert units_of(layout).problems == []
    assert path.read_bytes() == NATIVE


def test_a_units_torn_record_is_removed(cache_root: Path) -> None:
    layout = lay(cache_root)
    next(layout.units_dir.rglob("unit.json")).write_bytes(b"{")
    assert [repair.action for repair in repair_units(layout, units_of(layout))] == ["removed"]
    assert units_of(layout).problems == []


def test_repairs_work_where_locks_do_not(cache_root: Path) -> None:
    layout = lay(cache_root)
    replace_file(artifact(layout), b"x")
    replace_file(layout.manifest_file(RANK), b"x")
    with no_flock():
        assert sorted(actions(layout)) == ["linked", "set_aside"]
    assert check_entry(layout, HASH).problems == []


def test_a_read_only_cache_is_a_clear_error_and_is_unchanged(
    cache_root: Path, read_only: Callable[[Path], Path]
) -> None:
    layout = lay(cache_root)
    replace_file(artifact(layout), b"x")
    read_only(cache_root)
    with pytest.raises(CacheError, match="read-only file system"):
        actions(layout)
    assert [layout.root / problem.path for problem in check_entry(layout, HASH).problems] == [artifact(layout)]


def test_a_full_disk_is_a_clear_error_and_leaves_the_damage(small_disk: Path) -> None:
    layout = lay(small_disk / "cache")
    publish(small_disk / "cache", "8", level=1)
    path = artifact(layout, b"8")
    replace_file(path, b"9")
    with (small_disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(512)):
            pass
    with pytest.raises(CacheError, match="disk is full"):
        actions(layout)
    assert [layout.root / problem.path for problem in check_entry(layout, HASH).problems] == [path]
    (small_disk / "ballast").unlink()
    assert actions(layout) == ["linked"]


def damage_unit_and_link(layout: CacheLayout) -> None:
    replace_file(next(layout.units_dir.rglob("*.eager")), b"x")


def damage_artifact(layout: CacheLayout) -> None:
    replace_file(artifact(layout), b"x")


def damage_key(layout: CacheLayout) -> None:
    replace_file(layout.key_file(HASH), b"x")


def damage_manifest(layout: CacheLayout) -> None:
    replace_file(layout.manifest_file(RANK), b"x")


@pytest.mark.parametrize("damage", [damage_unit_and_link, damage_artifact, damage_key, damage_manifest])
def test_a_repair_killed_at_any_call_is_completed_by_the_next(
    cache_root: Path, tmp_path: Path, damage: Callable[[CacheLayout], None]
) -> None:
    lay(cache_root)
    publish(cache_root, "other", level=1)
    damage(CacheLayout(root=cache_root))
    before = names_of(CacheLayout(root=cache_root))
    layout = CacheLayout(root=tmp_path / "killed")

    def repair() -> None:
        list(repair_entry(layout, check_entry(layout, HASH)))
        list(repair_units(layout, units_of(layout)))

    left = []
    for call in each_kill(cache_root, layout.root, repair):
        left.append(names_of(layout))
        assert left[-1] <= before, call  # nothing new is wrong
        repair()
        assert names_of(layout) == set(), call
    assert len(left) >= 2


def names_of(layout: CacheLayout) -> set[str]:
    hasher = Hasher()
    entries = [problem for found in check_entries(layout, layout.hashes(), hasher) for problem in found.problems]
    units = check_units(layout, hasher).problems
    return {problem.path for problem in [*entries, *units]}


@pytest.mark.parametrize("what", ["artifacts", "rank_0", "entry"])
def test_nothing_behind_a_link_is_repaired(cache_root: Path, tmp_path: Path, what: str) -> None:
    layout = lay(cache_root)
    folder = layout.entry_dir(HASH) if what == "entry" else layout.entry_dir(HASH) / what
    replace_file(artifact(layout), b"other")
    replace_file(layout.entry_dir(HASH) / "artifacts" / f"{'a' * 64}.eager", b"an orphan")
    replace_file(layout.rank_dir(RANK) / "plan.json", b"x")
    folder.rename(tmp_path / "outside")
    folder.symlink_to(tmp_path / "outside")
    before = {path: path.read_bytes() for path in (tmp_path / "outside").rglob("*") if path.is_file()}
    repairs(layout)
    assert {path: path.read_bytes() for path in (tmp_path / "outside").rglob("*") if path.is_file()} == before


def test_no_unit_behind_a_link_is_repaired(cache_root: Path, tmp_path: Path) -> None:
    layout = lay(cache_root)
    unit = next(layout.units_dir.glob("*/*"))
    replace_file(unit / f"{sha256_hex(NATIVE)}.eager", b"other")
    unit.parent.rename(tmp_path / "outside")
    unit.parent.symlink_to(tmp_path / "outside")
    before = sorted((path, path.read_bytes()) for path in (tmp_path / "outside").rglob("*") if path.is_file())
    assert [repair.action for repair in repair_units(layout, units_of(layout))] in ([], ["not_repaired"])
    after = sorted((path, path.read_bytes()) for path in (tmp_path / "outside").rglob("*") if path.is_file())
    assert after == before
