"""What nothing names any more, and what dead processes left: how it is found, and how removed. Must not import torch.

| kind | what | when it goes |
|---|---|---|
| trash | what a killed prune had renamed away | always |
| temporary | `.tmp` and `.next` of writers that are gone | its process is dead and it rests a minute, else an hour |
| artifact | an artifact that no manifest of its entry names | nobody writes the entry, and all manifests are intact |
| shared | an artifact out of a container image that no entry links to | always |
| rank | a rank folder without a manifest | it rests a day, and nobody writes the entry |
| unfinished | an entry without any manifest | as above |
| unit | a unit that was never finished; where asked for, one that no entry shares | it rests an hour |
| lookup | a mark of an entry that is gone | always |
| state | stamps, locks and leases of entries that are gone; records of prunes of half a year ago | nobody holds it |

To rest is to be left unchanged. What the walk tells is only ever a suspicion: before anything is removed, its entry or
unit is looked at again in the same way, under the lock of whoever might use it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cgtool.errors import CacheError
from cgtool.store.entry import NEXT
from cgtool.store.files import is_temporary, may_exist, names_in, read_sealed, writer_lives
from cgtool.store.layout import ARTIFACTS, UNIT_FILE, CacheLayout, RankName, is_hash
from cgtool.store.leases import LeaseTable, claimed, locked, remove_idle
from cgtool.store.pruned import forgotten, is_inside, trash_dir
from cgtool.store.records import Unit
from cgtool.store.walk import EntryView, RankView, view_entry, view_unit, walk, walk_units
from cgtool.toolkit.prune.plan import DAY_SECS, HOUR_SECS, PlannedFile
from cgtool.toolkit.prune.removal import Removal

#: (path below the cache folder, kind)
Leftover = tuple[str, str]

_MINUTE_SECS = 60.0
_LOCK = "lock"
_FLAT = re.compile(r"[0-9a-f]{64}-rank_(?:0|[1-9][0-9]*)-[^~]+")


@dataclass(kw_only=True)
class Survey:
    """What a plan has to know of a cache, and no more: it may hold a hundred thousand artifacts."""

    #: By hash, in order, without their rows.
    entries: dict[str, EntryView] = field(default_factory=dict)
    #: The names in each unit's folder but its lock, by key.
    units: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: Whether it is known what every entry shares.
    is_readable: bool = True
    leftovers: list[Leftover] = field(default_factory=list)


class Leftovers:
    """Finds the leftovers of a cache, and removes those that still are some."""

    def __init__(self, layout: CacheLayout, leases: LeaseTable, *, now: float) -> None:
        self._layout = layout
        self._leases = leases
        self._base = f"{layout.base}/"
        self._now = now

    def survey(self, *, artifacts: bool = True) -> Survey:
        """Walk through the cache; an entry that cannot be read is marked and never an error."""
        found, unlisted = Survey(), list[CacheError]()
        for unit in walk_units(self._layout, unlisted):
            if unit.key and (artifacts or not _is_whole(unit.files)):
                # One string for the name that all of them have.
                names = (UNIT_FILE if name == UNIT_FILE else name for name in unit.files if name != _LOCK)
                found.units[unit.key] = tuple(names)
        for entry in walk(self._layout):
            found.leftovers += self._of_entry(entry, is_written=None)
            found.is_readable = found.is_readable and entry.is_readable
            found.entries[entry.hash] = entry.without_rows(artifacts=artifacts)
        found.is_readable = found.is_readable and not unlisted
        return found

    def find(self, survey: Survey) -> Iterator[Leftover]:
        """Yield all leftovers, but units that are whole."""
        yield from survey.leftovers
        yield from self._temporaries("", names_in(self._base))
        for key, files in survey.units.items():
            if not _is_whole(files):
                yield from self._of_unit(key, files)
        yield from self._of_lookup(survey.entries)
        for name in names_in(f"{self._base}{ARTIFACTS}", follow=False):
            if is_hash(name[:64]) and not self._is_linked(name):
                yield f"{ARTIFACTS}/{name}", "shared"
        if not self._layout.state_dir.is_symlink():  # what is behind a link is no leftover of this cache
            yield from self._of_state(survey.entries)

    def unshared_units(self, survey: Survey, gone: Iterable[str]) -> Iterator[Leftover]:
        """Yield the units that no entry shares but those that go; none where it is not known what every one shares."""
        if not survey.is_readable:
            return
        stay = survey.entries.keys() - gone
        shared = {name for hash_ in stay for name in survey.entries[hash_].artifacts}
        for key, files in survey.units.items():
            path = unit_path(key)
            if UNIT_FILE in files and shared.isdisjoint(files) and self._rests(path, HOUR_SECS):
                yield path, "unit"

    def remove(self, files: Iterable[PlannedFile], removal: Removal) -> int:
        """Remove those leftovers that still are some, and return how many are gone."""
        gone = 0
        together: dict[tuple[str, bool], list[PlannedFile]] = {}
        loose: list[PlannedFile] = []
        for file in files:
            if file.kind in ("trash", "unit", "lookup", "state", "shared") or file.path.endswith(".tmp"):
                loose.append(file)
            else:
                owner = "/".join(file.path.split("/")[: 3 if file.path.startswith("units/") else 1])
                together.setdefault((owner, file.kind in ("rank", "unfinished")), []).append(file)
        for (owner, is_begun), group in together.items():
            is_unit = owner.startswith("units/")
            lock = f"{self._base}{owner}/{_LOCK}"
            with locked(lock) if is_unit else claimed(self._layout, owner, loaders=is_begun) as mine:
                still = set(self._again(owner, is_written=not mine))
                for path in (self._base + file.path for file in group if (file.path, file.kind) in still):
                    gone += removal.put_aside(path) if is_begun else removal.unlink(path)
            if not is_unit and not may_exist(self._layout.entry_dir(owner)):
                remove_idle(self._layout, owner)
        # After those, for a folder out of which a temporary file goes was not left unchanged.
        return gone + sum(self._remove_loose(file, removal) for file in loose)

    def _again(self, owner: str, *, is_written: bool) -> Iterator[Leftover]:
        if not owner.startswith("units/"):
            return self._of_entry(view_entry(self._layout, owner), is_written=is_written)
        return self._of_unit(owner[-64:], () if is_written else view_unit(self._base + owner).files)

    def _remove_loose(self, file: PlannedFile, removal: Removal) -> bool:
        """Remove what nobody claims as a whole, if it still is a leftover."""
        path = self._base + file.path
        match file.kind, file.path.split("/"):
            case "trash", _:
                return removal.delete(path)
            case "temporary", _:
                return _is_dead(path, self._now) and removal.delete(path)
            case "unit", _:
                with locked(f"{path}/{_LOCK}") as mine:
                    return mine and removal.put_aside(path)
            case "lookup", [_, _]:
                with contextlib.suppress(OSError):
                    if is_inside(self._layout, path):
                        os.rmdir(path)  # noqa: PTH106 - paths are str all over prune
                return not may_exist(path)
            case "lookup", [_, _, name]:
                return not may_exist(self._base + name[:64]) and removal.unlink(path)
            case "shared", [_, name]:
                return not self._is_linked(name) and removal.unlink(path)
            case "state", [_, "pruned", _]:
                return removal.unlink(path)
            case "state", [_, folder, name]:
                hash_, _, rank = name.partition("-")
                if may_exist(f"{self._base}{hash_}/{rank.replace('-', '/', 1)}"):
                    return False
                return removal.unlink(path) if folder == "used" else removal.unlink_idle(path)
        return False

    def _of_entry(self, entry: EntryView, *, is_written: bool | None) -> Iterator[Leftover]:
        """What is left over in an entry's folder, or the entry itself; without a word on it, leases tell who writes."""
        hash_ = entry.hash
        if entry.is_link:
            return

        def written() -> bool:
            return self._leases.is_written(hash_) if is_written is None else is_written

        if entry.is_readable and not entry.is_finished:
            places = [hash_, f"{hash_}/{ARTIFACTS}", *(_folder(rank.name) for rank in entry.ranks)]
            if all(self._rests(place, DAY_SECS) for place in places) and not written():
                yield hash_, "unfinished"
            return
        yield from self._temporaries(f"{hash_}/", entry.files)
        yield from self._temporaries(f"{hash_}/{ARTIFACTS}/", entry.artifacts)
        for rank in entry.ranks:
            folder = _folder(rank.name)
            if not rank.has_manifest:
                if self._rests(folder, DAY_SECS) and not written():
                    yield folder, "rank"
                continue
            yield from self._temporaries(f"{folder}/", rank.files)
            unnamed = [name for name in rank.files if name.endswith(".next") and _is_unnamed_next(name, rank)]
            if unnamed and not written():
                yield from ((f"{folder}/{name}", "temporary") for name in unnamed)
        strays = [name for name in entry.artifacts.keys() - entry.named if is_hash(name[:64])]
        if strays and entry.is_readable and not written():
            # Its writer may have published a manifest since that names them.
            again = entry if is_written is False else view_entry(self._layout, hash_)
            if again.is_readable:
                yield from ((f"{hash_}/{ARTIFACTS}/{name}", "artifact") for name in sorted({*strays} - again.named))

    def _of_unit(self, key: str, files: tuple[str, ...]) -> Iterator[Leftover]:
        path = unit_path(key)
        if UNIT_FILE not in files:
            if self._rests(path, HOUR_SECS):
                yield path, "unit"
            return
        yield from self._temporaries(f"{path}/", files)
        artifacts = [name for name in files if is_hash(name[:64])]
        if len(artifacts) > 1 and self._rests(path, HOUR_SECS):
            with contextlib.suppress(CacheError):  # a record that cannot be trusted names everything
                unit = read_sealed(self._layout.unit_dir(key) / UNIT_FILE, Unit)
                if unit is not None:
                    yield from ((f"{path}/{name}", "artifact") for name in artifacts if name != unit.artifact.file)

    def _of_lookup(self, entries: Mapping[str, EntryView]) -> Iterator[Leftover]:
        lookup = f"{self._base}lookup"
        for digest in names_in(lookup, follow=False):
            names = names_in(f"{lookup}/{digest}", follow=False)
            if not names and self._rests(f"lookup/{digest}", DAY_SECS):
                yield f"lookup/{digest}", "lookup"
            for name in names:
                if is_hash(name[:64]) and name[:64] not in entries:
                    yield f"lookup/{digest}/{name}", "lookup"

    def _of_state(self, entries: Mapping[str, EntryView]) -> Iterator[Leftover]:
        for name in names_in(trash_dir(self._layout), follow=False):
            yield f"state/trash/{name}", "trash"
        known = {rank.name.flat for entry in entries.values() for rank in entry.ranks}
        for folder in ("used", "locks", "leases"):
            for name in names_in(f"{self._base}state/{folder}", follow=False):
                is_flat = _FLAT.fullmatch(name) is not None
                gone = name not in entries if is_hash(name) else is_flat and name not in known
                if gone and not self._leases.is_used(name[:64]):
                    yield f"state/{folder}/{name}", "state"
        yield from self._temporaries("state/pruned/", names_in(f"{self._base}state/pruned", follow=False))
        for name in forgotten(self._layout, self._now):
            yield f"state/pruned/{name}", "state"

    def _is_linked(self, name: str) -> bool:
        return any(may_exist(f"{self._base}{hash_}/{ARTIFACTS}/{name}") for hash_ in self._layout.hashes())

    def _temporaries(self, folder: str, names: Iterable[str]) -> Iterator[Leftover]:
        for name in names:
            if name[0] == "." and is_temporary(name) and _is_dead(f"{self._base}{folder}{name}", self._now):
                yield folder + name, "temporary"

    def _rests(self, path: str, secs: float) -> bool:
        return _rests(self._base + path, secs, self._now)


def unit_path(key: str) -> str:
    """Return where a unit lies below the cache folder."""
    return f"units/{key[:2]}/{key}"


def remove_leftovers(layout: CacheLayout, files: Iterable[PlannedFile], removal: Removal) -> int:
    """Remove those of a plan's leftovers that still are some, and return how many are gone."""
    return Leftovers(layout, LeaseTable(layout), now=time.time()).remove(files, removal)


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


def _is_unnamed_next(name: str, rank: RankView) -> bool:
    """Whether a file is a `.next` that its manifest does not name; False where that cannot be trusted."""
    match = re.fullmatch(NEXT, name)
    if match is None or rank.manifest is None:
        return False
    record = rank.manifest.files.get(match["name"])
    return record is None or record.sha256 != match["digest"]


def _folder(name: RankName) -> str:
    return f"{name.hash}/rank_{name.rank}/{name.prefix}"
