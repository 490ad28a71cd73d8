"""The checks of `verify`: what is asked of every file that the walk through a cache yields. Writes nothing; no torch.

| place in the cache | what is asked of it | what `--repair` does (`cgtool.toolkit.verify.repair`) |
|---|---|---|
| key.json | its seal, and the hash of its folder | sets the entry aside |
| manifest.json | its seal, and the names of its folders | sets the rank aside |
| plan.json, texts | size and digest in the manifest, under either of their names | copies, rewrites, or sets aside |
| artifacts/ | the digest in their name, the size in manifests; all that these name are there | links, or compiles |
| | they say within their bytes which piece and shape they are of: those of their rows | compiles |
| signatures/ | the digest in an index's name, and signatures beside it | nothing |
| lookup/ | a mark for each digest of a manifest that was taken in | makes the mark again |
| units/ | the seal of unit.json, its key, and the digest and size of its artifact | copies, or forgets the unit |

A check may run while others write, so what is found wrong is looked at again before it is told.
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

#: What keeps something from being loaded, or would.
ProblemKind = Literal[
    "missing", "size", "digest", "corrupt", "schema", "unreadable", "not_a_file", "lookup", "misplaced"
]
#: What is in nobody's way: what nothing names, or a warm left behind.
NoteKind = Literal["orphan", "temporary", "foreign", "unfinished"]

_MEND = "Mend it with `cgtool verify --repair`, or warm the model again."
_HALF: tuple[ProblemKind, str] = ("missing", "is missing, and its other half is there")
_SIGN_AGAIN = "Remove both files of that name, and import the signed bundle again."
_ARTIFACT = re.compile(r"[0-9a-f]{64}\.[a-z][a-z0-9_.]*")
#: How often what keeps changing is looked at again.
_ATTEMPTS = 4

_Checked = TypeVar("_Checked", bound="_Check")
_Parsed = TypeVar("_Parsed")


class Finding(Record, frozen=True, kw_only=True):
    """One file or folder that a check has something to say of, as `verify --json` prints it."""

    #: Below the cache's root.
    path: str
    #: A stable word for programs.
    kind: ProblemKind | NoteKind
    #: What is wrong, with the whole path, and what to do; or what it is.
    sentence: str


@dataclass(kw_only=True)
class Findings:
    """What a check finds: the problems in the order of their paths, notes, and how many files and bytes were read."""

    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    files: int = 0
    size_bytes: int = 0


class _Check(Findings):
    """One look at an entry or a unit."""

    def __init__(self, layout: CacheLayout, name: str, folder: str, hasher: Hasher, *, fresh: bool) -> None:
        super().__init__()
        self.layout = layout
        self.name = name
        self.folder = folder
        self.hasher = hasher
        #: Whether its folder was not there as it was looked at last: it may be there again by now.
        self.is_gone = False
        self._fresh = fresh

    def again(self) -> Self:
        """Return another look, which reads everything anew."""
        raise NotImplementedError

    def say(self, path: str | Path, kind: ProblemKind | NoteKind, sentence: str) -> Finding:
        """Return a finding on a file, whose path may be anywhere."""
        text, root = str(path), f"{self.layout.root}/"
        return Finding(path=text.removeprefix(root), kind=kind, sentence=sentence)

    def _is_as_named(self, path: str, *, digest: str, sizes: Collection[int], who: str, other: str = "") -> bool:
        """Match a file to the digest and the sizes that `who` names ("the manifest"); what is wrong is a problem.

        While it is being published it may lie under another name, `other`.
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
            return self._of_error(path, hashed.failed)
        wrong = next((size for size in sorted(sizes) if size != hashed.size_bytes), None)
        if wrong is not None:
            status = _status(path)  # no more was read than it should have
            actual = hashed.size_bytes if hashed.size_bytes < wrong or status is None else status.st_size
            return self.say(path, "size", f"{path} has {actual} bytes and must have {wrong}. {_MEND}")
        if hashed.digest != digest:
            sentence = f"{path} is corrupt: its digest is {hashed.digest} and must be {digest}. {_MEND}"
            return self.say(path, "digest", sentence)
        return None

    def _missing(self, path: str | Path, who: str) -> Finding:
        return self.say(path, "missing", f"{path} is missing: {who} names it. {_MEND}")

    def _of_error(self, path: str | Path, error: CacheError | Literal["not_a_file"]) -> Finding:
        if error == "not_a_file":
            sentence = f"{path} is not an ordinary file. Remove it, then mend the entry with `cgtool verify --repair`."
            return self.say(path, error, sentence)
        if isinstance(error, CacheCorruptError):
            return self.say(path, "corrupt", str(error))
        return self.say(path, "schema" if isinstance(error, CacheSchemaError) else "unreadable", str(error))

    def _of_record(self, path: str, error: CacheError) -> None:
        strange = os.path.exists(path) and not os.path.isfile(path)  # noqa: PTH110, PTH113 - Path's raise
        self.problems.append(self._of_error(path, "not_a_file" if strange else error))
        self.files += 1

    def _record(self, path: str, parse: Callable[[bytes], _Parsed]) -> _Parsed | None:
        """Read a sealed record; None where it is missing, or among the problems."""
        try:
            data = read_bytes(path)
            record = None if data is None else parse(data)
        except CacheError as error:
            self._of_record(path, error)
            return None
        self.files += data is not None
        self.size_bytes += len(data or b"")
        return record

    def _stray(self, path: str) -> None:
        """Note what a file is that nothing names, unless a live process is writing it just now."""
        name = path.rpartition("/")[2]
        if is_temporary(name):
            if not writer_lives(name):
                self.notes.append(self.say(path, "temporary", f"{path} was left by a process that is gone."))
        elif re.fullmatch(NEXT, name):
            sentence = f"{path} was left by a process that was ended as it wrote."
            self.notes.append(self.say(path, "temporary", sentence))
        else:
            self.notes.append(self.say(path, "foreign", f"{path} is not one of cgtool's files."))

    def _orphan(self, path: str) -> None:
        self.notes.append(self.say(path, "orphan", f"{path} is named by no manifest: `cgtool prune` removes it."))

    def _unfinished(self) -> None:
        sentence = f"{self.folder} was begun and never finished: warming the same model goes on from there."
        self.notes.append(self.say(self.folder, "unfinished", sentence))


class EntryCheck(_Check):
    """One look at an entry: what it finds, and the records that are intact.

    Its fields: `problems` in the order of their paths, `notes`, `files` and `size_bytes` that were read; `key` (None
    where key.json is not intact), `manifests`, and which pieces their plans say are compiled.
    """

    def __init__(self, layout: CacheLayout, hash_: str, hasher: Hasher, *, fresh: bool = False) -> None:
        super().__init__(layout, hash_, str(layout.entry_dir(hash_)), hasher, fresh=fresh)
        path = f"{self.folder}/{KEY_FILE}"
        self.key: Key | None = self._record(path, lambda data: parse_key(data, path=Path(path), hash_=hash_))
        view = view_entry(layout, hash_)
        self.manifests: tuple[Manifest, ...] = view.manifests
        self.plans: dict[RankName, Planned] = {}
        self.problems += [self._of_error(error.path or self.folder, error) for error in view.unlisted]
        for rank in view.ranks:
            self._rank(rank)
        begun = ARTIFACTS in view.files or (not view.files and may_exist(self.folder))
        if self.key is None and KEY_FILE not in view.files and (self.manifests or not begun):
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
        for mark in {mark for manifest in self.manifests for mark in LookupStore(layout).lost(manifest)}:
            sentence = f"{mark} is missing: without it load passes the entry over. {_MEND}"
            self.problems.append(self.say(mark, "lookup", sentence))
        self.problems.sort(key=lambda problem: (problem.path, problem.kind))
        self.notes.sort(key=lambda note: note.path)

    def again(self) -> Self:
        """Return another look, which reads everything anew."""
        return type(self)(self.layout, self.name, self.hasher, fresh=True)

    def _rank(self, rank: RankView) -> None:
        path, manifest = f"{rank.folder}/{MANIFEST_FILE}", rank.manifest
        if manifest is None:
            if rank.problem is not None:
                self._of_record(path, rank.problem)
            elif PLAN_FILE in rank.files:
                self.problems.append(self._missing(path, f"a {PLAN_FILE} beside it"))
            for name in filter(is_temporary, rank.files):
                self._stray(f"{rank.folder}/{name}")
            return
        self.files += 1
        self.size_bytes += 0 if rank.manifest_status is None else rank.manifest_status[1]
        others = set(rank.files) - {MANIFEST_FILE, GENERATED, *manifest.files}
        for name, record in manifest.files.items():
            other = f".{name}.{record.sha256}.next"
            others.discard(other)
            self._is_as_named(
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
        """Read the artifacts; where every manifest is known, those that none of them names are orphans."""
        folder = f"{self.folder}/{ARTIFACTS}"
        sizes: dict[str, set[int]] = {}
        for row in (row for manifest in self.manifests for row in manifest.rows):
            sizes.setdefault(row.artifact.file, set()).add(row.artifact.size_bytes)
        listed = not any(problem.path.endswith(f"/{ARTIFACTS}") for problem in self.problems)
        # In the order in which a file system that has one laid them down, and then those that are missing.
        for name in [*sorted(there, key=there.__getitem__), *sorted(sizes.keys() - there.keys() if listed else ())]:
            path = f"{folder}/{name}"
            if name in sizes:
                self._is_as_named(path, digest=name[:64], sizes=sizes[name], who="a manifest")
            elif _ARTIFACT.fullmatch(name):
                if self._is_as_named(path, digest=name[:64], sizes=(), who="a folder") and is_complete:
                    self._orphan(path)
            else:
                self._stray(path)

    def _signatures(self, folder: str) -> None:
        """Check what import left of who signed the entry; whose signatures they are is for load's policy to say."""
        names = set(names_in(folder))
        ours = {name for name in names if is_hash(name[:64]) and name[64:] in (".json", ".sig")}
        for name in sorted(names - ours):
            self._stray(f"{folder}/{name}")
        for stem in sorted({name[:64] for name in ours}):
            for end, most in ((".json", Limits().max_index_bytes), (".sig", MAX_SIGNATURE_BYTES)):
                path = f"{folder}/{stem}{end}"
                try:
                    said = _signature_problem(path, stem, end, most) if path.rpartition("/")[2] in names else _HALF
                except CacheError as error:
                    self.problems.append(self._of_error(path, error))
                    continue
                if said is not None:
                    self.problems.append(self.say(path, said[0], f"{path} {said[1]}. {_SIGN_AGAIN}"))

    def _plan(self, manifest: Manifest, broken: Collection[str]) -> None:
        """Read an intact plan, and match what artifacts say of themselves to the rows that lead to them."""
        path = self.layout.rank_dir(manifest.name) / PLAN_FILE
        if str(path.relative_to(self.layout.root)) in broken:
            return
        try:
            plan = parse_plan(path.read_bytes(), path=path)
        except (OSError, CacheError):  # it is being published just now
            return
        self.plans[manifest.name] = planned(plan)
        folder = Path(self.folder, ARTIFACTS)
        for row, error in misplaced(manifest, plan, folder):
            at = folder / row.artifact.file
            problem = self.say(at, "misplaced", f"{at} is not what its row says. {error}")
            if problem.path not in broken and problem not in self.problems:
                self.problems.append(problem)


class UnitCheck(_Check):
    """One look at a unit; it has the fields of an `EntryCheck` that are no records."""

    def __init__(self, layout: CacheLayout, unit: UnitView, hasher: Hasher, *, fresh: bool = False) -> None:
        super().__init__(layout, unit.key, unit.folder, hasher, fresh=fresh)
        if not is_hash(unit.key):
            self._stray(unit.folder)
            return
        path = f"{unit.folder}/{UNIT_FILE}"
        artifact = self._record(path, lambda data: parse_unit(data, path=path, key=unit.key))
        others = sorted({*unit.files} - {UNIT_FILE, "lock", "" if artifact is None else artifact.file})
        if artifact is not None:
            self._is_as_named(
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
        """Return another look, which reads everything anew."""
        return type(self)(self.layout, view_unit(self.folder), self.hasher, fresh=True)


def check_entry(layout: CacheLayout, hash_: str, hasher: Hasher | None = None) -> EntryCheck:
    """Read and match every file of one entry; one that is not there lacks its key.json."""
    return _settled(EntryCheck(layout, hash_, hasher or Hasher()))


def check_entries(layout: CacheLayout, hashes: Iterable[str], hasher: Hasher) -> Iterator[EntryCheck]:
    """Yield what is found in each of several entries, in their order; those that vanish meanwhile are left out."""
    checks = hasher.map(lambda hash_: check_entry(layout, hash_, hasher), hashes)
    return (check for check in checks if not check.is_gone)


def check_units(layout: CacheLayout, hasher: Hasher) -> Findings:
    """Read and match every unit of a cache; what an entry shares, and `hasher` has read, is not read again."""
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
    """Return what two looks one after the other agree on, for a writer or a pruner may be at work."""
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
    """Return the inode of what is there, 0 where it cannot be asked; None where nothing is."""
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - a str, as all of its neighbours
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
        return None if sha256_hex(data) == stem else ("digest", "differs from the digest in its name")
    try:
        parse_signatures(data)
    except RefusedError:
        return "corrupt", "holds no signatures"
    return None


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - a str, as all of its neighbours
    except OSError:
        return None
