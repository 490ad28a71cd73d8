"""A read-only cache under a writable overlay layer, like a container image with a prewarmed cache.

Uses Docker's overlay options: folders of the lower layer cannot be renamed (EXDEV), the first write to a file breaks
its hard links, and locks taken before that stay on the lower file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cache_maker import lay_entry, tree
from cache_samples import publish, put_row, read_whole, text_of, writer
from prune_samples import is_whole, lay, units_in

from cgtool.errors import CacheError
from cgtool.plan.shapes import shape_text
from cgtool.store.entry import read_entry
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.leases import LeaseTable, hold
from cgtool.store.lookup import StateStore
from cgtool.toolkit.bundle.choose import Choice
from cgtool.toolkit.bundle.export import export
from cgtool.toolkit.bundle.import_ import import_bundle
from cgtool.toolkit.inspect.cache import inspect_cache
from cgtool.toolkit.prune.plan import Outcome, Rules
from cgtool.toolkit.prune.planner import make_plan
from cgtool.toolkit.verify.run import verify

OPTIONS = "redirect_dir=off,index=off,metacopy=off,xino=off"


@pytest.fixture
def layered(small_disk: Path, read_only: Callable[[Path], Path], tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Return a function that makes a folder the lower layer and returns a new writable view of it."""
    merged, upper, work, below = tmp_path / "merged", small_disk / "upper", small_disk / "work", []
    merged.mkdir()

    def unmount() -> None:
        subprocess.run(["umount", "--lazy", merged], check=True)
        for folder in (upper, work):
            shutil.rmtree(folder)

    def make(lower: Path) -> Path:
        if below:
            unmount()
        else:
            below.append(read_only(lower))
        for folder in (upper, work):
            folder.mkdir()
        layers = f"lowerdir={lower},upperdir={upper},workdir={work},{OPTIONS}"
        command = ["mount", "-t", "overlay", "overlay", "-o", layers, str(merged)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            below.clear()
            pytest.skip(f"no overlay file system can be mounted here: {done.stderr.strip()}")
        return merged

    yield make
    if below:
        unmount()


def prune(root: Path, **rules: object) -> Outcome:
    outcome = make_plan(CacheLayout(root=root), Rules(**rules)).execute()
    assert (outcome.failed, outcome.kept) == ((), ())
    return outcome


def check_clean(root: Path) -> None:
    """Nothing of the cache is broken or missing."""
    report = verify(cache_dir=root)
    assert [entry.problems for entry in report.entries] == [()] * len(report.entries)
    assert report.units is not None
    assert report.units.problems == ()


def in_use(layout, name):
    return LeaseTable(layout).is_used(name.hash)


def test_entry_of_the_lower_layer_is_read_and_its_hits_are_counted(layered, tmp_path):
    name = publish(tmp_path / "lower", "one")
    root = layered(tmp_path / "lower")
    assert read_whole(root, name) == "one"
    assert StateStore(CacheLayout(root=root)).usage(name).hits == 0
    StateStore(CacheLayout(root=root)).record_hit(name)
    assert StateStore(CacheLayout(root=root)).usage(name).hits == 1
    check_clean(root)


def test_entries_of_the_lower_layer_can_be_replaced_and_extended(layered, tmp_path):
    name = publish(tmp_path / "lower", "one")
    root = layered(tmp_path / "lower")
    before = tree(tmp_path / "lower")
    publish(root, "two")
    assert read_whole(root, name) == "two"
    to = writer(root)
    to.add_rows([put_row(to, shape="num_tokens=8", data=b"eight")])
    entry = read_entry(CacheLayout(root=root), name, files=("plan.json", "computation_graph.py", "transformed_code.py"))
    assert text_of(entry) == "two"
    assert {shape_text(row.shape) for row in entry.manifest.rows} == {"general", "num_tokens=8"}
    other = publish(root, "other", level=2)
    assert (read_whole(root, other), read_whole(root, name)) == ("other", "two")
    assert tree(tmp_path / "lower") == before
    to.publish(entry.manifest, entry.files)
    prune(root)  # the artifact that nothing names any more
    check_clean(root)


def test_new_entries_share_files_of_the_lower_layer(layered, tmp_path):
    lay(tmp_path / "lower", 1, pieces=("own", "both"))
    root = layered(tmp_path / "lower")
    name = lay(root, 2, pieces=("own", "both"))
    assert len(units_in(root)) == 3
    assert is_whole(root, name)
    report = inspect_cache(root)
    assert len(report.shown) == 2
    check_clean(root)


def test_prune_reports_why_an_entry_of_the_lower_layer_is_not_removed(layered, tmp_path):
    name = lay(tmp_path / "lower", 1, pieces=("own",))
    root = layered(tmp_path / "lower")
    outcome = make_plan(CacheLayout(root=root), Rules(entries=(name.hash,))).execute()
    assert ["lower layer" in failed.sentence for failed in outcome.failed] == [True]
    assert is_whole(root, name)
    check_clean(root)


def test_bundle_is_imported_beside_and_merged_into_the_lower_layer(layered, tmp_path):
    lower, source = tmp_path / "lower", tmp_path / "source"
    same = lay_entry(lower, shapes=("general", "n=8"))
    lay_entry(lower, seed=1)
    lay_entry(source, shapes=("general", "n=16"))
    new = lay_entry(source, seed=2)
    export(dest=tmp_path / "bundle", cache_dir=source)
    root = layered(lower)
    report = import_bundle(source=tmp_path / "bundle", cache_dir=root, trust=True, any_machine=True)
    assert {item.hash: item.outcome for item in report.entries} == {same: "merged", new: "new"}
    rows = read_entry(CacheLayout(root=root), RankName(hash=same, rank=0, prefix="backbone")).manifest.rows
    assert {shape_text(row.shape) for row in rows} == {"general", "n=8", "n=16"}
    check_clean(root)
    prune(root, entries=(new,))
    report = import_bundle(source=tmp_path / "bundle", cache_dir=root, trust=True, any_machine=True)
    assert {item.hash: item.outcome for item in report.entries} == {same: "same", new: "new"}
    check_clean(root)


def test_corruption_in_the_lower_layer_is_found_and_repaired(layered, tmp_path):
    lower = tmp_path / "lower"
    name = lay(lower, 1)
    (artifact,) = CacheLayout(root=lower).entry_dir(name.hash).glob("artifacts/*")
    data = artifact.read_bytes()
    artifact.unlink()  # the unit, which has the same bytes, stays
    artifact.write_bytes(b"x" + data[1:])
    root = layered(lower)
    report = verify(cache_dir=root)
    assert [Path(problem.path).name for problem in report.entries[0].problems] == [artifact.name]
    verify(cache_dir=root, repair=True)
    assert is_whole(root, name)
    check_clean(root)


HOLDS = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_SH)
print("held", flush=True)
time.sleep(600)
"""


def held_by_a_child(path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLDS, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    return child


def test_lease_on_a_lower_file_holds_after_the_file_is_copied_up(layered, tmp_path):
    name = lay(tmp_path / "lower", 1)
    hold(CacheLayout(root=tmp_path / "lower"), name).release()
    root = layered(tmp_path / "lower")
    layout = CacheLayout(root=root)
    lease = layout.state_dir / "leases" / name.flat
    child = held_by_a_child(lease)  # as who may only read it does
    try:
        assert in_use(layout, name)
        hold(layout, name).release()
        assert in_use(layout, name)
        assert [kept.why for kept in make_plan(layout, Rules(entries=(name.hash,))).kept] == ["in_use"]
    finally:
        child.kill()
        child.communicate()
    assert not in_use(layout, name)


def test_lease_on_a_lower_folder_holds_after_a_write_to_the_folder(layered, tmp_path):
    name = lay(tmp_path / "lower", 1)
    root = layered(tmp_path / "lower")
    layout = CacheLayout(root=root)
    child = held_by_a_child(layout.entry_dir(name.hash))  # as who may not write to `state` does
    try:
        assert in_use(layout, name)
        lay(root, 1, pieces=("own", "more"))
        assert in_use(layout, name)
        plan = make_plan(layout, Rules(entries=(name.hash,)))
        assert [kept.why for kept in plan.kept] == ["in_use"]
    finally:
        child.kill()
        child.communicate()
    assert not in_use(layout, name)


def test_another_cache_works_beside_a_read_only_one(read_only, tmp_path):
    name = publish(tmp_path / "lower", "one")
    exported = lay_entry(tmp_path / "lower")
    lower = read_only(tmp_path / "lower")
    layout = CacheLayout(root=lower)
    assert read_whole(lower, name) == "one"
    assert hold(layout, name) is not None
    hold(layout, name).release()
    check_clean(lower)
    with pytest.raises(CacheError, match="read-only file system"):
        publish(lower, "two")
    outcome = make_plan(layout, Rules(entries=(name.hash,))).execute()
    assert outcome.removed == ()
    assert "read-only file system" in outcome.failed[0].sentence
    export(dest=tmp_path / "layer", cache_dir=lower, choice=Choice(hashes=(exported,)), folder=True)
    import_bundle(source=tmp_path / "layer", cache_dir=tmp_path / "own", trust=True, any_machine=True)
    publish(tmp_path / "own", "two")
    assert CacheLayout(root=tmp_path / "own").hashes() == sorted([exported, name.hash])
    assert (read_whole(tmp_path / "own", name), read_whole(lower, name)) == ("two", "one")
    check_clean(tmp_path / "own")
