"""Every file of an entry is checked: each problem is named, and nothing else."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_samples import FACTS, no_flock, publish, publish_times, resealed, sample_key, writer
from verify_samples import HASH, NATIVE, entry_files, flips, lay

from cgtool.errors import CacheError
from cgtool.plan.grammar import sha256_hex
from cgtool.store.entry import read_entry
from cgtool.store.key import read_key
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.lookup import LookupStore
from cgtool.store.pruned import put_aside
from cgtool.toolkit.verify.checks import check_entries, check_entry, check_units
from cgtool.toolkit.verify.hashing import Hashed, Hasher

RANK = RankName(hash=HASH, rank=0, prefix="backbone")


def kinds(layout: CacheLayout) -> list[tuple[str, str]]:
    return [(problem.kind, Path(problem.path).name) for problem in check_entry(layout, HASH).problems]


def notes(layout: CacheLayout) -> list[tuple[str, str]]:
    return [(note.kind, Path(note.path).name) for note in check_entry(layout, HASH).notes]


def opened(layout: CacheLayout) -> list[bytes]:
    """What a load of rank 0 would run: its plan and its artifacts; empty for a miss."""
    if read_key(layout, HASH) is None:
        return []
    entry = read_entry(layout, RANK)
    return (
        [] if entry is None else [*entry.files.values(), *(entry.artifact(row.artifact) for row in entry.manifest.rows)]
    )


def test_an_intact_entry_has_no_problem_and_every_file_is_read(cache_root: Path) -> None:
    layout = lay(cache_root)
    found = check_entry(layout, HASH)
    assert found.problems == []
    assert found.notes == []
    assert found.files == len(entry_files(layout)) == 1 + 2 * 4 + 4
    assert found.size_bytes == sum(path.stat().st_size for path in entry_files(layout))
    assert found.key == sample_key()
    assert [manifest.rank for manifest in found.manifests] == [0, 1]


def check_flips(layout: CacheLayout, count: int, seed: int) -> None:
    files = entry_files(layout)
    intact = opened(layout)
    for flip in flips(files, count, seed=seed):
        flip.do()
        named = {layout.root / problem.path for problem in check_entry(layout, HASH).problems}
        try:
            run = opened(layout)
        except CacheError:
            run = []
        flip.do()
        assert named == {flip.path}, flip
        assert run in ([], intact), flip


def test_any_flipped_bit_is_named_and_never_opened(cache_root: Path) -> None:
    check_flips(lay(cache_root), 200, seed=20)


@pytest.mark.slow
def test_any_of_10000_flipped_bits_is_named_and_never_opened(cache_root: Path) -> None:
    check_flips(lay(cache_root), 10_000, seed=21)


def test_a_missing_lookup_marker_is_named_once(cache_root: Path) -> None:
    layout = lay(cache_root)
    assert HASH in LookupStore(layout).candidates(FACTS)
    (layout.lookup_dir / FACTS / HASH).unlink()
    assert tuple(LookupStore(layout).candidates(FACTS)) == ()
    assert kinds(layout) == [("lookup", HASH)]  # although both ranks have it
    (problem,) = check_entry(layout, HASH).problems
    assert layout.root / problem.path == layout.lookup_dir / FACTS / HASH
    assert problem.sentence.startswith(
        f"{layout.root / problem.path} is missing: load does not find the entry without it."
    )


def test_an_entry_that_the_next_load_indexes_has_no_problem(cache_root: Path) -> None:
    layout = lay(cache_root)
    shutil.rmtree(layout.lookup_dir)  # as in a copy of only the entry
    assert kinds(layout) == []
    assert tuple(LookupStore(layout).candidates(FACTS)) == (HASH,)


def break_artifact(layout: CacheLayout, change: Callable[[Path], None]) -> str:
    path = layout.entry_dir(HASH) / "artifacts" / f"{sha256_hex(NATIVE)}.eager"
    change(path)
    return path.name


def replaced(data: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        path.write_bytes(data)

    return change


def as_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # a socket's path must be short
        server.bind(path.name)


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(target: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return change


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        pytest.param(Path.unlink, "missing", id="gone"),
        pytest.param(replaced(NATIVE[:-1]), "size", id="shorter"),
        pytest.param(replaced(NATIVE + b"x"), "size", id="longer"),
        pytest.param(replaced(NATIVE[::-1]), "digest", id="other bytes"),
        pytest.param(as_fifo, "not_a_file", id="fifo"),
        pytest.param(as_folder, "not_a_file", id="folder"),
        pytest.param(as_link("/dev/zero"), "not_a_file", id="device"),
        pytest.param(as_link("/nowhere"), "missing", id="dangling"),
        pytest.param(as_link("/proc/self/mem"), "unreadable", id="EIO"),
    ],
)
def test_a_damaged_artifact_is_named(cache_root: Path, change: Callable[[Path], None], kind: str) -> None:
    layout = lay(cache_root)
    name = break_artifact(layout, change)
    assert kinds(layout) == [(kind, name)]


def test_a_socket_in_place_of_an_artifact_is_named(cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache_root.parent)
    layout = lay(cache_root)
    name = break_artifact(layout, as_socket)
    assert kinds(layout) == [("unreadable", name)]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("at", ["artifact", "key.json", "artifacts", "rank_0"])
def test_a_file_that_the_user_may_not_read_is_named(cache_root: Path, at: str) -> None:
    layout = lay(cache_root)
    folder = layout.entry_dir(HASH)
    path = folder / "artifacts" / f"{sha256_hex(NATIVE)}.eager" if at == "artifact" else folder / at
    path.chmod(0)
    for above in (*cache_root.parents, cache_root):
        if not above.stat().st_mode & 0o001:
            above.chmod(0o755)
    os.seteuid(65534)
    try:
        problems = check_entry(layout, HASH).problems
    finally:
        os.seteuid(0)
    assert problems
    named = layout.root / problems[0].path
    assert named.is_relative_to(path) or path.is_relative_to(named)
    assert problems[0].kind in ("unreadable", "missing")
    assert "ermission denied" in " ".join(problem.sentence for problem in problems)


def test_a_read_only_cache_is_checked_without_a_lock_or_a_stamp(
    cache_root: Path, read_only: Callable[[Path], Path]
) -> None:
    layout = lay(cache_root)
    read_only(cache_root)
    with no_flock():
        assert check_entry(layout, HASH).problems == []
        assert check_units(layout, Hasher()).problems == []


def test_an_endless_file_is_read_only_to_its_expected_size(cache_root: Path) -> None:
    layout = lay(cache_root)
    path = layout.rank_dir(RANK) / "plan.json"
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    (problem,) = check_entry(layout, HASH).problems
    assert problem.kind == "size"
    assert f"has {1 << 40} bytes instead of" in problem.sentence


@pytest.mark.parametrize("record", ["key.json", "manifest.json"])
def test_a_fifo_in_place_of_a_record_does_not_block(cache_root: Path, record: str) -> None:
    layout = lay(cache_root)
    as_fifo(layout.key_file(HASH) if record == "key.json" else layout.manifest_file(RANK))
    assert kinds(layout)[0] == ("not_a_file", record)


def test_a_missing_record_is_named(cache_root: Path) -> None:
    layout = lay(cache_root)
    layout.key_file(HASH).unlink()
    layout.manifest_file(RANK).unlink()
    assert kinds(layout) == [("missing", "key.json"), ("missing", "manifest.json")]


def test_a_record_of_a_newer_cgtool_is_a_schema_problem(cache_root: Path) -> None:
    layout = lay(cache_root)
    manifest = layout.manifest_file(RANK)
    manifest.write_bytes(resealed(manifest.read_bytes(), {"record": "manifest-99"}))
    assert kinds(layout) == [("schema", "manifest.json")]


def test_unreferenced_files_are_notes(cache_root: Path) -> None:
    layout = lay(cache_root)
    gone = 4_194_304 + 1  # above Linux's largest process id
    folder = layout.entry_dir(HASH)
    data = b"unreferenced"
    orphan = folder / "artifacts" / f"{sha256_hex(data)}.eager"
    orphan.write_bytes(data)
    (folder / "artifacts" / f".{orphan.name}.{gone}.abcdef.tmp").touch()
    (folder / "artifacts" / f".{orphan.name}.{os.getpid()}.abcdef.tmp").touch()
    (layout.rank_dir(RANK) / f".plan.json.{'0' * 64}.next").touch()
    (folder / "README").touch()
    assert check_entry(layout, HASH).problems == []
    assert sorted(kind for kind, _ in notes(layout)) == ["foreign", "orphan", "temporary", "temporary"]


def test_a_corrupt_orphan_is_a_problem(cache_root: Path) -> None:
    layout = lay(cache_root)
    name = f"{'0' * 64}.eager"
    (layout.entry_dir(HASH) / "artifacts" / name).write_bytes(b"other")
    assert kinds(layout) == [("digest", name)]


def test_artifacts_of_a_torn_manifest_are_not_orphans(cache_root: Path) -> None:
    layout = lay(cache_root)
    layout.manifest_file(RANK).write_bytes(b"{")
    assert kinds(layout) == [("corrupt", "manifest.json")]
    assert notes(layout) == []


def test_a_file_being_published_is_found_under_its_temporary_name(cache_root: Path) -> None:
    layout = lay(cache_root)
    plan = layout.rank_dir(RANK) / "plan.json"
    plan.rename(plan.with_name(f".plan.json.{sha256_hex(plan.read_bytes())}.next"))
    found = check_entry(layout, HASH)
    assert found.problems == []
    assert found.notes == []


def test_an_entry_of_a_killed_warm_is_unfinished_and_no_problem(cache_root: Path) -> None:
    to = writer(cache_root)
    to.objects.put(b"first artifact", "eager")
    assert kinds(CacheLayout(root=cache_root)) == []
    assert notes(CacheLayout(root=cache_root)) == [("unfinished", HASH)]


def test_the_key_of_a_nonexistent_entry_is_missing(cache_root: Path) -> None:
    assert kinds(CacheLayout(root=cache_root)) == [("missing", "key.json")]


def test_an_intact_unit_is_read_only_once_with_its_entry(cache_root: Path) -> None:
    layout = lay(cache_root)
    hasher = Hasher()
    list(check_entries(layout, layout.hashes(), hasher))
    before = len(hasher._shared)
    found = check_units(layout, hasher)
    assert len(hasher._shared) == before
    assert (found.problems, found.notes, found.files) == ([], [], 2)


def test_any_flipped_bit_in_a_unit_is_named(cache_root: Path) -> None:
    layout = lay(cache_root)
    files = [path for path in layout.units_dir.rglob("*") if path.is_file() and path.name != "lock"]
    for flip in flips(files, 60, seed=22):
        flip.do()
        named = {layout.root / problem.path for problem in check_units(layout, Hasher()).problems}
        flip.do()
        assert named == {flip.path}, flip


def test_leftovers_among_units_are_noted(cache_root: Path) -> None:
    layout = lay(cache_root)
    record = next(layout.units_dir.rglob("unit.json"))
    (record.parent / f"{'0' * 64}.eager").touch()
    half = layout.unit_dir("cd" * 32)
    half.mkdir(parents=True)
    (half / f"{'1' * 64}.eager").touch()
    (layout.units_dir / "ab" / "strange").touch()
    found = check_units(layout, Hasher())
    assert found.problems == []
    assert sorted((note.kind, Path(note.path).name) for note in found.notes) == [
        ("foreign", "strange"),
        ("orphan", f"{'0' * 64}.eager"),
        ("unfinished", "cd" * 32),
    ]


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        pytest.param(lambda root, name: publish(root, "two"), ["two"], id="published again"),
        pytest.param(lambda root, name: shutil.rmtree(CacheLayout(root=root).entry_dir(name.hash)), [], id="pruned"),
    ],
)
def test_an_entry_that_changes_while_it_is_read_is_checked_again(
    cache_root: Path, change: Callable[[Path, RankName], object], seen: list[str]
) -> None:
    layout = CacheLayout(root=cache_root)
    name = publish(cache_root, "one")
    changes = [change]

    class Late(Hasher):
        """Changes the entry after its records have been read and before its files are."""

        def read(self, path: str, **options: Any) -> Hashed:
            while changes:
                changes.pop()(cache_root, name)
            return super().read(path, **options)

    found = list(check_entries(layout, [name.hash], Late()))
    assert [manifest.model for findings in found for manifest in findings.manifests] == seen
    assert [findings.problems for findings in found] == [[]] * len(seen)


def test_a_check_concurrent_with_a_writer_and_a_prune_finds_nothing_wrong(cache_root: Path, tmp_path: Path) -> None:
    layout = CacheLayout(root=cache_root)
    started = tmp_path / "started"
    process = multiprocessing.get_context("fork").Process(target=_churn, args=(cache_root, started))
    process.start()
    try:
        while not started.exists():
            pass
        for _ in range(60):
            for found in check_entries(layout, layout.hashes(), Hasher()):
                assert found.problems == [], found
    finally:
        process.kill()
        process.join()


def _churn(root: Path, started: Path) -> None:
    while True:
        publish_times(root, ("one", "two"), 1)
        layout = CacheLayout(root=root)
        # as prune does it: first one rename, then the deletion
        aside = put_aside(layout, str(layout.entry_dir(publish(root, "gone", level=1).hash)))
        if aside is not None:
            shutil.rmtree(aside)
        started.touch()


def sign(layout: CacheLayout) -> tuple[Path, str]:
    """Add the signature files of a signed import to the entry; return their folder and stem."""
    folder = layout.entry_dir(HASH) / "signatures"
    folder.mkdir()
    stem = sha256_hex(b"an index")
    (folder / f"{stem}.json").write_bytes(b"an index")
    row = {"key": "0" * 64, "signature": "A" * 86 + "=="}
    (folder / f"{stem}.sig").write_text(json.dumps({"schema": 1, "signatures": [row]}))
    return folder, stem


@pytest.mark.parametrize(
    ("end", "harm", "kind"),
    [
        (".json", "change", "digest"),
        (".sig", "change", "corrupt"),
        (".json", "remove", "missing"),
        (".sig", "remove", "missing"),
        (".json", "pipe", "not_a_file"),
        (".sig", "pipe", "not_a_file"),
    ],
)
def test_the_signatures_of_an_entry_are_checked(cache_root: Path, end: str, harm: str, kind: str) -> None:
    layout = lay(cache_root)
    folder, stem = sign(layout)
    assert check_entry(layout, HASH).problems == []
    path = folder / f"{stem}{end}"
    if harm == "change":
        path.write_bytes(path.read_bytes() + b"}")
    else:
        path.unlink()
    if harm == "pipe":
        os.mkfifo(path)
    (problem,) = check_entry(layout, HASH).problems
    assert (layout.root / problem.path, problem.kind) == (path, kind)
    assert problem.sentence.endswith("import the signed bundle again.")


def test_a_foreign_file_among_signatures_is_a_note(cache_root: Path) -> None:
    layout = lay(cache_root)
    folder, _ = sign(layout)
    (folder / "readme.txt").touch()
    found = check_entry(layout, HASH)
    assert [(note.kind, layout.root / note.path) for note in found.notes] == [("foreign", folder / "readme.txt")]
    assert found.problems == []
