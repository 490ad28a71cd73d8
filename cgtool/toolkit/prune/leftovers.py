"""What nothing names any more, and what dead processes left: how it is found, and how removed. Must not import torch.

| kind | what | when it goes |
|---|---|---|
| trash | what a killed prune had renamed away | always |
| temporary | `.tmp` and `.next` of writers that are gone | its process is dead and it rests a minute, else an hour |
| artifact | an artifact that no manifest of its entry names | nobody writes the entry, and all manifests are intact |
| rank | a rank folder without a manifest | it rests a day, and nobody writes the entry |
| unfinished | an entry without any manifest | as above |
| unit | a unit that was never finished; where asked for, one that no entry shares | it rests an hour |
| lookup | a mark of an entry that is gone | always |
| state | stamps, locks and leases of entries that are gone; records of prunes of half a year ago | nobody holds it |

To rest is to be left unchanged. What the walk tells is only ever a suspicion: before anything is removed it is looked
at again, under the lock of whoever might use it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cgtool.errors import CacheError
from cgtool.store.files import is_temporary, may_exist, read_sealed, remove, writer_lives
from cgtool.store.layout import ARTIFACTS, UNIT_FILE, CacheLayout, RankName, is_hash, parse_rank_folder
from cgtool.store.leases import LeaseTable, claimed, locked, remove_if_idle
from cgtool.store.pruned import check_inside, forgotten, is_inside, put_aside, trash_dir
from cgtool.store.records import Manifest, Unit, read_manifest
from cgtool.store.walk import EntryView, RankView, view_entry, walk, walk_units
from cgtool.toolkit.prune.plan import PlannedFile
from cgtool.toolkit.prune.removal import Removal

#: (path below the cache folder, kind)
Leftover = tuple[str, str]

_MINUTE_SECS, HOUR_SECS, DAY_SECS = 60.0, 3600.0, 86400.0

_LOCK = "lock"
_NEXT = re.compile(r"\.(?P<name>.+)\.(?P<digest>[0-9a-f]{64})\.next")
_FLAT = re.compile(r"[0-9a-f]{64}-rank_(?:0|[1-9][0-9]*)-[^~]+")


@dataclass(frozen=True, kw_only=True)
class CacheFacts:
    """What a plan has to know of a cache, and no more: it may hold a hundred thousand artifacts.

    Args:
        layout: Where it lies.
        entries: By hash, in order, without their rows.
        units: The names in each unit's folder but its lock, by key.
        is_readable: Whether it is known what every entry shares.
        leftovers: What is left over in the entries' folders.
    """

    layout: CacheLayout
    entries: dict[str, EntryView]
    units: dict[str, tuple[str, ...]]
    is_readable: bool
    leftovers: tuple[Leftover, ...]

    @classmethod
    def of(cls, layout: CacheLayout, finder: LeftoverFinder, *, artifacts: bool = True) -> CacheFacts:
        """Walk through a cache; an entry that cannot be read is marked and never an error.

        Args:
            layout: Where it lies.
            finder: Finds what is left over in each entry.
            artifacts: Whether the names of artifacts are of interest, and units that are as they should be.

        Raises:
            CacheError: The cache folder itself cannot be listed.
        """
        unlisted: list[CacheError] = []
        units: dict[str, tuple[str, ...]] = {}
        for unit in walk_units(layout, unlisted):
            if unit.key and (artifacts or not _is_whole(unit.files)):
                # One string for the name that all of them have.
                units[unit.key] = tuple(
                    UNIT_FILE if name == UNIT_FILE else name for name in unit.files if name != _LOCK
                )
        entries: dict[str, EntryView] = {}
        leftovers: list[Leftover] = []
        is_readable = True
        for entry in walk(layout):
            leftovers += finder.of_entry(entry)
            is_readable = is_readable and entry.is_readable
            entries[entry.hash] = entry.without_rows(artifacts=artifacts)
        return cls(
            layout=layout,
            entries=entries,
            units=units,
            is_readable=is_readable and not unlisted,
            leftovers=tuple(leftovers),
        )


class LeftoverFinder:
    """Finds the leftovers of a cache.

    Args:
        layout: Where it lies.
        leases: Who uses it.
        now: Seconds since the epoch.
    """

    def __init__(self, layout: CacheLayout, leases: LeaseTable, *, now: float) -> None:
        self._layout = layout
        self._leases = leases
        self._base = f"{layout.base}/"
        self._now = now
        #: What is behind a link is no leftover of this cache.
        self._has_state = not layout.state_dir.is_symlink()

    def find(self, facts: CacheFacts) -> Iterator[Leftover]:
        """Yield all leftovers, but units that are whole."""
        yield from facts.leftovers
        for name in sorted(_listed(str(trash_dir(self._layout)))) if self._has_state else ():
            yield f"state/trash/{name}", "trash"
        yield from self._temporaries("", sorted(_listed(str(self._layout.base), follow=True)))
        for key, files in facts.units.items():
            if not _is_whole(files):
                yield from self._of_unit(f"units/{key[:2]}/{key}", key, files)
        yield from self._of_lookup(facts)
        if self._has_state:
            yield from self._of_state(facts)

    def unshared_units(self, facts: CacheFacts, gone: frozenset[str]) -> Iterator[Leftover]:
        """Yield the units that no entry shares; none where it is not known what every entry shares.

        Args:
            facts: What the cache holds.
            gone: The hashes of entries that go.
        """
        if not facts.is_readable:
            return
        shared = {name for hash_, entry in facts.entries.items() if hash_ not in gone for name in entry.artifacts}
        for key, files in facts.units.items():
            path = f"units/{key[:2]}/{key}"
            if UNIT_FILE in files and shared.isdisjoint(files) and self._rests(path, HOUR_SECS):
                yield path, "unit"

    def _rests(self, path: str, secs: float) -> bool:
        return _rests(self._base + path, secs, self._now)

    def _temporaries(self, folder: str, names: Iterable[str]) -> Iterator[Leftover]:
        for name in names:
            if name[0] == "." and is_temporary(name) and _is_dead(f"{self._base}{folder}{name}", self._now):
                yield folder + name, "temporary"

    def of_entry(self, entry: EntryView) -> Iterator[Leftover]:
        """Yield what is left over in an entry's folder, or the entry itself."""
        hash_ = entry.hash
        if entry.is_link:
            return
        if entry.is_readable and not entry.is_finished:
            places = [hash_, f"{hash_}/{ARTIFACTS}", *(_folder(rank.name) for rank in entry.ranks)]
            if all(self._rests(place, DAY_SECS) for place in places) and not self._leases.is_written(hash_):
                yield hash_, "unfinished"
            return
        yield from self._temporaries(f"{hash_}/", entry.files)
        yield from self._temporaries(f"{hash_}/{ARTIFACTS}/", entry.artifacts)
        for rank in entry.ranks:
            yield from self._of_rank(rank)
        unnamed = [name for name in entry.artifacts.keys() - entry.named if is_hash(name[:64])]
        if unnamed and entry.is_readable and not self._leases.is_written(hash_):
            again = view_entry(self._layout, hash_)
            for name in sorted(unnamed):
                if again.is_readable and name not in again.named:
                    yield f"{hash_}/{ARTIFACTS}/{name}", "artifact"

    def _of_rank(self, rank: RankView) -> Iterator[Leftover]:
        folder = _folder(rank.name)
        if not rank.has_manifest:
            if self._rests(folder, DAY_SECS) and not self._leases.is_written(rank.name.hash):
                yield folder, "rank"
            return
        yield from self._temporaries(f"{folder}/", rank.files)
        if any(name.endswith(".next") for name in rank.files) and not self._leases.is_written(rank.name.hash):
            manifest = _trusted_manifest(self._layout, rank.name)
            for name in rank.files:
                if _is_unnamed_next(name, manifest):
                    yield f"{folder}/{name}", "temporary"

    def _of_unit(self, path: str, key: str, files: tuple[str, ...]) -> Iterator[Leftover]:
        if UNIT_FILE not in files:
            if self._rests(path, HOUR_SECS):
                yield path, "unit"
            return
        yield from self._temporaries(f"{path}/", files)
        artifacts = [name for name in files if is_hash(name[:64])]
        if len(artifacts) > 1 and self._rests(path, HOUR_SECS):
            current = _unit_artifact(self._layout, key)
            for name in sorted(artifacts):
                if current is not None and name != current:
                    yield f"{path}/{name}", "artifact"

    def _of_lookup(self, facts: CacheFacts) -> Iterator[Leftover]:
        lookup = f"{self._base}lookup"
        for digest in sorted(_listed(lookup)):
            names = _listed(f"{lookup}/{digest}")
            if not names and self._rests(f"lookup/{digest}", DAY_SECS):
                yield f"lookup/{digest}", "lookup"
            for name in names:
                hash_ = name[:64]
                if is_hash(hash_) and hash_ not in facts.entries:
                    yield f"lookup/{digest}/{name}", "lookup"

    def _of_state(self, facts: CacheFacts) -> Iterator[Leftover]:
        state = f"{self._base}state"
        known = {rank.name.flat for entry in facts.entries.values() for rank in entry.ranks}
        for folder in ("used", "locks", "leases"):
            for name in sorted(_listed(f"{state}/{folder}")):
                is_flat = _FLAT.fullmatch(name) is not None
                gone = name not in facts.entries if is_hash(name) else is_flat and name not in known
                if gone and not self._leases.is_used(name[:64]):
                    yield f"state/{folder}/{name}", "state"
        yield from self._temporaries("state/pruned/", _listed(f"{state}/pruned"))
        for name in forgotten(self._layout, self._now):
            yield f"state/pruned/{name}", "state"


class Remover:
    """Removes what a plan names, each after another look. Nothing is raised on account of the disk.

    Args:
        layout: Where the cache lies.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._base = f"{layout.base}/"
        self.removal = Removal(partial(check_inside, layout))
        #: What was renamed away, and is to be deleted once that is flushed.
        self.aside: list[str] = []
        #: Entries among it that were never finished.
        self.unfinished: list[str] = []

    def leftover(self, file: PlannedFile) -> bool:
        """Remove a leftover, if it still is one, and return whether it is gone."""
        path = self._base + file.path
        try:
            match file.kind:
                case "trash":
                    return self.removal.delete(path)
                case "temporary":
                    return self._temporary(file.path, path)
                case "artifact":
                    return self._artifact(file.path, path)
                case "rank" | "unfinished":
                    return self._begun(file.path, path)
                case "unit":
                    return self.unit(file.path)
                case "lookup":
                    return self._lookup(file.path, path)
                case "state":
                    return self._state(file.path, path)
        except CacheError as error:
            self.removal.fail(path, error)
        return False

    def unlink(self, path: str) -> bool:
        """Remove a file, and return whether it is gone."""
        return self.removal.remove(path, _unlink)

    def unlink_idle(self, path: str) -> bool:
        """Remove a lock that nobody holds, and return whether it is gone."""
        return self.removal.remove(path, _unlink_idle)

    def put_aside(self, path: str) -> bool:
        """Rename a folder away, and return whether that was done here."""
        try:
            aside = put_aside(self._layout, path)
        except CacheError as error:
            self.removal.fail(path, error)
            return False
        self.aside += [] if aside is None else [aside]
        return aside is not None

    def unit(self, below: str) -> bool:
        """Rename a unit away, unless it is being compiled, and return whether that was done."""
        path = self._base + below
        with locked(f"{path}/lock") as mine:
            return mine and self.put_aside(path)

    def forget(self, names: Iterable[RankName], lookup: Iterable[str], hash_: str) -> None:
        """Remove the marks, stamps and locks of an entry that is gone; for who holds its claim.

        The marks that say "taken in" go first and last: while one is there, an entry that somebody puts back is not
        taken in again, and would be found by nobody.
        """
        taken_in = [f"{self._base}lookup/indexed/{name.flat}" for name in names]
        for path in (*taken_in, *(f"{self._base}lookup/{digest}/{hash_}" for digest in lookup), *taken_in):
            self.unlink(path)
        for name in names:
            self.unlink(f"{self._base}state/used/{name.flat}")
            self.unlink_idle(f"{self._base}state/locks/{name.flat}")

    def _temporary(self, below: str, path: str) -> bool:
        if path.endswith(".tmp"):
            return _is_dead(path, time.time()) and self.removal.delete(path)
        hash_, rank, prefix, file = below.split("/")
        name = RankName(hash=hash_, rank=parse_rank_folder(rank) or 0, prefix=prefix)
        with claimed(self._layout, hash_, loaders=False) as mine:
            return mine and _is_unnamed_next(file, _trusted_manifest(self._layout, name)) and self.unlink(path)

    def _artifact(self, below: str, path: str) -> bool:
        above, name = below.rsplit("/", 1)
        if above.startswith("units/"):
            with locked(f"{self._base}{above}/lock") as mine:
                current = _unit_artifact(self._layout, above[-64:])
                return mine and current is not None and name != current and self.unlink(path)
        hash_ = above.removesuffix(f"/{ARTIFACTS}")
        with claimed(self._layout, hash_, loaders=False) as mine:
            entry = view_entry(self._layout, hash_)
            return mine and entry.is_readable and name not in entry.named and self.unlink(path)

    def _begun(self, below: str, path: str) -> bool:
        """Remove a rank or an entry that no warm came to the end of."""
        hash_ = below.split("/", maxsplit=1)[0]
        with claimed(self._layout, hash_) as mine:
            names = [name for name in self._layout.rank_names(hash_) if f"{self._base}{_folder(name)}".startswith(path)]
            finished = any(may_exist(self._layout.manifest_file(name)) for name in names)
            if not mine or finished or not _rests(path, DAY_SECS, time.time()) or not self.put_aside(path):
                return False
        self.unfinished += [hash_] if below == hash_ else []
        return True

    def _lookup(self, below: str, path: str) -> bool:
        if below.count("/") == 1:
            with contextlib.suppress(OSError):
                if is_inside(self._layout, path):
                    os.rmdir(path)  # noqa: PTH106 - paths are str all over prune
            return not may_exist(path)
        entry = self._layout.entry_dir(below.rsplit("/", 1)[1][:64])
        return not may_exist(entry) and self.unlink(path)

    def _state(self, below: str, path: str) -> bool:
        _, folder, name = below.split("/")
        if folder == "pruned":
            return self.unlink(path)
        hash_, _, rank = name.partition("-")
        if may_exist(f"{self._base}{hash_}/{rank.replace('-', '/', 1)}"):
            return False
        return self.unlink(path) if folder == "used" else self.unlink_idle(path)


def _unlink(path: str) -> None:
    remove(Path(path))


def _unlink_idle(path: str) -> None:
    if not remove_if_idle(path):
        raise BlockingIOError


def _is_whole(files: tuple[str, ...]) -> bool:
    """Whether a unit's folder holds its record and one artifact, and beside them a lock at most."""
    others = set(files) - {UNIT_FILE, _LOCK}
    return UNIT_FILE in files and len(others) == 1 and not others.pop().startswith(".")


def _is_dead(path: str, now: float) -> bool:
    """Whether a temporary file or folder belongs to a process that is gone."""
    # A number of a process says nothing of another machine's or container's, so that the file must rest as well.
    dead = writer_lives(path.rpartition("/")[2]) is False
    return _rests(path, _MINUTE_SECS if dead else HOUR_SECS, now)


def _rests(path: str, secs: float, now: float) -> bool:
    """Whether a file or folder was left unchanged for so long; True where it is gone."""
    try:
        return now - os.lstat(path).st_mtime > secs
    except OSError:
        return True


def _is_unnamed_next(name: str, manifest: Manifest | None) -> bool:
    """Whether a file is a `.next` that its manifest does not name; False where there is no such manifest."""
    match = _NEXT.fullmatch(name)
    if match is None or manifest is None:
        return False
    record = manifest.files.get(match["name"])
    return record is None or record.sha256 != match["digest"]


def _trusted_manifest(layout: CacheLayout, name: RankName) -> Manifest | None:
    try:
        return read_manifest(layout, name)
    except CacheError:
        return None


def _unit_artifact(layout: CacheLayout, key: str) -> str | None:
    """The file name of the artifact that a unit's record names; None where it cannot be trusted."""
    try:
        unit = read_sealed(layout.unit_dir(key) / UNIT_FILE, Unit)
    except CacheError:
        return None
    return None if unit is None else unit.artifact.file


def _folder(name: RankName) -> str:
    return f"{name.hash}/rank_{name.rank}/{name.prefix}"


def _listed(folder: str, *, follow: bool = False) -> list[str]:
    """The names in a folder; none where it cannot be listed, or is a link that is not to be followed."""
    if not follow and os.path.islink(folder):  # noqa: PTH114 - a str, a hundred thousand times
        return []
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone, of a hundred thousand folders
    except OSError:
        return []
