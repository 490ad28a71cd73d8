"""Executing a prune: what is removed, what is kept, and that a kill leaves the cache as before or as after."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cache_samples import no_descriptors, no_flock
from prune_samples import DAY, facts_of, files_in, is_whole, lay, put_unit, rest, units_in
from syscalls import Call, each_kill, killed_at

from cgtool.errors import CacheCorruptError, CacheError
from cgtool.store.entry import EntryWriter, ObjectStore
from cgtool.store.key import read_key
from cgtool.store.layout import CacheLayout
from cgtool.store.leases import hold, hold_writing
from cgtool.store.lookup import LookupStore
from cgtool.store.pruned import all_pruned, count_miss, pruned, sweep_trash
from cgtool.store.units import UnitStore
from cgtool.toolkit.prune import planner, removal
from cgtool.toolkit.prune.plan import Rules
from cgtool.toolkit.prune.planner import make_plan
from cgtool.toolkit.prune.removal import disk_usage

SPAWN = multiprocessing.get_context("spawn")


def plan_of(root, **rules):
    return make_plan(CacheLayout(root=root), Rules(**rules))


def prune(root, **rules):
    return plan_of(root, **rules).execute()


def test_an_entry_is_removed_with_its_units_markers_and_stamps(cache_root):
    one = lay(cache_root, 1, model="A", used=1e9)
    two = lay(cache_root, 2, model="B")
    layout = CacheLayout(root=cache_root)
    hold(layout, one).release()
    outcome = prune(cache_root, entries=(one.hash,))
    assert (outcome.removed, outcome.kept, outcome.failed) == ((one.hash,), (), ())
    assert not is_whole(cache_root, one)
    assert is_whole(cache_root, two)
    assert tuple(LookupStore(layout).candidates(facts_of("A"))) == ()
    assert tuple(LookupStore(layout).candidates(facts_of("B"))) == (two.hash,)
    named = {path for path in files_in(cache_root) if one.hash in path}
    assert named == set()
    assert len(units_in(cache_root)) == 1


def test_the_freed_bytes_match_the_plan(cache_root):
    names = [lay(cache_root, number, pieces=("own", "both")) for number in range(3)]
    layout = CacheLayout(root=cache_root)
    plan = plan_of(cache_root, entries=(names[0].hash, names[1].hash))
    entries = disk_usage(str(layout.base))
    outcome = plan.execute()
    assert outcome.freed_bytes == plan.frees_bytes
    records = disk_usage(str(layout.state_dir / "pruned"))
    assert disk_usage(str(layout.base)) == entries - plan.frees_bytes + records


def test_a_second_prune_finds_nothing(cache_root):
    lay(cache_root, 1)
    lay(cache_root, 2)
    prune(cache_root, older_than_secs=DAY)
    assert plan_of(cache_root, older_than_secs=DAY).is_empty
    assert plan_of(cache_root, units=True).is_empty


def test_an_entry_used_after_the_plan_is_kept(cache_root):
    names = [lay(cache_root, number) for number in range(4)]
    layout = CacheLayout(root=cache_root)
    plan = plan_of(cache_root, older_than_secs=DAY)
    assert len(plan.entries) == 4
    loaded = hold(layout, names[0])
    written = hold_writing(layout, names[1].hash)
    time.sleep(0.01)
    layout.used_file(names[2]).parent.mkdir(exist_ok=True)
    layout.used_file(names[2]).write_bytes(b".")
    outcome = plan.execute()
    assert outcome.removed == (names[3].hash,)
    assert {(kept.hash, kept.why) for kept in outcome.kept} == {
        (names[0].hash, "in_use"),
        (names[1].hash, "in_use"),
        (names[2].hash, "used_meanwhile"),
    }
    assert all(is_whole(cache_root, name) for name in names[:3])
    loaded.release()
    written.release()


def test_an_entry_written_after_the_plan_is_kept(cache_root):
    name = lay(cache_root, 1)
    plan = plan_of(cache_root, entries=(name.hash,))
    time.sleep(0.01)
    lay(cache_root, 1, rank=1)
    outcome = plan.execute()
    assert outcome.removed == ()
    assert [kept.why for kept in outcome.kept] == ["used_meanwhile"]


def test_files_with_times_in_the_future_are_pruned(cache_root):
    names = [lay(cache_root, number, used=time.time() + DAY) for number in (1, 2)]
    layout = CacheLayout(root=cache_root)
    for name in names:
        os.utime(layout.manifest_file(name), (time.time() + DAY,) * 2)
    assert prune(cache_root, entries=(names[0].hash,)).removed == (names[0].hash,)
    assert prune(cache_root, max_bytes=0).removed == (names[1].hash,)


def test_a_load_that_does_not_change_the_time_keeps_an_entry(cache_root):
    name = lay(cache_root, 1, used=1e9)
    plan = plan_of(cache_root, older_than_secs=DAY)
    stamp = CacheLayout(root=cache_root).used_file(name)
    stamp.write_bytes(b"..")
    os.utime(stamp, (1e9, 1e9))
    outcome = plan.execute()
    assert (outcome.removed, [kept.why for kept in outcome.kept]) == ((), ["used_meanwhile"])


def test_an_entry_warmed_again_during_its_removal_is_found(cache_root, monkeypatch):
    name = lay(cache_root, 1, model="A")
    layout = CacheLayout(root=cache_root)
    monkeypatch.setattr(planner, "flush", lambda *_: lay(cache_root, 1, model="A"))
    outcome = prune(cache_root, entries=(name.hash,))
    assert outcome.removed == (name.hash,)
    assert is_whole(cache_root, name)
    marks = (layout.lookup_dir / facts_of("A") / name.hash, layout.lookup_dir / "indexed" / name.flat)
    assert [mark.exists() for mark in marks] == [True, True]


def test_an_entry_put_back_while_its_markers_are_removed_is_found(cache_root, tmp_path, monkeypatch):
    """Put back by hand, without a lease: it is indexed while the markers of the old one are removed."""
    name = lay(cache_root, 1, model="A")
    layout = CacheLayout(root=cache_root)
    shutil.copytree(layout.entry_dir(name.hash), tmp_path / "copy")
    removed = removal.remove

    def unlink(path):
        removed(path)
        if "/indexed/" in str(path) and (tmp_path / "copy").exists():
            shutil.move(tmp_path / "copy", layout.entry_dir(name.hash))
            assert tuple(LookupStore(layout).candidates(facts_of("A"))) == (name.hash,)

    monkeypatch.setattr(removal, "remove", unlink)
    assert prune(cache_root, entries=(name.hash,)).removed == (name.hash,)
    assert tuple(LookupStore(layout).candidates(facts_of("A"))) == (name.hash,)


def test_the_markers_of_an_entry_being_written_again_are_kept(cache_root, monkeypatch):
    name = lay(cache_root, 1, model="A")
    layout = CacheLayout(root=cache_root)
    held = []
    monkeypatch.setattr(planner, "flush", lambda *_: held.append(hold_writing(layout, name.hash)))
    assert prune(cache_root, entries=(name.hash,)).removed == (name.hash,)
    assert (layout.lookup_dir / facts_of("A") / name.hash).exists()
    held.pop().release()
    assert {file.kind for file in plan_of(cache_root).files} == {"lookup", "state"}
    prune(cache_root)
    assert not [path for path in files_in(cache_root) if name.hash in path]


def test_a_leftover_that_a_manifest_now_names_is_kept(cache_root):
    name = lay(cache_root, 1)
    layout = CacheLayout(root=cache_root)
    manifest = layout.manifest_file(name)
    kept = manifest.read_bytes()
    shutil.copytree(layout.rank_dir(name), layout.rank_dir(name).with_name("other"))
    manifest.unlink()
    (layout.rank_dir(name).with_name("other") / "manifest.json").unlink()
    manifest.write_bytes(kept)
    artifact = next((layout.entry_dir(name.hash) / "artifacts").iterdir())
    plan = plan_of(cache_root)
    assert plan.is_empty  # the other rank was started today
    data = manifest.read_bytes()
    manifest.write_bytes(data.replace(artifact.name[:64].encode(), b"0" * 64))
    assert plan_of(cache_root).is_empty  # a damaged manifest could name any artifact
    manifest.write_bytes(data)
    extra = artifact.with_name(f"{'ab' * 32}.eager")
    extra.write_bytes(b"1")
    plan = plan_of(cache_root)
    assert [file.kind for file in plan.files] == ["artifact"]
    lease = hold_writing(layout, name.hash)
    assert plan.execute().removed_files == 0
    assert extra.exists()
    lease.release()
    assert plan.execute().removed_files == 1
    assert not extra.exists()
    assert is_whole(cache_root, name)


def test_a_unit_being_compiled_is_kept(cache_root):
    name = lay(cache_root, 1)
    layout = CacheLayout(root=cache_root)
    (key,) = units_in(cache_root)
    plan = plan_of(cache_root, entries=(name.hash,))
    assert plan.entries[0].units == (key,)
    with UnitStore(layout).lock(key):
        outcome = plan.execute()
    assert outcome.removed == (name.hash,)
    assert units_in(cache_root) == {key}


def test_a_warm_notices_that_a_unit_was_removed_before_it_was_linked(cache_root):
    layout = CacheLayout(root=cache_root)
    units = UnitStore(layout)
    record = put_unit(units, "ef" * 32, b"bytes")
    rest(layout.unit_dir("ef" * 32), 3601)
    found = units.find("ef" * 32)
    prune(cache_root, units=True)
    objects = ObjectStore(layout.entry_dir("d" * 64))
    with pytest.raises(CacheCorruptError, match="it is missing"):
        units.link_into(objects, "ef" * 32, found)
    with units.lock("ef" * 32):
        units.put("ef" * 32, b"bytes", record)
    units.link_into(objects, "ef" * 32, record)
    assert objects.get(record.digest, "eager") == b"bytes"


def test_reading_an_artifact_of_a_pruned_entry_is_a_clear_error(cache_root):
    from cgtool.store.entry import read_entry

    name = lay(cache_root, 1)
    layout = CacheLayout(root=cache_root)
    entry = read_entry(layout, name)
    assert prune(cache_root, entries=(name.hash,)).removed == (name.hash,)
    with pytest.raises(CacheCorruptError, match="it is missing"):
        entry.artifact(entry.manifest.rows[0].artifact)
    assert read_entry(layout, name) is None
    assert read_key(layout, name.hash) is None


# Kills before each change to the file system.


def lay_three(root):
    layout = CacheLayout(root=root)
    names = [
        lay(root, 1, model="A", pieces=("own", "both"), used=1e9),
        lay(root, 2, model="A", pieces=("own", "both")),
        lay(root, 3, model="B", pieces=("both",)),
    ]
    orphan = layout.entry_dir(names[2].hash) / "artifacts" / f"{'ab' * 32}.eager"
    orphan.write_bytes(b"orphan")
    return names


def check_sane(root, names):
    """Check that each entry is whole or gone, the last one is whole, and lookups find exactly those."""
    layout = CacheLayout(root=root)
    there = {name.hash for name in names if is_whole(root, name)}
    assert names[2].hash in there
    for model in ("A", "B"):
        found = LookupStore(layout).candidates(facts_of(model))
        assert set(found) == {name.hash for name, of in zip(names, "AAB", strict=True) if of == model} & there
    return there


RULES = {"older_than_secs": DAY, "orphans": True}


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_kill_at_any_instant_leaves_the_cache_as_before_or_as_after(tmp_path, stride):
    template = tmp_path / "template"
    names = lay_three(template)
    kept = names[2]
    rules = {"entries": (names[0].hash, names[1].hash), "orphans": True}
    after = tmp_path / "after"
    _copy(template, after)
    prune(after, **rules)
    final = {path for path in files_in(after) if "/pruned/" not in path}
    seen = []
    root = tmp_path / "root"
    for call in each_kill(template, root, lambda: prune(root, **rules), stride=stride):
        there = check_sane(root, names)
        seen.append(len(there))
        rest_all(root)
        # Running the same prune again ends in the same state as an undisturbed one.
        left = tuple(name.hash for name in names[:2] if name.hash in there)
        outcome = prune(root, entries=left, orphans=True, units=True)
        assert outcome.failed == ()
        assert {path for path in files_in(root) if "/pruned/" not in path} == final, call
        assert is_whole(root, kept)
    assert set(seen) == {1, 2, 3}
    assert len(seen) * stride > 40


def rest_all(root):
    """Age the leftovers, which prune otherwise removes only after minutes or hours."""
    for path in root.rglob("*"):
        if path.name.endswith(".tmp") or path.parent.name in {
            p.name for p in (root / "torch_compile_cache/units").iterdir()
        }:
            rest(path, 2 * DAY)


def _copy(source, target):
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def test_a_rename_is_flushed_before_anything_is_deleted(cache_root, monkeypatch):
    name = lay(cache_root, 1)
    layout = CacheLayout(root=cache_root)
    done = []
    flush, unlink = os.fsync, os.unlink

    def flushed(descriptor):
        done.append(("flush", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        flush(descriptor)

    def unlinked(path, *, dir_fd=None):
        done.append(("unlink", str(path)))
        unlink(path, dir_fd=dir_fd)

    plan = plan_of(cache_root, entries=(name.hash,))
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "unlink", unlinked)
    plan.execute()
    first = next(index for index, (what, path) in enumerate(done) if what == "unlink" and "/trash/" in path)
    assert {("flush", str(layout.base)), ("flush", str(layout.state_dir / "trash"))} <= set(done[:first])


def test_a_warm_after_a_killed_prune_sweeps_the_trash(cache_root):
    names = [lay(cache_root, number) for number in (1, 2)]
    layout = CacheLayout(root=cache_root)
    assert killed_at(Call(name="rmdir", nth=1), lambda: prune(cache_root, entries=(names[0].hash,)))
    assert list(layout.state_dir.glob("trash/*"))
    lay(cache_root, 3)
    assert list(layout.state_dir.glob("trash/*")) == []
    assert is_whole(cache_root, names[1])


def test_sweeping_without_trash_creates_nothing(tmp_path):
    sweep_trash(CacheLayout(root=tmp_path))
    assert list(tmp_path.iterdir()) == []


# Faults.


def test_a_full_disk_is_pruned(small_disk):
    names = [lay(small_disk, number) for number in (1, 2)]
    with pytest.raises(OSError, match="No space"):
        (small_disk / "ballast").write_bytes(bytes(1_000_000))
    outcome = prune(small_disk, entries=(names[0].hash,))
    assert (outcome.removed, outcome.failed) == ((names[0].hash,), ())
    assert outcome.freed_bytes > 0
    assert is_whole(small_disk, names[1])
    (small_disk / "ballast").unlink()
    assert plan_of(small_disk).is_empty


def test_a_disk_without_room_for_the_trash_is_pruned(cache_root, monkeypatch):
    name = lay(cache_root, 1)
    layout = CacheLayout(root=cache_root)
    made = Path.mkdir

    def full(self, *args, **kwargs):
        if self.name == "trash":
            raise OSError(28, "No space left on device")
        made(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", full)
    outcome = prune(cache_root, entries=(name.hash,))
    assert (outcome.removed, outcome.failed) == ((name.hash,), ())
    assert not list(layout.base.glob(".*"))
    assert not layout.entry_dir(name.hash).exists()


def test_a_read_only_cache_is_left_alone_with_an_error(cache_root, read_only):
    name = lay(cache_root, 1)
    before = files_in(cache_root)
    read_only(cache_root)
    outcome = prune(cache_root, entries=(name.hash,))
    assert outcome.removed == ()
    assert outcome.freed_bytes == 0
    assert files_in(cache_root) == before
    sentences = [kept.sentence for kept in outcome.kept] + [failed.sentence for failed in outcome.failed]
    assert any("read-only file system" in sentence for sentence in sentences)


def test_a_folder_of_another_user_is_left_alone_with_an_error(cache_root):
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    name = lay(cache_root, 1)
    before = files_in(cache_root)
    for above in (cache_root, *cache_root.parents):
        if not above.stat().st_mode & 0o001:
            above.chmod(above.stat().st_mode | 0o055)
    program = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
        "from cgtool.store.layout import CacheLayout\n"
        "from cgtool.toolkit.prune.planner import make_plan\n"
        "from cgtool.toolkit.prune.plan import Rules\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "out = make_plan(CacheLayout(root=Path(sys.argv[1])), Rules(entries=(sys.argv[2],))).execute()\n"
        "print(out.removed, [k.sentence for k in out.kept], [f.sentence for f in out.failed])"
    )
    repo = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program, str(cache_root), name.hash, str(repo)],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("()")
    assert "permission denied" in done.stdout
    assert files_in(cache_root) == before


def test_nothing_is_removed_where_file_locks_do_not_work(cache_root):
    lay(cache_root, 1)
    plan = plan_of(cache_root, older_than_secs=DAY)
    before = files_in(cache_root)
    with no_flock(), pytest.raises(CacheError, match=r"File locks do not work in .* nothing was removed"):
        plan.execute()
    assert files_in(cache_root) == before


def test_running_out_of_descriptors_leaves_entries_whole(cache_root):
    names = [lay(cache_root, number) for number in (1, 2)]
    plan = plan_of(cache_root, older_than_secs=DAY)
    with no_descriptors():
        outcome = plan.execute()
    assert outcome.removed == ()
    assert outcome.kept or outcome.failed
    assert all(is_whole(cache_root, name) for name in names)
    assert len(prune(cache_root, older_than_secs=DAY).removed) == 2


# Misses caused by a prune.


def test_misses_of_pruned_entries_are_counted(cache_root):
    name = lay(cache_root, 1, model="A")
    layout = CacheLayout(root=cache_root)
    assert count_miss(layout, facts_of("A")) is None
    prune(cache_root, older_than_secs=DAY)
    record = pruned(layout, facts_of("A"))
    assert (record.misses, record.last_missed) == (0, None)
    assert [(entry.hash, entry.model) for entry in record.entries] == [(name.hash, "A")]
    assert "created and never used" in record.entries[0].why
    for _ in range(3):
        assert count_miss(layout, facts_of("A")).entries == record.entries
    assert count_miss(layout, facts_of("B")) is None
    (record,) = all_pruned(layout)
    assert record.misses == 3
    assert time.time() - record.last_missed < 60


def test_an_entry_warmed_again_is_not_missed(cache_root):
    lay(cache_root, 1, model="A")
    prune(cache_root, older_than_secs=DAY)
    lay(cache_root, 1, model="A")
    assert pruned(CacheLayout(root=cache_root), facts_of("A")) is None
    assert all_pruned(CacheLayout(root=cache_root)) == ()


def test_a_torn_prune_record_is_ignored_and_replaced(cache_root):
    name = lay(cache_root, 1, model="A")
    layout = CacheLayout(root=cache_root)
    path = layout.state_dir / "pruned" / f"{facts_of('A')}.json"
    path.parent.mkdir()
    path.write_bytes(b'{"schema": 1, "entries"')
    assert all_pruned(layout) == ()
    prune(cache_root, entries=(name.hash,))
    assert [entry.hash for entry in pruned(layout, facts_of("A")).entries] == [name.hash]


def test_an_entry_is_kept_from_the_creation_of_its_writer(cache_root):
    name = lay(cache_root, 1)
    layout = CacheLayout(root=cache_root)
    writer = EntryWriter(layout, read_key(layout, name.hash), rank=0, prefix="backbone")
    assert prune(cache_root, entries=(name.hash,)).removed == ()
    del writer
    assert prune(cache_root, entries=(name.hash,)).removed == (name.hash,)
