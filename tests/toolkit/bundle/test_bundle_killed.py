"""Export and import when killed at any system call that changes a file, and on full and read-only disks."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_maker import make_keys
from cache_maker import lay_entry, tree
from cache_samples import no_flock, view
from syscalls import Call, each_kill, killed_at

from cgtool.errors import CacheError
from cgtool.toolkit.bundle.choose import Choice
from cgtool.toolkit.bundle.export import export
from cgtool.toolkit.bundle.import_ import import_bundle

#: Files that a kill may leave in a cache.
LEFTOVER = re.compile(r"(^|/)\.[^/]+\.(tmp|next)(/|$)|^torch_compile_cache/(state|lookup)(/|$)|^CACHEDIR.TAG$")


@pytest.fixture
def bundle(tmp_path) -> bytes:
    lay_entry(tmp_path / "source", shapes=("general", "n=8"))
    lay_entry(tmp_path / "source", shapes=("general", "n=8"), rank=1)
    lay_entry(tmp_path / "source", seed=1)
    make_keys(tmp_path / "keys", "k")
    out = io.BytesIO()
    choice = Choice(everything=True)
    export(dest=out, cache_dir=tmp_path / "source", choice=choice, sign=(tmp_path / "keys/k.pem",))
    return out.getvalue()


def imported(bundle: bytes, root: Path) -> None:
    import_bundle(source=io.BytesIO(bundle), cache_dir=root, trust=True, any_machine=True)


def killed_everywhere(
    start: Path, work: Path, action: Callable[[Path], None], check: Callable[[Path], None], *, stride: int = 1
) -> int:
    """Run `action` on copies of a folder, killed at its system calls; return the number of kills."""
    count = 0
    for _ in each_kill(start, work, lambda: action(work), stride=stride):
        check(work)
        count += 1
    return count


@pytest.mark.parametrize("there", ["nothing", "other shapes", "the same"])
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_an_import_killed_at_any_call_leaves_each_entry_as_before_or_as_after(tmp_path, bundle, there, stride):
    start = tmp_path / "start"
    if there != "nothing":
        lay_entry(start, shapes=("general", "n=8") if there == "the same" else ("general", "n=16"))
        lay_entry(start, seed=5)
    before, after_root = view(start), tmp_path / "after"
    if start.exists():
        shutil.copytree(start, after_root)
    imported(bundle, after_root)
    after = view(after_root)
    assert after != before

    def check(root: Path) -> None:
        found = view(root)
        assert before.keys() <= found.keys()
        for name, seen in found.items():
            assert seen in (before.get(name), after.get(name))
        imported(bundle, root)  # recovers without cleanup
        assert view(root) == after

    count = killed_everywhere(start, tmp_path / "work", lambda root: imported(bundle, root), check, stride=stride)
    assert count * stride > 70


def test_an_import_removes_old_leftovers_of_a_killed_one(tmp_path, bundle):
    root = tmp_path / "cache"
    lay_entry(root, seed=7)
    assert killed_at(Call(name="rename", nth=1), lambda: imported(bundle, root))
    base = root / "torch_compile_cache"
    left = [path for path in base.iterdir() if path.name.startswith(".import.")]
    assert len(left) == 1
    imported(bundle, root)
    assert left[0].exists()  # recent: its owner may be about to lock it
    os.utime(left[0], (1, 1))
    imported(bundle, root)
    assert not left[0].exists()
    assert not [
        name
        for name in tree(root)
        if LEFTOVER.search(name) and "/state" not in name and "/lookup" not in name and name != "CACHEDIR.TAG"
    ]


def test_an_export_killed_at_any_call_leaves_the_old_file_or_the_new_one(tmp_path):
    lay_entry(tmp_path / "cache")
    start = tmp_path / "start"
    start.mkdir()
    (start / "out.tar.zst").write_text("old")
    new = io.BytesIO()
    export(dest=new, cache_dir=tmp_path / "cache")

    def check(folder: Path) -> None:
        assert (folder / "out.tar.zst").read_bytes() in (b"old", new.getvalue())

    def action(folder: Path) -> None:
        export(dest=folder / "out.tar.zst", cache_dir=tmp_path / "cache")

    assert killed_everywhere(start, tmp_path / "work", action, check) >= 3


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_an_export_killed_at_any_call_leaves_no_folder_or_a_whole_one(tmp_path, stride):
    lay_entry(tmp_path / "cache")
    start = tmp_path / "start"
    start.mkdir()
    export(dest=tmp_path / "whole", cache_dir=tmp_path / "cache", folder=True)

    def check(folder: Path) -> None:
        if (folder / "layer").exists():
            assert tree(folder / "layer") == tree(tmp_path / "whole")

    def action(folder: Path) -> None:
        export(dest=folder / "layer", cache_dir=tmp_path / "cache", folder=True)

    assert killed_everywhere(start, tmp_path / "work", action, check, stride=stride) * stride > 15


@pytest.mark.parametrize("free", [0, 20_000, None], ids=["full", "nearly full", "read-only"])
def test_a_full_or_read_only_disk_is_a_clear_error_and_changes_nothing(tmp_path, small_disk, read_only, free):
    lay_entry(tmp_path / "source", native_bytes=60_000, shapes=("general", "n=8", "n=16", "n=32"))
    bundle = tmp_path / "bundle.tar.zst"
    export(dest=bundle, cache_dir=tmp_path / "source")
    lay_entry(small_disk / "cache", seed=7)
    if free is None:
        read_only(small_disk)
    else:
        with pytest.raises(OSError, match="No space"):
            (small_disk / "ballast").write_bytes(bytes(10**6))
        os.truncate(small_disk / "ballast", (small_disk / "ballast").stat().st_size - free)
    before = tree(small_disk)
    reason = "it is on a read-only file system" if free is None else "the disk is full"
    with pytest.raises(CacheError, match=reason):
        imported(bundle.read_bytes(), small_disk / "cache")
    assert tree(small_disk) == before
    with pytest.raises(CacheError, match=reason):
        export(dest=small_disk / "layer", cache_dir=tmp_path / "source", folder=True)
    assert tree(small_disk) == before
    if not free:  # otherwise the compressed bundle fits
        with pytest.raises(CacheError, match=f"out.tar.zst could not be written: {reason}"):
            export(dest=small_disk / "out.tar.zst", cache_dir=tmp_path / "source")
        assert tree(small_disk) == before


def test_concurrent_imports_of_one_bundle_give_the_same_cache_as_one(tmp_path, bundle):
    root = tmp_path / "storm"
    lay_entry(root, shapes=("general", "n=16"))
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            try:
                imported(bundle, root)
            except BaseException:  # noqa: BLE001 - the child must not continue as a second parent
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    alone = tmp_path / "alone"
    lay_entry(alone, shapes=("general", "n=16"))
    imported(bundle, alone)
    assert view(root) == view(alone)
    assert not list((root / "torch_compile_cache").glob(".import.*"))


def test_an_import_works_where_locks_do_not(tmp_path, bundle):
    lay_entry(tmp_path / "cache", shapes=("general", "n=16"))
    with no_flock():
        imported(bundle, tmp_path / "cache")
    imported(bundle, tmp_path / "other")
    assert view(tmp_path / "other").keys() == view(tmp_path / "cache").keys()
