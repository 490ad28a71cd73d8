"""Find and remove leftovers: unreferenced files, and files that ended processes left behind. Must not import torch.

| kind | what | removed if |
|---|---|---|
| trash | what a killed prune had moved into the trash | always |
| temporary | `.tmp` and `.next` files | unchanged for a minute if the writer is dead, otherwise for an hour |
| artifact | an artifact that no manifest of its entry names | nobody writes the entry, and all manifests are intact |
| shared | an artifact from a container image that no entry links to | always |
| rank | a rank folder without a manifest | unchanged for a day, and nobody writes the entry |
| unfinished | an entry without any manifest | as above |
| unit | an unfinished unit; on request, one that no entry shares | unchanged for an hour |
| lookup | a marker of an entry that no longer exists | always |
| state | stamps, locks and leases of entries that no longer exist; prune records older than half a year | not held |

What the survey finds is only a candidate: before anything is removed, its entry or unit is examined again in the same
way, under the lock that its users take.
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
    """What a plan needs to know about a cache, kept small: it may hold a hundred thousand artifacts."""

    #: By hash, sorted, without their rows.
    entries: dict[str, EntryView] = field(default_factory=dict)
    #: The names in each unit's folder except its lock, by key.
    units: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: Whether every entry and unit could be listed, so that it is known which units are shared.
    is_readable: bool = True
    leftovers: list[Leftover] = field(default_factory=list)


class Leftovers:
    """Finds the leftovers of a cache, and removes those that still qualify."""

    def __init__(self, layout: CacheLayout, leases: LeaseTable, *, now: float) -> None:
        self._layout = layout
        self._leases = leases
        self._base = f"{layout.base}/"
        self._now = now

    def survey(self, *, artifacts: bool = True) -> Survey:
        """Walk the cache; an unreadable entry is marked and is not an error."""
        found, unlisted = Survey(), list[CacheError]()
        for unit in walk_units(self._layout, unlisted):
            if unit.key and (artifacts or not _is_whole(unit.files)):
                # All units share one string object for this name.
                names = (UNIT_FILE if name == UNIT_FILE else name for name in unit.files if name != _LOCK)
                found.units[unit.key] = tuple(names)
        for entry in walk(self._layout):
            found.leftovers += self._of_entry(entry, is_written=None)
            found.is_readable = found.is_readable and entry.is_readable
            found.entries[entry.hash] = entry.without_rows(artifacts=artifacts)
        found.is_readable = found.is_readable and not unlisted
        return found

    def find(self, survey: Survey) -> Iterator[Leftover]:
        """Yield all leftovers except complete units."""
        yield from survey.leftovers
        yield from self._temporaries("", names_in(self._base))
        for key, files in survey.units.items():
            if not _is_whole(files):
                yield from self._of_unit(key, files)
        yield from self._of_lookup(survey.entries)
        for name in names_in(f"{self._base}{ARTIFACTS}", follow=False):
            if is_hash(name[:64]) and not self._is_linked(name):
                yield f"{ARTIFACTS}/{name}", "shared"
        if not self._layout.state_dir.is_symlink():  # files behind a link do not belong to this cache
            yield from self._of_state(survey.entries)

    def unshared_units(self, survey: Survey, gone: Iterable[str]) -> Iterator[Leftover]:
        """Yield the units that only entries in `gone` share; none unless every entry could be read."""
        if not survey.is_readable:
            return
        kept = survey.entries.keys() - gone
        shared = {name for hash_ in kept for name in survey.entries[hash_].artifacts}
        for key, files in survey.units.items():
            path = unit_path(key)
            if UNIT_FILE in files and shared.isdisjoint(files) and self._is_unchanged(path, HOUR_SECS):
                yield path, "unit"

    def remove(self, files: Iterable[PlannedFile], removal: Removal) -> int:
        """Remove the leftovers that still qualify, and return how many were removed."""
        gone = 0
        claimable: dict[tuple[str, bool], list[PlannedFile]] = {}
        loose: list[PlannedFile] = []
        for file in files:
            if file.kind in ("trash", "unit", "lookup", "state", "shared") or file.path.endswith(".tmp"):
                loose.append(file)
            else:
                owner = "/".join(file.path.split("/")[: 3 if file.path.startswith("units/") else 1])
                claimable.setdefault((owner, file.kind in ("rank", "unfinished")), []).append(file)
        for (owner, is_started), group in claimable.items():
            is_unit = owner.startswith("units/")
            lock = f"{self._base}{owner}/{_LOCK}"
            with locked(lock) if is_unit else claimed(self._layout, owner, loaders=is_started) as mine:
                still = set(self._again(owner, is_written=not mine))
                for path in (self._base + file.path for file in group if (file.path, file.kind) in still):
                    gone += removal.put_aside(path) if is_started else removal.unlink(path)
            if not is_unit and not may_exist(self._layout.entry_dir(owner)):
                remove_idle(self._layout, owner)
        # Loose files last: removing a temporary file changes its folder, which would then not count as unchanged.
        return gone + sum(self._remove_loose(file, removal) for file in loose)

    def _again(self, owner: str, *, is_written: bool) -> Iterator[Leftover]:
        if not owner.startswith("units/"):
            return self._of_entry(view_entry(self._layout, owner), is_written=is_written)
        return self._of_unit(owner[-64:], () if is_written else view_unit(self._base + owner).files)

    def _remove_loose(self, file: PlannedFile, removal: Removal) -> bool:
        """Remove a leftover that needs no claim on an entry, if it still qualifies."""
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
        """Yield an entry's leftovers, or the entry itself; with `is_written` None, the leases are consulted."""
        hash_ = entry.hash
        if entry.is_link:
            return

        def written() -> bool:
            return self._leases.is_written(hash_) if is_written is None else is_written

        if entry.is_readable and not entry.is_finished:
            places = [hash_, f"{hash_}/{ARTIFACTS}", *(_folder(rank.name) for rank in entry.ranks)]
            if all(self._is_unchanged(place, DAY_SECS) for place in places) and not written():
                yield hash_, "unfinished"
            return
        yield from self._temporaries(f"{hash_}/", entry.files)
        yield from self._temporaries(f"{hash_}/{ARTIFACTS}/", entry.artifacts)
        for rank in entry.ranks:
            folder = _folder(rank.name)
            if not rank.has_manifest:
                if self._is_unchanged(folder, DAY_SECS) and not written():
                    yield folder, "rank"
                continue
            yield from self._temporaries(f"{folder}/", rank.files)
            unnamed = [name for name in rank.files if name.endswith(".next") and _is_unnamed_next(name, rank)]
            if unnamed and not written():
                yield from ((f"{folder}/{name}", "temporary") for name in unnamed)
        strays = [name for name in entry.artifacts.keys() - entry.named if is_hash(name[:64])]
        if strays and entry.is_readable and not written():
            # A writer may have published a manifest that names them since the walk.
            again = entry if is_written is False else view_entry(self._layout, hash_)
            if again.is_readable:
                yield from ((f"{hash_}/{ARTIFACTS}/{name}", "artifact") for name in sorted({*strays} - again.named))

    def _of_unit(self, key: str, files: tuple[str, ...]) -> Iterator[Leftover]:
        path = unit_path(key)
        if UNIT_FILE not in files:
            if self._is_unchanged(path, HOUR_SECS):
                yield path, "unit"
            return
        yield from self._temporaries(f"{path}/", files)
        artifacts = [name for name in files if is_hash(name[:64])]
        if len(artifacts) > 1 and self._is_unchanged(path, HOUR_SECS):
            with contextlib.suppress(CacheError):  # a damaged record could name any of them
                unit = read_sealed(self._layout.unit_dir(key) / UNIT_FILE, Unit)
                if unit is not None:
                    yield from ((f"{path}/{name}", "artifact") for name in artifacts if name != unit.artifact.file)

    def _of_lookup(self, entries: Mapping[str, EntryView]) -> Iterator[Leftover]:
        lookup = f"{self._base}lookup"
        for digest in names_in(lookup, follow=False):
            names = names_in(f"{lookup}/{digest}", follow=False)
            if not names and self._is_unchanged(f"lookup/{digest}", DAY_SECS):
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

    def _is_unchanged(self, path: str, secs: float) -> bool:
        return _is_unchanged(self._base + path, secs, self._now)


def unit_path(key: str) -> str:
    """Return the path of a unit relative to the cache folder."""
    return f"units/{key[:2]}/{key}"


def remove_leftovers(layout: CacheLayout, files: Iterable[PlannedFile], removal: Removal) -> int:
    """Remove the planned leftovers that still qualify, and return how many were removed."""
    return Leftovers(layout, LeaseTable(layout), now=time.time()).remove(files, removal)


def _is_whole(files: tuple[str, ...]) -> bool:
    """Return whether a unit's folder holds its record, one artifact and nothing else but a lock."""
    others = set(files) - {UNIT_FILE, _LOCK}
    return UNIT_FILE in files and len(others) == 1 and not others.pop().startswith(".")


def _is_dead(path: str, now: float) -> bool:
    """Return whether a temporary file or folder was left behind by its writer."""
    # The writer's process id may be from another machine or container, so the file must also be unchanged for a while.
    dead = writer_lives(path.rpartition("/")[2]) is False
    return _is_unchanged(path, _MINUTE_SECS if dead else HOUR_SECS, now)


def _is_unchanged(path: str, secs: float, now: float) -> bool:
    """Return whether a file or folder has been unchanged for `secs`; True if it no longer exists."""
    try:
        return now - os.lstat(path).st_mtime > secs
    except OSError:
        return True


def _is_unnamed_next(name: str, rank: RankView) -> bool:
    """Return whether a file is a `.next` that its manifest does not name; False without an intact manifest."""
    match = re.fullmatch(NEXT, name)
    if match is None or rank.manifest is None:
        return False
    record = rank.manifest.files.get(match["name"])
    return record is None or record.sha256 != match["digest"]


def _folder(name: RankName) -> str:
    return f"{name.hash}/rank_{name.rank}/{name.prefix}"
