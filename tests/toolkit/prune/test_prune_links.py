"""Prune removes nothing behind a symlink: a link placed in a cache cannot make it delete other files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prune_samples import DAY, files_in, is_whole, lay, rest

from cgtool.errors import CacheError
from cgtool.store.layout import CacheLayout
from cgtool.store.leases import hold, remove_idle
from cgtool.store.pruned import is_inside, put_aside, sweep_trash
from cgtool.store.walk import view_entry
from cgtool.toolkit.prune.leftovers import remove_leftovers
from cgtool.toolkit.prune.plan import PlannedFile, Rules
from cgtool.toolkit.prune.planner import make_plan
from cgtool.toolkit.prune.removal import Ledger, Removal

DEAD = 2**22 + 5


def prune(root, **rules):
    return make_plan(CacheLayout(root=root), Rules(**rules)).execute()


def move_out(path: Path, outside: Path) -> Path:
    """Move a folder outside, and put a link in its place."""
    target = outside / path.name
    path.rename(target)
    path.symlink_to(target)
    return target


def put_old(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"precious")
    rest(path, 400 * DAY)


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


def places(layout, name):
    unit = next(layout.units_dir.glob("*/*"))
    entry = layout.entry_dir(name.hash)
    return {
        "trash": (layout.state_dir / "trash", ["x", "y/z"]),
        "state": (layout.state_dir, ["trash/x", f"used/{'c' * 64}-rank_0-b", f"pruned/{'d' * 64}.json"]),
        "used": (layout.state_dir / "used", [f"{'c' * 64}-rank_0-b"]),
        "leases": (layout.state_dir / "leases", ["c" * 64]),
        "pruned": (layout.state_dir / "pruned", [f"{'d' * 64}.json", f".x.{DEAD}.0a.tmp"]),
        "rank": (entry / "rank_0", [f"backbone/.plan.json.{DEAD}.0a.tmp", f"other/.plan.json.{DEAD}.0a.tmp"]),
        "prefix": (entry / "rank_0" / "backbone", [f".x.{DEAD}.0a.tmp", f".plan.json.{'a' * 64}.next"]),
        "artifacts": (entry / "artifacts", [f"{'a' * 64}.eager", f".x.{DEAD}.0a.tmp"]),
        "entry": (entry, [f".x.{DEAD}.0a.tmp", f"artifacts/{'a' * 64}.eager", "rank_3/backbone/plan.json"]),
        "units": (layout.units_dir, [f"{unit.parent.name}/{unit.name}/.x.{DEAD}.0a.tmp"]),
        "shard": (unit.parent, [f"{unit.name}/.x.{DEAD}.0a.tmp", f"{unit.name}/{'a' * 64}.eager"]),
        "unit": (unit, [f".x.{DEAD}.0a.tmp", f"{'a' * 64}.eager"]),
        "lookup": (layout.lookup_dir, [f"{'a' * 64}/{'b' * 64}"]),
        "digest": (layout.lookup_dir / ("a" * 64), ["b" * 64]),
    }


@pytest.mark.parametrize(
    "what",
    [
        *("trash", "state", "used", "leases", "pruned"),
        *("rank", "prefix", "artifacts", "entry"),
        *("units", "shard", "unit", "lookup", "digest"),
    ],
)
def test_files_behind_a_link_are_kept(cache_root, outside, what):
    name = lay(cache_root, 1)
    layout = CacheLayout(root=cache_root)
    folder, names = places(layout, name)[what]
    for below in names:
        put_old(folder / below)
    target = move_out(folder, outside)
    for path in [target, *target.rglob("*")]:
        rest(path, 2 * DAY)
    before = files_in(outside)
    assert prune(cache_root, orphans=True, units=True).failed == ()
    prune(cache_root, older_than_secs=0.0, orphans=True, units=True)
    prune(cache_root, entries=(name.hash,)) if layout.entry_dir(name.hash).exists() else None
    sweep_trash(layout)
    assert before <= files_in(outside)


@pytest.mark.parametrize("what", ["rank_7", "artifacts"])
def test_an_entry_that_contains_a_link_can_be_removed_by_name(cache_root, outside, what):
    name = lay(cache_root, 1)
    place = CacheLayout(root=cache_root).entry_dir(name.hash) / what
    if place.exists():
        move_out(place, outside)
    else:
        put_old(outside / "backbone" / "manifest.json")
        place.symlink_to(outside)
    before = files_in(outside)
    assert prune(cache_root, entries=(name.hash,)).removed == (name.hash,)
    assert not place.parent.exists()
    assert files_in(outside) == before


def test_a_link_in_place_of_a_rank_makes_the_entry_unreadable(cache_root, outside):
    lay(cache_root, 1)
    name = lay(cache_root, 1, rank=1)
    layout = CacheLayout(root=cache_root)
    orphan = layout.entry_dir(name.hash) / "artifacts" / f"{'a' * 64}.eager"
    put_old(orphan)
    move_out(layout.entry_dir(name.hash) / "rank_1", outside)  # whose manifest may name the artifact
    assert not view_entry(layout, name.hash).is_readable
    assert [found.rank for found in layout.rank_names(name.hash)] == [0]
    prune(cache_root)
    assert orphan.exists()


def test_a_link_in_place_of_the_trash_is_not_used(cache_root, outside):
    name = lay(cache_root, 1)
    layout = CacheLayout(root=cache_root)
    (layout.state_dir / "trash").symlink_to(outside)
    other = lay(cache_root, 2)
    aside = put_aside(layout, str(layout.entry_dir(other.hash)))
    assert Path(aside).parent == layout.base
    rest(Path(aside), 2 * DAY)
    assert prune(cache_root, entries=(name.hash,)).removed == (name.hash,)
    prune(cache_root)
    assert list(outside.iterdir()) == []
    assert [path.name for path in layout.base.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("kind", "folder"),
    [
        ("trash", "state/trash"),
        ("lookup", f"lookup/{'a' * 64}"),
        ("lookup", "lookup"),
        ("rank", f"{'e' * 64}/rank_4"),
        ("unit", "units/bb"),
        ("temporary", "units"),
        ("state", "state/used"),
    ],
)
def test_a_link_placed_between_plan_and_execution_is_not_followed(cache_root, outside, kind, folder):
    lay(cache_root, 1)
    path = CacheLayout(root=cache_root).base / folder
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(outside.parent / "was")
    path.symlink_to(outside)
    name = f".{'b' * 64}.{DEAD}.0a.tmp" if kind == "temporary" else "b" * 64
    (outside / name).mkdir()
    rest(outside / name, 2 * DAY)
    file = PlannedFile(path=f"{folder}/{name}", kind=kind, frees_bytes=0)
    layout = CacheLayout(root=cache_root)
    removal = Removal(layout)
    assert remove_leftovers(layout, [file], removal) == 0
    assert [path.name for path in outside.iterdir()] == [name]
    assert all("is reached through a link" in failed.sentence for failed in removal.failed)


def test_a_cache_folder_that_is_a_link_is_pruned(cache_root, outside):
    name = lay(cache_root, 1)
    layout = CacheLayout(root=cache_root)
    move_out(layout.base, outside)
    assert is_whole(cache_root, name)
    assert prune(cache_root, entries=(name.hash,)).removed == (name.hash,)
    assert not list(outside.rglob(f"*{name.hash}*"))


def test_a_link_to_an_entry_is_removed_without_its_target(cache_root, outside):
    name = lay(cache_root, 1)
    entry = CacheLayout(root=cache_root).entry_dir(name.hash)
    target = move_out(entry, outside)
    before = files_in(outside)
    assert Ledger().take(str(entry)) == (entry.lstat().st_size, entry.lstat().st_size)
    assert prune(cache_root, entries=(name.hash,)).removed == (name.hash,)
    assert not os.path.lexists(entry)
    assert files_in(outside) == before
    assert target.exists()


def test_leases_behind_a_link_are_kept(cache_root, outside):
    name = lay(cache_root, 1)
    layout = CacheLayout(root=cache_root)
    hold(layout, name).release()
    target = move_out(layout.state_dir / "leases", outside)
    remove_idle(layout, name.hash)
    assert (target / name.flat).exists()


def test_paths_inside_the_cache_are_recognized(cache_root, outside):
    layout = CacheLayout(root=cache_root)
    (layout.base / "real").mkdir(parents=True)
    (layout.base / "link").symlink_to(layout.base / "real")
    inside = {below: is_inside(layout, f"{layout.base}/{below}") for below in ("a", "link", "real/a", "none/a/b")}
    assert all(inside.values())
    for path in ("link/a", "../a", "..", ".", "real/../../a"):
        assert not is_inside(layout, f"{layout.base}/{path}")
    with pytest.raises(CacheError, match="is reached through a link"):
        put_aside(layout, f"{layout.base}/link/a")
