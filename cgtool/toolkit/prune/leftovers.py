"""What nothing names any more, and what dead processes left. Must not import torch.

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

To rest is to be left unchanged. Whoever removes any of this looks again first (`cgtool.toolkit.prune.execute`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator

from cgtool.errors import CacheError
from cgtool.store.files import is_temporary, read_sealed
from cgtool.store.layout import ARTIFACTS, UNIT_FILE, CacheLayout, RankName, is_hash
from cgtool.store.leases import LeaseTable
from cgtool.store.pruned import forgotten, trash_dir
from cgtool.store.records import Manifest, Unit, read_manifest
from cgtool.store.walk import EntryView, RankView, view_entry
from cgtool.toolkit.prune.collect import CacheFacts, is_whole, names_in

#: (path below the cache folder, kind)
Leftover = tuple[str, str]

MINUTE_SECS, HOUR_SECS, DAY_SECS = 60.0, 3600.0, 86400.0

_WRITER = re.compile(r"\..*\.(?P<pid>[0-9]{1,10})\.[0-9a-f]+\.tmp")
_NEXT = re.compile(r"\.(?P<name>.+)\.(?P<digest>[0-9a-f]{64})\.next")
_FLAT = re.compile(r"(?P<hash>[0-9a-f]{64})-rank_(?P<rank>0|[1-9][0-9]*)-(?P<prefix>[^~]+)")


class LeftoverFinder:
    """Finds the leftovers of a cache.

    Args:
        facts: What the cache holds.
        leases: Who uses it.
        now: Seconds since the epoch; None for now.
    """

    def __init__(self, facts: CacheFacts, leases: LeaseTable, *, now: float | None = None) -> None:
        self._facts = facts
        self._leases = leases
        self._layout = facts.layout
        self._base = f"{facts.layout.base}/"
        self._now = time.time() if now is None else now
        #: What is behind a link is no leftover of this cache.
        self._has_state = not facts.layout.state_dir.is_symlink()

    def find(self) -> Iterator[Leftover]:
        """Yield leftovers, but units that are whole."""
        for name in sorted(_listed(str(trash_dir(self._layout)))) if self._has_state else ():
            yield f"state/trash/{name}", "trash"
        yield from self._temporaries("", self._facts.strays)
        for entry in self._facts.entries.values():
            yield from self._of_entry(entry)
        for key, files in self._facts.units.items():
            if not is_whole(files):
                yield from self._of_unit(f"units/{key[:2]}/{key}", key, files)
        yield from self._of_lookup()
        if self._has_state:
            yield from self._of_state()

    def unshared_units(self, gone: frozenset[str] = frozenset()) -> Iterator[Leftover]:
        """Yield the units that no entry shares; none where it is not known what every entry shares.

        Args:
            gone: The hashes of entries that go.
        """
        if not self._facts.readable:
            return
        shared = {name for hash_, e in self._facts.entries.items() if hash_ not in gone for name in e.artifacts}
        for key, files in self._facts.units.items():
            path = f"units/{key[:2]}/{key}"
            if UNIT_FILE in files and shared.isdisjoint(files) and self._rests(path, HOUR_SECS):
                yield path, "unit"

    def _rests(self, path: str, secs: float) -> bool:
        return rests(self._base + path, secs, self._now)

    def _temporaries(self, folder: str, names: Iterable[str]) -> Iterator[Leftover]:
        for name in names:
            if name[0] == "." and is_temporary(name) and is_dead(f"{self._base}{folder}{name}", self._now):
                yield folder + name, "temporary"

    def _of_entry(self, entry: EntryView) -> Iterator[Leftover]:
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
            really = named_artifacts(self._layout, hash_)
            for name in sorted(unnamed):
                if really is not None and name not in really:
                    yield f"{hash_}/{ARTIFACTS}/{name}", "artifact"

    def _of_rank(self, rank: RankView) -> Iterator[Leftover]:
        folder = _folder(rank.name)
        if not rank.has_manifest:
            if self._rests(folder, DAY_SECS) and not self._leases.is_written(rank.name.hash):
                yield folder, "rank"
            return
        yield from self._temporaries(f"{folder}/", rank.files)
        if any(name.endswith(".next") for name in rank.files) and not self._leases.is_written(rank.name.hash):
            manifest = trusted_manifest(self._layout, rank.name)
            for name in rank.files:
                if is_unnamed_next(name, manifest):
                    yield f"{folder}/{name}", "temporary"

    def _of_unit(self, path: str, key: str, files: list[str]) -> Iterator[Leftover]:
        if UNIT_FILE not in files:
            if self._rests(path, HOUR_SECS):
                yield path, "unit"
            return
        yield from self._temporaries(f"{path}/", files)
        artifacts = [name for name in files if is_hash(name[:64])]
        if len(artifacts) > 1 and self._rests(path, HOUR_SECS):
            current = unit_artifact(self._layout, key)
            for name in sorted(artifacts):
                if current is not None and name != current:
                    yield f"{path}/{name}", "artifact"

    def _of_lookup(self) -> Iterator[Leftover]:
        lookup = f"{self._base}lookup"
        for digest in sorted(_listed(lookup)):
            names = _listed(f"{lookup}/{digest}")
            if not names and self._rests(f"lookup/{digest}", DAY_SECS):
                yield f"lookup/{digest}", "lookup"
            for name in names:
                hash_ = name[:64]
                if is_hash(hash_) and hash_ not in self._facts.entries:
                    yield f"lookup/{digest}/{name}", "lookup"

    def _of_state(self) -> Iterator[Leftover]:
        state = f"{self._base}state"
        known = {rank.name.flat for entry in self._facts.entries.values() for rank in entry.ranks}
        for folder in ("used", "locks", "leases"):
            for name in sorted(_listed(f"{state}/{folder}")):
                flat = name.partition("~")[0]
                gone = flat not in self._facts.entries if is_hash(flat) else _is_flat(flat) and flat not in known
                if gone and not self._leases.is_used(flat[:64]):
                    yield f"state/{folder}/{name}", "state"
        yield from self._temporaries("state/pruned/", _listed(f"{state}/pruned"))
        for name in forgotten(self._layout, self._now):
            yield f"state/pruned/{name}", "state"


def is_dead(path: str, now: float) -> bool:
    """Return whether a temporary file or folder belongs to a process that is gone."""
    match = _WRITER.fullmatch(os.path.basename(path))  # noqa: PTH119 - paths are str all over prune
    # A number of a process says nothing of another machine's or container's, so that the file must rest as well.
    dead = match is not None and not _runs(int(match["pid"]))
    return rests(path, MINUTE_SECS if dead else HOUR_SECS, now)


def rests(path: str, secs: float, now: float) -> bool:
    """Return whether a file or folder was left unchanged for so long; True where it is gone."""
    try:
        return now - os.lstat(path).st_mtime > secs
    except OSError:
        return True


def named_artifacts(layout: CacheLayout, hash_: str) -> frozenset[str] | None:
    """Return the file names of all artifacts that an entry's manifests name as they are now.

    Args:
        layout: Where the cache lies.
        hash_: The entry.

    Returns:
        The names; None where a manifest cannot be trusted, so that nothing may be concluded.
    """
    entry = view_entry(layout, hash_)
    return entry.named if entry.is_readable else None


def is_unnamed_next(name: str, manifest: Manifest | None) -> bool:
    """Return whether a file is a `.next` that its manifest does not name; False where there is no such manifest."""
    match = _NEXT.fullmatch(name)
    if match is None or manifest is None:
        return False
    record = manifest.files.get(match["name"])
    return record is None or record.sha256 != match["digest"]


def trusted_manifest(layout: CacheLayout, name: RankName) -> Manifest | None:
    """Return a manifest; None where there is none that can be trusted."""
    try:
        return read_manifest(layout, name)
    except CacheError:
        return None


def unit_artifact(layout: CacheLayout, key: str) -> str | None:
    """Return the file name of the artifact that a unit's record names; None where it cannot be trusted."""
    try:
        unit = read_sealed(layout.unit_dir(key) / UNIT_FILE, Unit)
    except CacheError:
        return None
    return None if unit is None else unit.artifact.file


def _folder(name: RankName) -> str:
    return f"{name.hash}/rank_{name.rank}/{name.prefix}"


def _is_flat(text: str) -> bool:
    return _FLAT.fullmatch(text) is not None


def _listed(folder: str) -> list[str]:
    try:
        return names_in(folder)
    except OSError:
        return []


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it runs, and is another user's
        return True
    return True
