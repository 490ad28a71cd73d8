"""Entries and artifacts: atomic updates despite kills, corruption, full disks and concurrent access."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
from cache_samples import (
    FACTS,
    add_sizes,
    files_of,
    leftovers,
    manifest_of,
    no_flock,
    publish,
    publish_times,
    put_row,
    read_whole,
    resealed,
    run_beside,
    sample_key,
    without_locks,
    writer,
)
from msgspec.structs import replace
from syscalls import each_kill

from cgtool.errors import CacheCorruptError, CacheError, CacheSchemaError
from cgtool.plan.grammar import sha256_hex
from cgtool.plan.shapes import shape_text
from cgtool.store import entry as entry_module
from cgtool.store.entry import ObjectStore, read_entry
from cgtool.store.key import read_key
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.lookup import LookupStore
from cgtool.store.records import Artifact

SPAWN = multiprocessing.get_context("spawn")


def test_published_entry_is_read_back(cache_root):
    name = publish(cache_root)
    assert read_whole(cache_root, name) == "one"
    assert read_key(CacheLayout(root=cache_root), name.hash) == sample_key()


def test_rank_folder_contains_exactly_four_files(cache_root):
    name = publish(cache_root)
    publish(cache_root, "two")
    folder = CacheLayout(root=cache_root).rank_dir(name)
    assert sorted(path.name for path in folder.iterdir()) == [
        "computation_graph.py",
        "manifest.json",
        "plan.json",
        "transformed_code.py",
    ]
    assert (folder / "plan.json").read_bytes() == files_of("two")["plan.json"]


def test_no_file_contains_the_path_of_the_cache(cache_root):
    publish(cache_root)
    holders = [
        path for path in cache_root.rglob("*") if path.is_file() and os.fsencode(cache_root) in path.read_bytes()
    ]
    assert holders == []


def test_a_copied_entry_folder_works_under_another_root(cache_root, tmp_path):
    name = publish(cache_root)
    other = tmp_path / "elsewhere"
    shutil.copytree(CacheLayout(root=cache_root).entry_dir(name.hash), CacheLayout(root=other).entry_dir(name.hash))
    shutil.rmtree(cache_root)
    assert read_whole(other, name) == "one"


def test_adding_rows_to_a_missing_entry_is_refused(cache_root):
    with pytest.raises(CacheError, match="no intact entry"):
        add_sizes(cache_root, (8,))
    assert not list(cache_root.rglob("manifest.json"))


def test_publishing_the_same_plan_again_keeps_rows_of_other_processes(cache_root):
    name = publish(cache_root)
    add_sizes(cache_root, (8,))
    created = read_entry(CacheLayout(root=cache_root), name).manifest.created
    publish(cache_root)
    manifest = read_entry(CacheLayout(root=cache_root), name).manifest
    assert [shape_text(row.shape) for row in manifest.rows] == ["general", "num_tokens=8"]
    assert manifest.created == created


def test_publishing_another_plan_drops_the_rows_of_the_old_one(cache_root):
    name = publish(cache_root)
    add_sizes(cache_root, (8,))
    publish(cache_root, "two")
    rows = read_entry(CacheLayout(root=cache_root), name).manifest.rows
    assert [shape_text(row.shape) for row in rows] == ["general"]


def test_a_row_without_its_artifact_is_never_published(cache_root):
    to = writer(cache_root)
    row = put_row(to)
    to.objects.path(row.artifact.digest, row.artifact.kind).unlink()
    with pytest.raises(CacheError, match="named by a manifest but missing"):
        to.publish(manifest_of(to, (row,)), files_of("one"))
    assert not list(cache_root.rglob("manifest.json"))


@pytest.mark.parametrize("name", ["plan.json", "computation_graph.py", "transformed_code.py"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "remove"])
def test_corrupt_file_is_reported_and_never_returned(cache_root, name, harm):
    entry = publish(cache_root)
    path = CacheLayout(root=cache_root).rank_dir(entry) / name
    data = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    else:
        data[3] ^= 1
        path.write_bytes({"flip": bytes(data), "truncate": bytes(data[:-2]), "empty": b""}[harm])
    with pytest.raises(CacheCorruptError) as raised:
        read_whole(cache_root, entry)
    assert raised.value.path == path
    assert str(path) in str(raised.value)
    publish(cache_root)
    assert read_whole(cache_root, entry) == "one"


def test_a_manifest_of_a_newer_schema_is_neither_read_nor_replaced(cache_root):
    name = publish(cache_root)
    path = CacheLayout(root=cache_root).manifest_file(name)
    newer = resealed(path.read_bytes(), {"record": "manifest-9", "cgtool": "9.1"})
    path.write_bytes(newer)
    with pytest.raises(CacheSchemaError, match=r"schema 9 and was written by cgtool 9\..*Update cgtool"):
        read_whole(cache_root, name)
    with pytest.raises(CacheSchemaError):
        publish(cache_root)
    assert path.read_bytes() == newer


def test_a_manifest_copied_to_another_rank_is_corrupt(cache_root):
    name = publish(cache_root)
    layout = CacheLayout(root=cache_root)
    other = RankName(hash=name.hash, rank=1, prefix=name.prefix)
    shutil.copytree(layout.rank_dir(name), layout.rank_dir(other))
    with pytest.raises(CacheCorruptError, match="another folder"):
        read_whole(cache_root, other)


def test_concurrent_writers_lose_no_rows(cache_root):
    name = publish(cache_root)
    sizes = [tuple(range(start, 60, 3)) for start in (1, 2, 3)]
    run_beside(*((add_sizes, (cache_root, some)) for some in sizes))
    manifest = read_entry(CacheLayout(root=cache_root), name).manifest
    assert [shape_text(row.shape) for row in manifest.rows] == [
        "general",
        *(f"num_tokens={size}" for size in range(1, 60)),
    ]
    assert leftovers(cache_root) == []


@pytest.mark.parametrize("locks", [True, False], ids=["flock", "enolck"])
def test_reader_never_sees_a_mixture_of_versions(cache_root, locks):
    name = publish(cache_root)
    enough = cache_root.with_name("enough")
    work = (publish_times, cache_root, ("two", "three", "four"), 12, enough)
    other = (publish_times, cache_root, ("five", "six"), 18, enough)
    processes = [
        SPAWN.Process(target=task[0] if locks else without_locks, args=task[1:] if locks else task)
        for task in (work, other)
    ]
    for process in processes:
        process.start()
    seen = set()
    while any(process.is_alive() for process in processes):
        seen.add(read_whole(cache_root, name))
        if len(seen) > 2:
            enough.touch()
    assert [process.exitcode for process in processes] == [0, 0]
    assert seen <= {"one", "two", "three", "four", "five", "six"}
    assert read_whole(cache_root, name) in {"four", "six"}


def test_file_that_is_renamed_while_it_is_read_is_found_without_rereading_the_manifest(cache_root, monkeypatch):
    name, read_bytes, read_manifest = publish(cache_root, "two"), entry_module.read_bytes, entry_module.read_manifest
    plan = CacheLayout(root=cache_root).rank_dir(name) / "plan.json"
    data = plan.read_bytes()
    plan.write_bytes(b"as it was before")

    def read(path):
        if path.name.endswith(".next"):
            plan.write_bytes(data)
        return read_bytes(path)

    manifests = []
    monkeypatch.setattr(entry_module, "read_bytes", read)
    monkeypatch.setattr(entry_module, "read_manifest", lambda *of: manifests.append(of) or read_manifest(*of))
    assert read_entry(CacheLayout(root=cache_root), name).files["plan.json"] == data
    assert len(manifests) == 1


def test_without_locks_the_last_writers_entry_is_complete(cache_root):
    with no_flock():
        for text in ("one", "two", "three"):
            name = publish(cache_root, text)
            assert read_whole(cache_root, name) == text
    publish(cache_root, "four")
    assert read_whole(cache_root, name) == "four"
    assert leftovers(cache_root) == []


def _killed_at_calls(root: Path, action, *, stride: int = 1) -> list[str | None]:
    """Kill `action` at each of its system calls, from the same start; return the entry's content after each kill."""
    start = root.with_name("start")
    if root.exists():
        root.rename(start)
    to = RankName(hash=sample_key().hash, rank=0, prefix="backbone")
    found = []
    for call in each_kill(start, root, action, stride=stride):
        found.append(read_whole(root, to))
        if found[-1] is not None:
            assert tuple(LookupStore(CacheLayout(root=root)).candidates(FACTS)) == (to.hash,), call
        action()
        assert read_whole(root, to) == "two", call
        assert tuple(LookupStore(CacheLayout(root=root)).candidates(FACTS)) == (to.hash,)
        assert [name for name in leftovers(root) if name.endswith(".next")] == [], call
    return found


def test_first_publish_killed_at_any_syscall_leaves_no_entry_or_a_complete_one(cache_root):
    found = _killed_at_calls(cache_root, lambda: publish(cache_root, "two"))
    assert set(found) == {None, "two"}
    assert len(found) > 30


def test_republish_killed_at_any_syscall_leaves_the_old_or_new_entry(cache_root):
    publish(cache_root, "one")
    found = _killed_at_calls(cache_root, lambda: publish(cache_root, "two"))
    assert set(found) == {"one", "two"}
    assert len(found) > 15


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_adding_a_row_killed_at_any_syscall_leaves_the_entry_readable(cache_root, stride):
    publish(cache_root, "two")
    found = _killed_at_calls(cache_root, lambda: add_sizes(cache_root, (8,)), stride=stride)
    assert set(found) == {"two"}
    assert len(found) * stride > 10


def test_changed_lookup_digest_finds_the_entry_after_a_kill_at_any_syscall(cache_root):
    name = publish(cache_root)
    start, layout, facts = cache_root.with_name("start"), CacheLayout(root=cache_root), "ef" * 32
    cache_root.rename(start)

    def action():
        to = writer(cache_root)
        to.publish(replace(manifest_of(to, (put_row(to),)), lookup=(facts,)), files_of("two"))

    found = []
    for _ in each_kill(start, cache_root, action):
        is_new = facts in read_entry(layout, name).manifest.lookup
        found.append((is_new, tuple(LookupStore(layout).candidates(facts)) == (name.hash,)))
    assert (True, False) not in found
    assert {(False, False), (True, True)} <= set(found)


def test_full_disk_is_reported_and_leaves_the_old_entry(small_disk):
    name = publish(small_disk)
    to = writer(small_disk)
    with pytest.raises(CacheError, match=r"disk is full, 1000000 bytes were needed and \d+ bytes are free"):
        put_row(to, data=bytes(1_000_000))
    assert read_whole(small_disk, name) == "one"
    assert leftovers(small_disk) == []
    publish(small_disk, "two")
    assert read_whole(small_disk, name) == "two"


def test_disk_that_fills_during_a_publish_leaves_the_old_or_new_entry(small_disk):
    name = publish(small_disk)
    ballast = small_disk / "ballast"
    outcomes = set()
    for free_pages in range(24):
        publish(small_disk, "one")
        free = shutil.disk_usage(small_disk).free
        ballast.write_bytes(bytes(free - 4096 * free_pages))
        try:
            publish(small_disk, "two")
        except CacheError as error:
            assert "full" in str(error)  # noqa: PT017 - either outcome is right, a traceback is not
            outcomes.add("full")
        else:
            outcomes.add("published")
            assert read_whole(small_disk, name) == "two"
        assert read_whole(small_disk, name) in {"one", "two"}
        ballast.unlink()
    assert outcomes == {"full", "published"}


def test_read_only_cache_is_readable_and_reports_write_errors(cache_root, read_only):
    name = publish(cache_root)
    read_only(cache_root)
    assert read_whole(cache_root, name) == "one"
    assert tuple(LookupStore(CacheLayout(root=cache_root)).candidates(FACTS)) == (name.hash,)
    with pytest.raises(CacheError, match=r"read-only file system.*--cache-dir"):
        publish(cache_root, "two")


def test_old_files_of_killed_writers_are_removed(cache_root):
    name = publish(cache_root)
    folder = CacheLayout(root=cache_root).rank_dir(name)
    old, fresh = folder / ".manifest.json.1.aa.tmp", folder / ".manifest.json.2.bb.tmp"
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    publish(cache_root, "two")
    assert leftovers(cache_root) == [fresh.name]


@pytest.fixture
def objects(tmp_path):
    return ObjectStore(tmp_path / "entry")


def test_equal_artifacts_share_one_file(objects):
    path = objects.path(objects.put(b"code", "pt2"), "pt2")
    inode = path.stat().st_ino
    objects.put(b"code", "pt2")
    assert path.stat().st_ino == inode
    assert len(list(objects.folder.iterdir())) == 1


@pytest.mark.parametrize("harm", [b"", b"cod", b"c0de", b"code "])
def test_corrupt_artifact_is_never_returned_and_is_replaced_by_put(objects, harm):
    digest = objects.put(b"code", "pt2")
    path = objects.path(digest, "pt2")
    path.chmod(0o600)
    path.write_bytes(harm)
    with pytest.raises(CacheCorruptError, match=path.name):
        objects.get(digest, "pt2")
    objects.put(b"code", "pt2")
    assert objects.get(digest, "pt2") == b"code"


@pytest.mark.parametrize(
    ("digest", "kind"), [("../x", "pt2"), ("ab" * 32, "../x"), ("ab" * 32, ""), ("ab" * 32, "a" * 41)]
)
def test_invalid_names_never_become_paths(objects, digest, kind):
    with pytest.raises(CacheError, match="is not a valid"):
        objects.path(digest, kind)


def test_link_from_shares_the_file(objects, tmp_path):
    source = tmp_path / "unit"
    source.write_bytes(b"code")
    objects.link_from(source, sha256_hex(b"code"), "pt2")
    objects.link_from(source, sha256_hex(b"code"), "pt2")
    assert objects.path(sha256_hex(b"code"), "pt2").samefile(source)
    assert len(list(objects.folder.iterdir())) == 1


def test_link_from_copies_the_bytes_if_links_do_not_work(objects, tmp_path, monkeypatch):
    source = tmp_path / "unit"
    source.write_bytes(b"code")

    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(entry_module.os, "link", refuse)
    objects.link_from(source, sha256_hex(b"code"), "pt2")
    assert objects.get(sha256_hex(b"code"), "pt2") == b"code"
    assert not objects.path(sha256_hex(b"code"), "pt2").samefile(source)


def test_link_from_refuses_a_source_with_other_bytes(objects, tmp_path):
    source = tmp_path / "unit"
    source.write_bytes(b"harm")
    with pytest.raises(CacheCorruptError, match="unit is corrupt"):
        objects.link_from(source, sha256_hex(b"code"), "pt2")
    assert not objects.folder.exists()


def test_artifact_with_unknown_status_is_an_error_and_not_absent(objects):
    artifact = Artifact.of(b"code", kind="pt2", compile_secs=1.0)
    path = objects.path(objects.put(b"code", "pt2"), "pt2")
    assert objects.has(artifact)
    path.unlink()
    assert not objects.has(artifact)
    path.symlink_to(path)
    with pytest.raises(CacheError, match=path.name):
        objects.has(artifact)


def test_artifacts_are_read_together_and_a_corrupt_one_is_reported(cache_root):
    name = publish(cache_root)
    layout = CacheLayout(root=cache_root)
    add_sizes(cache_root, (2, 3, 4))
    found = read_entry(layout, name)
    artifacts = [row.artifact for row in found.manifest.rows]
    read = found.artifacts(artifacts)
    assert {digest: sha256_hex(data) for digest, data in read.items()} == {one.digest: one.digest for one in artifacts}
    path = found.objects.path(artifacts[-1].digest, artifacts[-1].kind)
    path.unlink()
    with pytest.raises(CacheCorruptError, match=path.name):
        found.artifacts(artifacts)
