"""`diff`: what differs between two caches, entries or bundles, or between an entry and this machine.

Caches and entries are told apart by their names and paired by what they have in common.
Prints nothing; importable without torch. How a user names a side: `cgtool.toolkit.places`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import asdict

from cgtool.errors import CacheError, UsageError
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.layout import CACHE_FOLDER
from cgtool.store.records import Key
from cgtool.toolkit.diff.entries import EntrySide, compare_entries, factor_differences
from cgtool.toolkit.diff.records import Difference, located, only_in
from cgtool.toolkit.foreign.detect import check_own
from cgtool.toolkit.places import open_place

if TYPE_CHECKING:
    from cgtool.store.machine import Machine  # costs more to load than two entries to compare

SCHEMA = 1


class DiffReport(NamedTuple):
    """What differs between two sides, of which people are told `old` and `new`: the most telling first."""

    old: str
    new: str
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return the document that `diff --json` prints."""
        return {"schema": SCHEMA, "equal": self.equal, "differences": [asdict(one) for one in self.differences]}


@os_errors_as_cache_errors()
def diff(old: str, new: str | None = None, *, here: bool = False, cache_dir: Path | None = None) -> DiffReport:
    """Compare two sides.

    Args:
        old: The first side, as `cgtool.toolkit.places` has it.
        new: The second side; None with `here`.
        here: Compare the first side, an entry, with this machine.
        cache_dir: The cache in which hashes are looked up; None means the one that `warm` fills.

    Raises:
        UsageError: A side names nothing or several things, or an entry is compared with a cache of none of its model.
        CacheError: A side cannot be read or trusted, or another system wrote it.
        RefusedError: A bundle is not whole.
    """
    if here == (new is not None):
        raise UsageError("Name two sides, A and B, or one entry and --here.")
    with contextlib.ExitStack() as stack:
        left = stack.enter_context(open_side(old, cache_dir))
        right = None if new is None else stack.enter_context(open_side(new, cache_dir))
        if right is None:
            return _with_machine(left)
        if left.hash is None and right.hash is None:
            return DiffReport(left.text, right.text, tuple(compare_caches(left, right)))
        first = _chosen(left) if right.hash is None else _like(left, _chosen(right))
        second = _like(right, first)
        return DiffReport(_label(left, first), _label(right, second), tuple(compare_entries(first, second)))


def _label(side: Side, entry: EntrySide) -> str:
    """What people are told of an entry of a side."""
    return entry.label if entry.hash.startswith(side.text.lower()) else f"{entry.label} of {side.text}"


def _chosen(side: Side) -> EntrySide:
    """The entry that a side is; that of a cache where it has but one."""
    if side.hash is not None:
        return side.entries[side.hash]
    if len(side.entries) == 1:
        return next(iter(side.entries.values()))
    raise _not_one(side, len(side.entries))


def _like(side: Side, entry: EntrySide) -> EntrySide:
    """The entry that a side is; of a cache the one of the same hash, else the only one of the same model."""
    hash_ = entry.hash if side.hash is None else side.hash
    if hash_ in side.entries:
        return side.entries[hash_]
    fitting = [other for other in side.entries.values() if other.likeness == entry.likeness]
    if entry.likeness is not None and len(fitting) == 1:
        return fitting[0]
    raise _not_one(side, len(fitting))


def _not_one(side: Side, count: int) -> UsageError:
    several = f"{side.root} holds {count or 'no'} {'entry' if count == 1 else 'entries'} to compare with."
    return UsageError(f"{several} Name one as {side.root}:HASH; `cgtool inspect cache` lists them.", path=side.root)


def compare_caches(old: Side, new: Side) -> list[Difference]:
    """Return what differs between two caches.

    Entries of one hash come first; then each pair of entries of which either side has only one of their model, down to
    the factor; then what only one side has. An entry that cannot be read is a difference of its own.
    """
    found: list[Difference] = []
    for hash_, one in old.entries.items():
        if hash_ in new.entries:
            found += _compared(one, new.entries[hash_], f"entry {one.label}")
    left = {hash_: entry for hash_, entry in old.entries.items() if hash_ not in new.entries}
    right = {hash_: entry for hash_, entry in new.entries.items() if hash_ not in old.entries}
    olds, news = _only_ones(left.values()), _only_ones(right.values())
    alone: list[Difference] = []
    for likeness, one in olds.items():
        if likeness in news:
            other = news[likeness]
            named = one.label if one.label == other.label else f"{one.label} → {other.label}"
            found += _compared(one, other, f"{one.model}, entry {named}")
            said = f"{_words(one)} is only in the first, and {other.label} only in the second"
            alone.append(_entry(one.hash, other.hash, said))
            del left[one.hash], right[other.hash]
    alone += [_entry(hash_, None, f"{_words(entry)} {only_in(gone=True)}") for hash_, entry in left.items()]
    alone += [_entry(None, hash_, f"{_words(entry)} {only_in(gone=False)}") for hash_, entry in right.items()]
    return [*found, *alone]


def _only_ones(entries: Iterable[EntrySide]) -> dict[Hashable, EntrySide]:
    """Entries by what they have in common with others, without those of which there are several."""
    groups: dict[Hashable, list[EntrySide]] = {}
    for entry in entries:
        if entry.likeness is not None:
            groups.setdefault(entry.likeness, []).append(entry)
    return {likeness: group[0] for likeness, group in groups.items() if len(group) == 1}


def _compared(old: EntrySide, new: EntrySide, label: str) -> list[Difference]:
    try:
        return located(compare_entries(old, new), label)
    except CacheError as error:
        return [_entry(old.hash, new.hash, f"{label} cannot be compared: {error}")]


def _words(entry: EntrySide) -> str:
    return f"entry {entry.label} ({entry.model})"


def _entry(old: str | None, new: str | None, sentence: str) -> Difference:
    return Difference(what="entry", path=str(old or new), old=old, new=new, sentence=sentence)


def _with_machine(side: Side) -> DiffReport:
    from cgtool.store.machine import this_machine  # costs more to load than two entries to compare

    entry = _chosen(side)
    found = machine_differences(entry.key, this_machine())
    return DiffReport(_label(side, entry), "this machine", tuple(found))


def machine_differences(key: Key, machine: Machine) -> list[Difference]:
    """Return in which factors a machine differs from the one on which an entry was compiled."""
    from cgtool.store.machine import differences_here

    return factor_differences(differences_here(key, machine))


class Side(NamedTuple):
    """One side of a comparison: a cache and what it holds, or (`hash`) one entry of it."""

    text: str
    root: Path
    entries: Mapping[str, EntrySide]
    hash: str | None


@contextlib.contextmanager
def open_side(text: str, cache_dir: Path | None = None) -> Iterator[Side]:
    """Yield what `text` names (`cgtool.toolkit.places`); a bundle or a store of one entry is that entry."""
    with open_place(text, cache_dir) as place:
        layout, hash_ = place.layout, place.hash
        entries = {other: EntrySide(layout, other) for other in layout.hashes()}
        if place.is_copy and len(entries) == 1:
            (hash_,) = entries
        elif not place.is_copy and not layout.base.is_dir():
            message = f"{text} holds no cache of cgtool. Name a folder that holds {CACHE_FOLDER}, or an entry in it."
            raise CacheError(message, path=layout.root)
        elif not entries:
            check_own(layout.root)
        yield Side(place.text, layout.root, entries, hash_)
