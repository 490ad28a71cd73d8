"""Reading every file of an entry and matching it to what names it. Must not import torch; writes nothing.

    key.json         its own seal, and the hash of the entry's folder
    manifest.json    its own seal, and the names of its folders
    plan.json, …     the size and digest that the manifest gives, under either of their two names
    artifacts/       the digest in their own name; the size that each manifest gives; all that manifests name are there,
                     and were compiled from the piece and for the shape that its rows say
    signatures/      the digest in an index's own name, and signatures beside it
    units/           unit.json's own seal and folder; its artifact's size and digest
    lookup/          where the mark says that a manifest was taken in: a mark for each of its digests

A check may run while others write: what is found wrong is looked at once more before it is told.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from cgtool.errors import CacheError
from cgtool.plan.records import parse_plan
from cgtool.store.artifacts import UnmarkedError, misplaced
from cgtool.store.files import is_temporary
from cgtool.store.key import parse_key
from cgtool.store.layout import (
    ARTIFACTS,
    GENERATED,
    KEY_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    SIGNATURES,
    CacheLayout,
    RankName,
    is_prefix,
    parse_rank_folder,
)
from cgtool.store.lookup import LookupStore
from cgtool.store.records import Manifest, parse_manifest
from cgtool.toolkit.verify import findings as found
from cgtool.toolkit.verify.findings import EntryFindings, Note, Problem
from cgtool.toolkit.verify.hashing import Done, Hashed, Hasher, hashing
from cgtool.toolkit.verify.strays import next_name, orphan, stray, unfinished

_ARTIFACT = re.compile(r"([0-9a-f]{64})\.([a-z][a-z0-9_.]*)")
#: How often an entry that keeps changing is looked at again.
_ATTEMPTS = 4
#: How many entries are read ahead of the one that is waited for.
_AHEAD = 8

_Record = TypeVar("_Record")


def verify_entry(layout: CacheLayout, hash_: str, *, jobs: int | None = None) -> EntryFindings:
    """Read and match every file of one entry.

    Args:
        layout: Where the cache lies.
        hash_: The entry's hash.
        jobs: How many files are read at a time; None: as many as there are cores.

    Returns:
        What was found; an entry that is not there lacks its key.json.

    Raises:
        CacheError: `hash_` is no hash.
    """
    with hashing(jobs) as hasher:
        return _settled(layout, hash_, EntryCheck(layout, hash_, hasher).finish(), hasher)


def verify_entries(layout: CacheLayout, hashes: Iterable[str], hasher: Hasher) -> Iterator[EntryFindings]:
    """Yield what is found in each of several entries, in their order; those that vanish meanwhile are left out.

    Args:
        layout: Where the cache lies.
        hashes: Which entries.
        hasher: What reads their files.
    """
    begun: list[EntryCheck] = []
    for hash_ in hashes:
        begun.append(EntryCheck(layout, hash_, hasher))
        if len(begun) > _AHEAD:
            yield from _there(layout, begun.pop(0), hasher)
    for check in begun:
        yield from _there(layout, check, hasher)


def _there(layout: CacheLayout, check: EntryCheck, hasher: Hasher) -> Iterator[EntryFindings]:
    result = _settled(layout, check.hash, check.finish(), hasher)
    if not result.problems or layout.entry_dir(check.hash).exists():
        yield result


def _settled(layout: CacheLayout, hash_: str, first: EntryFindings, hasher: Hasher) -> EntryFindings:
    """Return what two looks one after the other agree on, for a writer or a pruner may be at work."""
    last = first
    for _ in range(_ATTEMPTS):
        if not last.problems:
            break
        folder = _inode(layout.entry_dir(hash_))
        again = EntryCheck(layout, hash_, hasher, fresh=True).finish()
        if again.problems == last.problems and folder == _inode(layout.entry_dir(hash_)):
            break
        last = again
    return last


def _inode(folder: Path) -> int | None:
    """What tells a folder from one that was put in its place meanwhile; None where there is none."""
    try:
        return os.stat(folder).st_ino  # noqa: PTH116 - beside the calls of os around it
    except OSError:
        return None


class EntryCheck:
    """One look at one entry: making it begins to read, `finish` waits for what was read.

    Args:
        layout: Where the cache lies.
        hash_: The entry's hash.
        hasher: What reads its files.
        fresh: Read also what `hasher` has read before.
    """

    def __init__(self, layout: CacheLayout, hash_: str, hasher: Hasher, *, fresh: bool = False) -> None:
        self.hash = hash_
        self._layout = layout
        self._folder = layout.entry_dir(hash_)
        self._hasher = hasher
        self._fresh = fresh
        self._problems: list[Problem] = []
        self._notes: list[Note] = []
        self._manifests: list[Manifest] = []
        self._rank_files: list[tuple[RankName, str, Manifest, Future[Hashed] | Done]] = []
        self._artifacts: dict[str, Future[Hashed] | Done] = {}
        self._num_records = 0
        self._record_bytes = 0
        path = layout.key_file(hash_)
        self._key = self._record(path, lambda data: parse_key(data, path=path, hash_=hash_))
        self._begin()

    def _begin(self) -> None:
        try:
            names = list(self._layout.rank_names(self.hash))
        except CacheError as error:
            self._problems.append(found.of_error(self._folder, error))
            names = []
        for name in names:
            self._rank(name)
        there = _names(self._folder)
        begun = ARTIFACTS in there or (not there and self._folder.is_dir())
        if self._key is None and KEY_FILE not in there and (self._manifests or not begun):
            self._problems.append(found.missing(self._layout.key_file(self.hash), "every entry"))
        elif not self._manifests and not self._problems:
            self._notes.append(unfinished(self._folder))
        self._begin_artifacts()
        if os.path.lexists(self._folder / SIGNATURES):
            from cgtool.toolkit.verify.signed import check_signatures  # what few entries have

            problems, notes = check_signatures(self._folder / SIGNATURES)
            self._problems += problems
            self._notes += notes
        self._strangers()

    def _rank(self, name: RankName) -> None:
        path = self._layout.manifest_file(name)
        manifest = self._record(path, lambda data: parse_manifest(data, path=path, name=name))
        folder = self._layout.rank_dir(name)
        listed = _names(folder)
        if manifest is None:
            if MANIFEST_FILE not in listed and PLAN_FILE in listed:
                self._problems.append(found.missing(path, f"a {PLAN_FILE} beside it"))
            self._notes += [note for at in listed if is_temporary(at) and (note := stray(folder / at)) is not None]
            return
        self._manifests.append(manifest)
        for file, record in manifest.files.items():
            self._rank_files.append((name, file, manifest, self._read(f"{folder}/{file}", record.size_bytes)))
        if PLAN_FILE not in manifest.files:
            self._problems.append(found.missing(folder / PLAN_FILE, "every entry"))
        named = {next_name(file, record.sha256) for file, record in manifest.files.items()}
        others = listed - named - {MANIFEST_FILE, GENERATED, *manifest.files}
        self._notes += [note for at in sorted(others) if (note := stray(folder / at)) is not None]

    def _begin_artifacts(self) -> None:
        folder = self._folder / ARTIFACTS
        sizes = {row.artifact.file: row.artifact.size_bytes for one in self._manifests for row in one.rows}
        try:
            with os.scandir(folder) as listing:
                # in the order in which a file system that has one laid them down
                there = [entry.name for entry in sorted(listing, key=lambda entry: entry.inode())]
        except FileNotFoundError:
            there = []
        except OSError as error:
            self._problems.append(found.of_error(folder, CacheError(f"{folder} could not be listed: {error}.")))
            there = []
        for name in there:
            if _ARTIFACT.fullmatch(name):
                self._artifacts[name] = self._read(f"{folder}/{name}", sizes.get(name))
            elif (note := stray(folder / name)) is not None:
                self._notes.append(note)

    def _strangers(self) -> None:
        for name in sorted(_names(self._folder)):
            path = self._folder / name
            if parse_rank_folder(name) is not None:
                strangers = [path / child for child in sorted(_names(path)) if not is_prefix(child)]
            else:
                strangers = [] if name in (KEY_FILE, ARTIFACTS, SIGNATURES) else [path]
            self._notes += [note for at in strangers if (note := stray(at)) is not None]

    def finish(self) -> EntryFindings:
        """Wait for what was begun, and return what was found."""
        done = [future.result() for *_, future in self._rank_files] + [f.result() for f in self._artifacts.values()]
        for name, file, manifest, future in self._rank_files:
            self._problems += self._of_rank_file(name, file, manifest, future.result())
        self._problems += self._of_artifacts()
        self._problems += self._misplaced()
        lost = {mark for manifest in self._manifests for mark in LookupStore(self._layout).lost(manifest)}
        self._problems += map(found.lost_mark, lost)
        return EntryFindings(
            hash=self.hash,
            key=self._key,
            manifests=tuple(self._manifests),
            problems=tuple(sorted(self._problems, key=lambda problem: (str(problem.path), problem.kind))),
            notes=tuple(sorted(self._notes, key=lambda note: str(note.path))),
            num_files=self._num_records + len(done),
            size_bytes=self._record_bytes + sum(hashed.size_bytes for hashed in done),
        )

    def _of_rank_file(self, name: RankName, file: str, manifest: Manifest, hashed: Hashed) -> list[Problem]:
        record = manifest.files[file]
        path = self._layout.rank_dir(name) / file
        problems = matched(path, hashed, digest=record.sha256, size=record.size_bytes, who="the manifest")
        if not problems:
            return []
        # It may be in the midst of being published, under its other name.
        other = path.with_name(next_name(file, record.sha256))
        hashed = self._read(str(other), record.size_bytes).result()
        return problems if matched(other, hashed, digest=record.sha256, size=record.size_bytes, who="") else []

    def _of_artifacts(self) -> list[Problem]:
        problems: list[Problem] = []
        named: dict[str, set[int]] = {}
        for row in (row for manifest in self._manifests for row in manifest.rows):
            named.setdefault(row.artifact.file, set()).add(row.artifact.size_bytes)
        for name in sorted(named.keys() | self._artifacts.keys()):
            hashed = self._artifacts[name].result() if name in self._artifacts else Hashed(is_missing=True)
            sizes = named.get(name, {hashed.size_bytes})
            if hashed.digest == name[:64] and sizes == {hashed.size_bytes} and name in named:
                continue  # as nearly all are
            path = self._folder / ARTIFACTS / name
            wrong = [
                problem
                for size in sorted(sizes)
                for problem in matched(path, hashed, digest=name[:64], size=size, who="a manifest")
            ]
            problems += wrong[:1]
            if name not in named and not wrong and self._is_complete:
                self._notes.append(orphan(path))
        return problems

    def _misplaced(self) -> list[Problem]:
        """Return the artifacts that say that they are another piece's; one that says nothing is for load to refuse."""
        problems: dict[Path, Problem] = {}
        folder = self._folder / ARTIFACTS
        for name, file, manifest, future in self._rank_files:
            if file != PLAN_FILE or future.result().digest != manifest.files[file].sha256:
                continue  # it is among the problems, or was published just now
            path = self._layout.rank_dir(name) / file
            try:
                plan = parse_plan(path.read_bytes(), path=path)
            except (OSError, CacheError):
                continue
            for row, error in misplaced(manifest, plan, folder):
                if not isinstance(error, UnmarkedError):
                    at = folder / row.artifact.file
                    problems[at] = found.misplaced(at, str(error))
        return list(problems.values())

    @property
    def _is_complete(self) -> bool:
        """Whether all manifests could be read: only then is it known what none of them names."""
        return bool(self._manifests) and not any(problem.path.name == MANIFEST_FILE for problem in self._problems)

    def _read(self, path: str, limit: int | None) -> Future[Hashed] | Done:
        return self._hasher.submit(path, limit=limit, fresh=self._fresh)

    def _record(self, path: Path, parse: Callable[[bytes], _Record]) -> _Record | None:
        record, problem, size = found.read_record(path, parse)
        self._num_records += record is not None or problem is not None
        self._record_bytes += size
        self._problems += [] if problem is None else [problem]
        return record


def matched(path: Path, hashed: Hashed, *, digest: str, size: int | None, who: str) -> list[Problem]:
    """Return what is wrong with a file that was read: nothing or one problem.

    Args:
        path: The file.
        hashed: What reading it gave.
        digest: What its digest must be.
        size: How many bytes it must have; None where nothing says so.
        who: What names it: "the manifest".
    """
    if hashed.is_missing:
        return [found.missing(path, who)]
    if not hashed.is_file:
        return [found.no_file(path)]
    if hashed.error is not None:
        return [found.of_error(path, hashed.error)]
    if size is not None and hashed.size_bytes != size:
        actual = hashed.size_bytes if hashed.size_bytes < size else max(size + 1, _size(path))
        return [found.wrong_size(path, expected=size, actual=actual)]
    return [found.wrong_digest(path, expected=digest, actual=hashed.digest)] if hashed.digest != digest else []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))  # noqa: PTH208 - names are all that is wanted
    except OSError:
        return set()
