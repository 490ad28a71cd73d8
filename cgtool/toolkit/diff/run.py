"""`diff`: what differs between two caches, entries or bundles, or between an entry and this machine.

Caches and entries are told apart by their names and paired by what they have in common, whichever system wrote them.
Prints nothing; importable without torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec.structs import asdict

from cgtool.errors import CacheError, UsageError
from cgtool.plan.pieces import Json
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.records import Factor, Key
from cgtool.toolkit.diff.entries import EntrySide, factor_differences
from cgtool.toolkit.diff.records import Difference, located, only_in
from cgtool.toolkit.diff.sides import Comparable, Side, open_side

if TYPE_CHECKING:
    from cgtool.store.machine import Machine  # costs more to load than two entries to compare

SCHEMA = 1

#: Factors of which the machine's None means that only torch could say, or that a machine without one serves as well.
_UNKNOWN = frozenset({"compiler"})


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
        old: The first side, as `cgtool.toolkit.diff.sides` reads it.
        new: The second side; None with `here`.
        here: Compare the first side, an entry, with this machine.
        cache_dir: The cache in which hashes are looked up; None means the one that `warm` fills.

    Raises:
        UsageError: A side names nothing or several things, the sides are of several systems, or an entry is compared
            with a cache of none of its model.
        CacheError: A side cannot be read or trusted.
        RefusedError: A bundle is not whole.
    """
    if here == (new is not None):
        raise UsageError("Name two sides, A and B, or one entry and --here.")
    with contextlib.ExitStack() as stack:
        left = stack.enter_context(open_side(old, cache_dir))
        right = None if new is None else stack.enter_context(open_side(new, cache_dir))
        strange = [side.system for side in (left, right) if side is not None and side.system != "cgtool"]
        if strange and (right is None or left.system != right.system):
            message = (
                f"What {' and '.join(strange)} wrote is compared with what the same system wrote alone. Name two sides "
                "of one kind; `cgtool inspect cache PATH` tells what wrote a path."
            )
            raise UsageError(message, actual=[old, new])
        if right is None:
            return _with_machine(left)
        if left.hash is None and right.hash is None:
            return DiffReport(old, right.text, tuple(compare_caches(left, right)))
        first = _chosen(left) if right.hash is None else _like(left, _chosen(right))
        second = _like(right, first)
        return DiffReport(_label(left, first), _label(right, second), tuple(first.differences(second)))


def _label(side: Side, entry: Comparable) -> str:
    """What people are told of an entry of a side."""
    if side.system != "cgtool":
        return side.text
    return entry.label if entry.hash.startswith(side.text.lower()) else f"{entry.label} of {side.text}"


def _chosen(side: Side) -> Comparable:
    """The entry that a side is; that of a cache where it has but one."""
    if side.hash is not None:
        return side.entries[side.hash]
    if len(side.entries) == 1:
        return next(iter(side.entries.values()))
    raise _not_one(side, len(side.entries))


def _like(side: Side, entry: Comparable) -> Comparable:
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
    message = f"{several} Name one as {side.root}:HASH; `cgtool inspect cache` lists them."
    return UsageError(message, path=side.root)


def compare_caches(old: Side, new: Side) -> list[Difference]:
    """Return what differs between two caches of one system.

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
            found += _compared(one, other, f"{one.model}, entry {named}" if one.model else f"entry {named}")
            if old.root.is_dir() and new.root.is_dir():  # the names of files are nothing of what they hold
                said = f"{_words(one)} is only in the first, and {other.label} only in the second"
                alone.append(_entry(one.hash, other.hash, said))
            del left[one.hash], right[other.hash]
    alone += [_entry(hash_, None, f"{_words(entry)} {only_in(gone=True)}") for hash_, entry in left.items()]
    alone += [_entry(None, hash_, f"{_words(entry)} {only_in(gone=False)}") for hash_, entry in right.items()]
    return [*found, *alone]


def _only_ones(entries: Iterable[Comparable]) -> dict[Hashable, Comparable]:
    """Entries by what they have in common with others, without those of which there are several."""
    groups: dict[Hashable, list[Comparable]] = {}
    for entry in entries:
        if entry.likeness is not None:
            groups.setdefault(entry.likeness, []).append(entry)
    return {likeness: group[0] for likeness, group in groups.items() if len(group) == 1}


def _compared(old: Comparable, new: Comparable, label: str) -> list[Difference]:
    try:
        return located(old.differences(new), label)
    except CacheError as error:
        return [_entry(old.hash, new.hash, f"{label} cannot be compared: {error}")]


def _words(entry: Comparable) -> str:
    return f"entry {entry.label} ({entry.model})" if entry.model else f"entry {entry.label}"


def _entry(old: str | None, new: str | None, sentence: str) -> Difference:
    return Difference(what="entry", path=str(old or new), old=old, new=new, sentence=sentence)


def _with_machine(side: Side) -> DiffReport:
    from cgtool.store.machine import this_machine  # costs more to load than two entries to compare

    entry = cast("EntrySide", _chosen(side))
    found = machine_differences(entry.key, this_machine())
    return DiffReport(_label(side, entry), "this machine", tuple(found))


def machine_differences(key: Key, machine: Machine) -> list[Difference]:
    """Return in which factors a machine differs from the one on which an entry was compiled.

    What the machine cannot say without torch is no difference, nor is a C++ compiler that it lacks.
    """
    stored = key.factors
    now = {
        name: _known(stored[name], value) if name == "target" else value
        for name, value in machine.factors.items()
        if name in stored and not (value is None and name in _UNKNOWN)
    }
    sides = [[Factor(name=name, value=values[name]) for name in now] for values in (stored, now)]
    return factor_differences(Key.of(sides[0]), Key.of(sides[1]))


def _known(stored: Json, value: Json) -> Json:
    """A machine's value with what it does not know taken as it is stored."""
    if value is None:
        return stored
    if isinstance(value, dict) and isinstance(stored, dict):
        known = {name: now for name, now in value.items() if name in stored or now is not None}
        return {name: _known(stored.get(name), now) for name, now in known.items()}
    return value
