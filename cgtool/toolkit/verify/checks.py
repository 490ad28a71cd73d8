"""The checks of `verify` on every file of a cache. Writes nothing; must not import torch.

| place in the cache | check | repair (`cgtool.toolkit.verify.repair`) |
|---|---|---|
| key.json | its seal, and the hash in the folder name | sets the entry aside |
| manifest.json | its seal, and the folder names | sets the rank aside |
| plan.json, texts | size and digest in the manifest, also before the final rename | copies, rewrites, or sets aside |
| artifacts/ | the digest in the name, the size in manifests; all that manifests name exist | links, or compiles |
| | the piece and shape stored in the artifact match those of its rows | compiles |
| signatures/ | the digest in the index's name, and the signatures beside it | nothing |
| lookup/ | a marker for each digest of an indexed manifest | recreates the marker |
| units/ | the seal of unit.json, its key, and the digest and size of its artifact | copies, or removes the unit |

Other processes may write during a check, so problems are checked again before they are reported.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, TypeVar

from cgtool.errors import CacheCorruptError, CacheError, CacheSchemaError, RefusedError
from cgtool.plan.grammar import Record, sha256_hex
from cgtool.plan.records import parse_plan
from cgtool.store.artifacts import misplaced
from cgtool.store.bundle_index import MAX_SIGNATURE_BYTES, Limits
from cgtool.store.entry import NEXT
from cgtool.store.files import is_temporary, may_exist, names_in, read_bytes, writer_lives
from cgtool.store.layout import (
    ARTIFACTS,
    GENERATED,
    KEY_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    SIGNATURES,
    UNIT_FILE,
    CacheLayout,
    RankName,
    is_hash,
    is_prefix,
    parse_rank_folder,
)
from cgtool.store.lookup import LookupStore
from cgtool.store.records import Key, Manifest, parse_key
from cgtool.store.signatures import parse_signatures
from cgtool.store.units import parse_unit
from cgtool.store.walk import RankView, UnitView, view_entry, view_unit, walk_units
from cgtool.toolkit.coverage import Planned, planned
from cgtool.toolkit.verify.hashing import Hashed, Hasher

#: Findings that prevent a load, or would.
ProblemKind = Literal[
    "missing", "size", "digest", "corrupt", "schema", "unreadable", "not_a_file", "lookup", "misplaced"
]
#: Harmless findings: unreferenced files, and what a warm left behind.
NoteKind = Literal["orphan", "temporary", "foreign", "unfinished"]

_REPAIR = "Repair it with `cgtool verify --repair`, or warm the model again."
_HALF: tuple[ProblemKind, str] = ("missing", "is missing, but its counterpart exists")
_SIGN_AGAIN = "Remove both files of that name, and import the signed bundle again."
_ARTIFACT = re.compile(r"[0-9a-f]{64}\.[a-z][a-z0-9_.]*")
#: How often an entry that keeps changing is checked again.
_ATTEMPTS = 4

_Checked = TypeVar("_Checked", bound="_Check")
_Parsed = TypeVar("_Parsed")


class Finding(Record, frozen=True, kw_only=True):
    """A problem or a note about one file or folder, as `verify --json` prints it."""

    #: Relative to the cache's root.
    path: str
    #: Stable, for programs.
    kind: ProblemKind | NoteKind
    #: For people: what is wrong, with the whole path, and what to do; for a note, what the file is.
    sentence: str


@dataclass(kw_only=True)
class Findings:
    """The problems and notes of a check, sorted by path, and how many files and bytes it read."""

    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    files: int = 0
    size_bytes: int = 0


class _Check(Findings):
    """One check of an entry or a unit."""

    def __init__(self, layout: CacheLayout, name: str, folder: str, hasher: Hasher, *, fresh: bool) -> None:
        super().__init__()
        self.layout = layout
        self.name = name
        self.folder = folder
        self.hasher = hasher
        #: Whether the folder did not exist at the last check; it may exist again by now.
        self.is_gone = False
        self._fresh = fresh

    def again(self) -> Self:
        """Return a new check, which reads everything anew."""
        raise NotImplementedError

    def finding(self, path: str | Path, kind: ProblemKind | NoteKind, sentence: str) -> Finding:
        """Return a finding about a file, with its path made relative to the root where it lies below it."""
        text, root = str(path), f"{self.layout.root}/"
        return Finding(path=text.removeprefix(root), kind=kind, sentence=sentence)

    def _problem(self, path: str | Path, kind: ProblemKind, sentence: str) -> None:
        self.problems.append(self.finding(path, kind, sentence))

    def _note(self, path: str | Path, kind: NoteKind, sentence: str) -> None:
        self.notes.append(self.finding(path, kind, sentence))

    def _check_file(self, path: str, *, digest: str, sizes: Collection[int], who: str, other: str = "") -> bool:
        """Check a file against the digest and sizes that `who` names ("the manifest"), and add a problem if it differs.

        While it is being published it may exist under the name `other` instead.
        """
        hashed = self._read(path, sizes)
        self.files += hashed.failed != "missing"
        self.size_bytes += hashed.size_bytes
        problem = self._mismatch(path, hashed, digest, sizes, who)
        if problem is not None and not (other and self._read(other, sizes).digest == digest):
            self.problems.append(problem)
            return False
        return True

    def _read(self, path: str, sizes: Collection[int]) -> Hashed:
        return self.hasher.read(path, limit=max(sizes, default=None), fresh=self._fresh)

    def _mismatch(self, path: str, hashed: Hashed, digest: str, sizes: Collection[int], who: str) -> Finding | None:
        if hashed.failed == "missing":
            return self._missing(path, who)
        if hashed.failed is not None:
            return self._error_finding(path, hashed.failed)
        wrong = next((size for size in sorted(sizes) if size != hashed.size_bytes), None)
        if wrong is not None:
            status = _status(path)  # the hasher stops one byte past the expected size
            actual = hashed.size_bytes if hashed.size_bytes < wrong or status is None else status.st_size
            return self.finding(path, "size", f"{path} has {actual} bytes instead of {wrong}. {_REPAIR}")
        if hashed.digest != digest:
            sentence = f"{path} is corrupt: its digest is {hashed.digest} instead of {digest}. {_REPAIR}"
            return self.finding(path, "digest", sentence)
        return None

    def _missing(self, path: str | Path, who: str) -> Finding:
        return self.finding(path, "missing", f"{path} is missing, but {who} requires it. {_REPAIR}")

    def _error_finding(self, path: str | Path, error: CacheError | Literal["not_a_file"]) -> Finding:
        if error == "not_a_file":
            sentence = f"{path} is not a regular file. Remove it, then repair the entry with `cgtool verify --repair`."
            return self.finding(path, error, sentence)
        if isinstance(error, CacheCorruptError):
            return self.finding(path, "corrupt", str(error))
        return self.finding(path, "schema" if isinstance(error, CacheSchemaError) else "unreadable", str(error))

    def _add_record_error(self, path: str, error: CacheError) -> None:
        is_other = os.path.exists(path) and not os.path.isfile(path)  # noqa: PTH110, PTH113 - Path's raise
        self.problems.append(self._error_finding(path, "not_a_file" if is_other else error))
        self.files += 1

    def _record(self, path: str, parse: Callable[[bytes], _Parsed]) -> _Parsed | None:
        """Read a sealed record; None if it is missing, or invalid and added to the problems."""
        try:
            data = read_bytes(path)
            record = None if data is None else parse(data)
        except CacheError as error:
            self._add_record_error(path, error)
            return None
        self.files += data is not None
        self.size_bytes += len(data or b"")
        return record

    def _stray(self, path: str) -> None:
        """Note a file that nothing names, unless a live process is writing it."""
        name = path.rpartition("/")[2]
        if is_temporary(name):
            if not writer_lives(name):
                self._note(path, "temporary", f"{path} was left behind by a process that has ended.")
        elif re.fullmatch(NEXT, name):
            self._note(path, "temporary", f"{path} was left behind by a process that was killed while writing.")
        else:
            self._note(path, "foreign", f"{path} is not a cgtool file.")

    def _orphan(self, path: str) -> None:
        self._note(path, "orphan", f"No manifest names {path}: `cgtool prune` removes it.")

    def _unfinished(self) -> None:
        sentence = f"{self.folder} was started but never finished: warming the same model resumes it."
        self._note(self.folder, "unfinished", sentence)


class EntryCheck(_Check):
    """One check of an entry: its findings, and its intact records.

    Besides those of `Findings`, its fields are `key` (None if key.json is not intact), `manifests`, and `plans`: the
    pieces that each rank's plan lists as compiled.
    """

    def __init__(self, layout: CacheLayout, hash_: str, hasher: Hasher, *, fresh: bool = False) -> None:
        super().__init__(layout, hash_, str(layout.entry_dir(hash_)), hasher, fresh=fresh)
        path = f"{self.folder}/{KEY_FILE}"
        self.key: Key | None = self._record(path, lambda data: parse_key(data, path=Path(path), hash_=hash_))
        view = view_entry(layout, hash_)
        self.manifests: tuple[Manifest, ...] = view.manifests
        self.plans: dict[RankName, Planned] = {}
        self.problems += [self._error_finding(error.path or self.folder, error) for error in view.unlisted]
        for rank in view.ranks:
            self._rank(rank)
        is_started = ARTIFACTS in view.files or (not view.files and may_exist(self.folder))
        if self.key is None and KEY_FILE not in view.files and (self.manifests or not is_started):
            self.problems.append(self._missing(path, "every entry"))
        elif not self.manifests and not self.problems:
            self._unfinished()
        self._artifacts(view.artifacts, is_complete=bool(self.manifests) and not view.problems)
        if SIGNATURES in view.files:
            self._signatures(f"{self.folder}/{SIGNATURES}")
        for name in sorted({*view.files} - {KEY_FILE, ARTIFACTS, SIGNATURES}):
            above = f"{self.folder}/{name}"
            if parse_rank_folder(name) is None:
                self._stray(above)
            for child in [] if parse_rank_folder(name) is None else names_in(above):
                if not is_prefix(child):
                    self._stray(f"{above}/{child}")
        broken = {problem.path for problem in self.problems}
        for manifest in self.manifests:
            self._plan(manifest, broken)
        for marker in {marker for manifest in self.manifests for marker in LookupStore(layout).lost(manifest)}:
            sentence = f"{marker} is missing: load does not find the entry without it. {_REPAIR}"
            self._problem(marker, "lookup", sentence)
        self.problems.sort(key=lambda problem: (problem.path, problem.kind))
        self.notes.sort(key=lambda note: note.path)

    def again(self) -> Self:
        """Return a new check, which reads everything anew."""
        return type(self)(self.layout, self.name, self.hasher, fresh=True)

    def _rank(self, rank: RankView) -> None:
        path, manifest = f"{rank.folder}/{MANIFEST_FILE}", rank.manifest
        if manifest is None:
            if rank.problem is not None:
                self._add_record_error(path, rank.problem)
            elif PLAN_FILE in rank.files:
                self.problems.append(self._missing(path, f"the {PLAN_FILE} beside it"))
            for name in filter(is_temporary, rank.files):
                self._stray(f"{rank.folder}/{name}")
            return
        self.files += 1
        self.size_bytes += 0 if rank.manifest_status is None else rank.manifest_status[1]
        others = set(rank.files) - {MANIFEST_FILE, GENERATED, *manifest.files}
        for name, record in manifest.files.items():
            other = f".{name}.{record.sha256}.next"
            others.discard(other)
            self._check_file(
                f"{rank.folder}/{name}",
                digest=record.sha256,
                sizes=(record.size_bytes,),
                who="the manifest",
                other=f"{rank.folder}/{other}",
            )
        if PLAN_FILE not in manifest.files:
            self.problems.append(self._missing(f"{rank.folder}/{PLAN_FILE}", "every entry"))
        for name in sorted(others):
            self._stray(f"{rank.folder}/{name}")

    def _artifacts(self, there: Mapping[str, int], *, is_complete: bool) -> None:
        """Check the artifacts; if every manifest is intact, those that none of them names are orphans."""
        folder = f"{self.folder}/{ARTIFACTS}"
        sizes: dict[str, set[int]] = {}
        for row in (row for manifest in self.manifests for row in manifest.rows):
            sizes.setdefault(row.artifact.file, set()).add(row.artifact.size_bytes)
        listed = not any(problem.path.endswith(f"/{ARTIFACTS}") for problem in self.problems)
        # By inode, the order in which most file systems stored them, and then the missing ones.
        for name in [*sorted(there, key=there.__getitem__), *sorted(sizes.keys() - there.keys() if listed else ())]:
            path = f"{folder}/{name}"
            if name in sizes:
                self._check_file(path, digest=name[:64], sizes=sizes[name], who="a manifest")
            elif _ARTIFACT.fullmatch(name):
                if self._check_file(path, digest=name[:64], sizes=(), who="a folder") and is_complete:
                    self._orphan(path)
            else:
                self._stray(path)

    def _signatures(self, folder: str) -> None:
        """Check the signatures that import kept; load's policy decides whose signatures to trust."""
        names = set(names_in(folder))
        ours = {name for name in names if is_hash(name[:64]) and name[64:] in (".json", ".sig")}
        for name in sorted(names - ours):
            self._stray(f"{folder}/{name}")
        for stem in sorted({name[:64] for name in ours}):
            for end, most in ((".json", Limits().max_index_bytes), (".sig", MAX_SIGNATURE_BYTES)):
                path = f"{folder}/{stem}{end}"
                try:
                    problem = _signature_problem(path, stem, end, most) if path.rpartition("/")[2] in names else _HALF
                except CacheError as error:
                    self.problems.append(self._error_finding(path, error))
                    continue
                if problem is not None:
                    self._problem(path, problem[0], f"{path} {problem[1]}. {_SIGN_AGAIN}")

    def _plan(self, manifest: Manifest, broken: Collection[str]) -> None:
        """Read an intact plan, and check that each artifact was compiled for the rows that name it."""
        path = self.layout.rank_dir(manifest.name) / PLAN_FILE
        if str(path.relative_to(self.layout.root)) in broken:
            return
        try:
            plan = parse_plan(path.read_bytes(), path=path)
        except (OSError, CacheError):  # it is being published
            return
        self.plans[manifest.name] = planned(plan)
        folder = Path(self.folder, ARTIFACTS)
        for row, error in misplaced(manifest, plan, folder):
            at = folder / row.artifact.file
            problem = self.finding(at, "misplaced", f"{at} does not match its row. {error}")
            if problem.path not in broken and problem not in self.problems:
                self.problems.append(problem)


class UnitCheck(_Check):
    """One check of a unit, with the fields of `Findings`."""

    def __init__(self, layout: CacheLayout, unit: UnitView, hasher: Hasher, *, fresh: bool = False) -> None:
        super().__init__(layout, unit.key, unit.folder, hasher, fresh=fresh)
        if not is_hash(unit.key):
            self._stray(unit.folder)
            return
        path = f"{unit.folder}/{UNIT_FILE}"
        artifact = self._record(path, lambda data: parse_unit(data, path=path, key=unit.key))
        others = sorted({*unit.files} - {UNIT_FILE, "lock", "" if artifact is None else artifact.file})
        if artifact is not None:
            self._check_file(
                f"{unit.folder}/{artifact.file}",
                digest=artifact.digest,
                sizes=(artifact.size_bytes,),
                who=f"the {UNIT_FILE} beside it",
            )
        elif not self.problems and any(_ARTIFACT.fullmatch(name) for name in others):
            self._unfinished()
            return
        for name in others:
            if _ARTIFACT.fullmatch(name):
                self._orphan(f"{unit.folder}/{name}")
            else:
                self._stray(f"{unit.folder}/{name}")

    def again(self) -> Self:
        """Return a new check, which reads everything anew."""
        return type(self)(self.layout, view_unit(self.folder), self.hasher, fresh=True)


def check_entry(layout: CacheLayout, hash_: str, hasher: Hasher | None = None) -> EntryCheck:
    """Check every file of one entry; if the entry does not exist, its key.json is missing."""
    return _settled(EntryCheck(layout, hash_, hasher or Hasher()))


def check_entries(layout: CacheLayout, hashes: Iterable[str], hasher: Hasher) -> Iterator[EntryCheck]:
    """Yield the check of each entry, in order; entries that vanish meanwhile are left out."""
    checks = hasher.map(lambda hash_: check_entry(layout, hash_, hasher), hashes)
    return (check for check in checks if not check.is_gone)


def check_units(layout: CacheLayout, hasher: Hasher) -> Findings:
    """Check every unit of a cache; files shared with an entry that `hasher` has read are not read again."""
    unlisted: list[CacheError] = []
    found = Findings()
    units = hasher.map(lambda unit: _settled(UnitCheck(layout, unit, hasher)), walk_units(layout, unlisted))
    for check in (check for check in units if not check.is_gone):
        found.problems += check.problems
        found.notes += check.notes
        found.files += check.files
        found.size_bytes += check.size_bytes
    for error in unlisted:
        path = str(error.path).removeprefix(f"{layout.root}/")
        found.problems.append(Finding(path=path, kind="unreadable", sentence=str(error)))
    return found


def _settled(found: _Checked) -> _Checked:
    """Repeat a check that found problems until two in a row agree: a writer or a prune may be at work."""
    for _ in range(_ATTEMPTS):
        if not found.problems:
            break
        before = _inode(found.folder)
        again = found.again()
        after = _inode(found.folder)
        is_settled = again.problems == found.problems and before == after
        found = again
        found.is_gone = after is None
        if is_settled:
            break
    return found


def _inode(path: str) -> int | None:
    """Return the inode of a path, 0 if it cannot be read, or None if nothing exists there."""
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - paths are str throughout the checks
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return 0


def _signature_problem(path: str, stem: str, end: str, most: int) -> tuple[ProblemKind, str] | None:
    status = _status(path)
    is_ours = status is not None and stat.S_ISREG(status.st_mode) and status.st_size <= most
    data = read_bytes(path) if is_ours else None
    if data is None:
        return "not_a_file", "is not a file that import writes"
    if end == ".json":
        return None if sha256_hex(data) == stem else ("digest", "does not match the digest in its name")
    try:
        parse_signatures(data)
    except RefusedError:
        return "corrupt", "holds no valid signatures"
    return None


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - paths are str throughout the checks
    except OSError:
        return None
