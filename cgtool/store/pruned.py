"""What prunes removed, and how often that was missed since. Must not import torch.

For each digest of cheap facts that led to an entry which a prune removed::

    state/pruned/<digest>.json      the entries, sealed
    state/pruned/<digest>.missed    one byte for each lookup of that digest that ended in a miss since

A lookup that finds nothing costs one `open` more for this, and one that finds something costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import asdict

from cgtool.errors import CacheError
from cgtool.plan.grammar import Digest, Record
from cgtool.plan.pieces import Json
from cgtool.records import dataclass
from cgtool.store.descriptors import opened
from cgtool.store.files import touch, write_atomic
from cgtool.store.layout import CacheLayout, check_hash, is_hash, short
from cgtool.store.sealing import Sealed, read_sealed, seal

#: Entries that a record names: the last ones.
_MOST = 20
#: After so long nobody misses it any more.
FORGET_SECS = 180 * 86400.0


class PrunedEntry(Record, frozen=True, kw_only=True):
    """An entry that a prune removed.

    Args:
        hash: Its hash.
        model: What people call the model.
        when: When it was removed, in UTC.
        why: The sentence of the rule that chose it.
    """

    hash: Digest
    model: str
    when: str
    why: str


class PrunedEntries(Sealed, frozen=True, kw_only=True, tag="pruned-2"):
    """`state/pruned/<digest>.json`: what prunes removed, the last removed last."""

    entries: tuple[PrunedEntry, ...]


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What prunes removed of one model, and how often it was missed.

    Args:
        lookup: The digest of cheap facts.
        entries: The entries, the last removed last; one that is in the cache again is not among them.
        misses: How many lookups ended in a miss since the first of them was removed.
        last_missed: When the last of those was, seconds since the epoch; None where there was none.
    """

    lookup: str
    entries: tuple[PrunedEntry, ...]
    misses: int
    last_missed: float | None

    @property
    def sentence(self) -> str:
        """Which entry was removed last, when and why: a reason of a miss."""
        last = self.entries[-1]
        return f"entry {short(last.hash)} was pruned on {last.when[:10]}: {last.why}"

    def to_json(self) -> Json:
        """Return the record as JSON."""
        return {
            "lookup": self.lookup,
            "entries": [asdict(entry) for entry in self.entries],
            "misses": self.misses,
            "last_missed": self.last_missed,
        }


def note_pruned(layout: CacheLayout, removed: Mapping[str, Iterable[PrunedEntry]]) -> None:
    """Remember entries that are about to be removed.

    Args:
        layout: Where the cache lies.
        removed: By the digest of cheap facts that leads to them.

    Raises:
        CacheError: It cannot be written.
    """
    for digest, entries in removed.items():
        new = {entry.hash: entry for entry in entries}
        older = [entry for entry in _entries(layout, digest) if entry.hash not in new]
        listed = PrunedEntries(entries=(*older, *new.values())[-_MOST:])
        touch(_folder(layout) / f"{check_hash(digest)}.missed")
        write_atomic(_folder(layout) / f"{digest}.json", seal(listed))


def count_miss(layout: CacheLayout, digest: str) -> Pruned | None:
    """Count a lookup that ended in a miss, if a prune may be why. Never raises on account of the disk.

    Args:
        layout: Where the cache lies.
        digest: Of the cheap facts that nothing was found for.

    Returns:
        What prunes removed of it; None where they removed nothing.
    """
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
    try:
        with opened(os.open, f"{_folder(layout)}/{digest}.missed", flags) as descriptor:
            os.write(descriptor, b".")
    except FileNotFoundError:
        return None
    except OSError:  # a read-only cache: not counted, and told all the same
        pass
    return pruned(layout, digest)


def pruned(layout: CacheLayout, digest: str) -> Pruned | None:
    """Return what prunes removed of a model; None where they removed nothing that is still missing.

    Args:
        layout: Where the cache lies.
        digest: Of the model's cheap facts.
    """
    entries = tuple(entry for entry in _entries(layout, digest) if not layout.key_file(entry.hash).exists())
    if not entries:
        return None
    misses, last_missed = 0, None
    with contextlib.suppress(OSError):
        status = (_folder(layout) / f"{digest}.missed").stat()
        misses, last_missed = status.st_size, status.st_mtime if status.st_size else None
    return Pruned(lookup=digest, entries=entries, misses=misses, last_missed=last_missed)


def all_pruned(layout: CacheLayout) -> tuple[Pruned, ...]:
    """Return what prunes removed and is still missing, the most missed first."""
    digests = [name.removesuffix(".json") for name in _names(layout) if name.endswith(".json")]
    found = [record for digest in digests if is_hash(digest) and (record := pruned(layout, digest)) is not None]
    return tuple(sorted(found, key=lambda record: (-record.misses, record.lookup)))


def forgotten(layout: CacheLayout, now: float | None = None) -> list[str]:
    """Return the names in `state/pruned` that nobody asked for in half a year.

    Args:
        layout: Where the cache lies.
        now: Seconds since the epoch; None for now.
    """
    old = (time.time() if now is None else now) - FORGET_SECS
    ages: dict[str, float] = {}
    for name in _names(layout):
        with contextlib.suppress(OSError):
            digest = name.partition(".")[0]
            ages[digest] = max(ages.get(digest, 0.0), (_folder(layout) / name).stat().st_mtime)
    return sorted(name for name in _names(layout) if ages.get(name.partition(".")[0], old) < old and name[0] != ".")


def _entries(layout: CacheLayout, digest: str) -> tuple[PrunedEntry, ...]:
    """The entries of a record; none where it is missing or cannot be trusted."""
    try:
        record = read_sealed(_folder(layout) / f"{digest}.json", PrunedEntries)
    except CacheError:
        return ()
    return () if record is None else record.entries


def _names(layout: CacheLayout) -> list[str]:
    try:
        return [] if _folder(layout).is_symlink() else sorted(os.listdir(_folder(layout)))  # noqa: PTH208 - names alone
    except OSError:
        return []


def _folder(layout: CacheLayout) -> Path:
    return layout.state_dir / "pruned"
