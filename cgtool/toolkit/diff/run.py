"""`diff`: the differences between two caches, entries or bundles, or between an entry and this machine.

Entries of two caches are paired by hash, then by model. `cgtool.toolkit.places` defines how a side is named on the
command line. Prints nothing; importable without torch.
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
    from cgtool.store.machine import Machine

SCHEMA = 1


class DiffReport(NamedTuple):
    """The differences between the sides named `old` and `new`, root causes first."""

    old: str
    new: str
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return the document that `diff --json` prints."""
        differences = [asdict(difference) for difference in self.differences]
        return {"schema": SCHEMA, "equal": self.equal, "differences": differences}


@os_errors_as_cache_errors()
def diff(old: str, new: str | None = None, *, here: bool = False, cache_dir: Path | None = None) -> DiffReport:
    """Compare two sides.

    Args:
        old: The first side; see `cgtool.toolkit.places` for its grammar.
        new: The second side; None with `here`.
        here: Compare the first side, an entry, with this machine.
        cache_dir: The cache in which hashes are looked up; None means the default cache.

    Raises:
        UsageError: A side does not exist or is ambiguous, or an entry is compared with a cache that has no entry of
            its model.
        CacheError: A side cannot be read or trusted, or another system wrote it.
        RefusedError: A bundle is incomplete.
    """
    if here == (new is not None):
        raise UsageError("Name two sides, A and B, or one entry and --here.")
    with contextlib.ExitStack() as stack:
        left = stack.enter_context(open_side(old, cache_dir))
        right = None if new is None else stack.enter_context(open_side(new, cache_dir))
        if right is None:
            from cgtool.store.machine import this_machine  # imported lazily: takes longer than comparing two entries

            entry = _single_entry(left)
            return DiffReport(
                _label(left, entry), "this machine", tuple(machine_differences(entry.key, this_machine()))
            )
        if left.hash is None and right.hash is None:
            return DiffReport(left.text, right.text, tuple(compare_caches(left, right)))
        first = _single_entry(left) if right.hash is None else _counterpart(left, _single_entry(right))
        second = _counterpart(right, first)
        return DiffReport(_label(left, first), _label(right, second), tuple(compare_entries(first, second)))


def _label(side: Side, entry: EntrySide) -> str:
    """Return the name of a side's entry in messages."""
    return entry.label if entry.hash.startswith(side.text.lower()) else f"{entry.label} of {side.text}"


def _single_entry(side: Side) -> EntrySide:
    """Return the entry that a side names, or the only entry of a cache."""
    if side.hash is not None:
        return side.entries[side.hash]
    if len(side.entries) == 1:
        return next(iter(side.entries.values()))
    raise _not_one(side, len(side.entries))


def _counterpart(side: Side, entry: EntrySide) -> EntrySide:
    """Return the entry that a side names; of a cache, the entry with the same hash or the only one of the model."""
    hash_ = entry.hash if side.hash is None else side.hash
    if hash_ in side.entries:
        return side.entries[hash_]
    candidates = [other for other in side.entries.values() if other.model_identity == entry.model_identity]
    if entry.model_identity is not None and len(candidates) == 1:
        return candidates[0]
    raise _not_one(side, len(candidates))


def _not_one(side: Side, count: int) -> UsageError:
    problem = f"{side.root} holds {count or 'no'} {'entry' if count == 1 else 'entries'} to compare with."
    return UsageError(f"{problem} Name one as {side.root}:HASH; `cgtool inspect cache` lists them.", path=side.root)


def compare_caches(old: Side, new: Side) -> list[Difference]:
    """Return the differences between two caches.

    Entries with the same hash come first, then pairs of entries that are the only ones of their model on either side,
    then entries that only one side has. An entry that cannot be read is a difference.
    """
    found: list[Difference] = []
    for hash_, entry in old.entries.items():
        if hash_ in new.entries:
            found += _compare_pair(entry, new.entries[hash_], f"entry {entry.label}")
    left = {hash_: entry for hash_, entry in old.entries.items() if hash_ not in new.entries}
    right = {hash_: entry for hash_, entry in new.entries.items() if hash_ not in old.entries}
    old_models, new_models = _unique_by_model(left.values()), _unique_by_model(right.values())
    one_sided: list[Difference] = []
    for model, entry in old_models.items():
        if model in new_models:
            other = new_models[model]
            labels = entry.label if entry.label == other.label else f"{entry.label} → {other.label}"
            found += _compare_pair(entry, other, f"{entry.model}, entry {labels}")
            sentence = f"{_entry_text(entry)} is only in the first, and {other.label} only in the second"
            one_sided.append(_entry_difference(entry.hash, other.hash, sentence))
            del left[entry.hash], right[other.hash]
    for hash_, entry in left.items():
        one_sided.append(_entry_difference(hash_, None, f"{_entry_text(entry)} {only_in(gone=True)}"))
    for hash_, entry in right.items():
        one_sided.append(_entry_difference(None, hash_, f"{_entry_text(entry)} {only_in(gone=False)}"))
    return [*found, *one_sided]


def _unique_by_model(entries: Iterable[EntrySide]) -> dict[Hashable, EntrySide]:
    """Return the entries that are the only ones of their model, by model."""
    groups: dict[Hashable, list[EntrySide]] = {}
    for entry in entries:
        if entry.model_identity is not None:
            groups.setdefault(entry.model_identity, []).append(entry)
    return {model: group[0] for model, group in groups.items() if len(group) == 1}


def _compare_pair(old: EntrySide, new: EntrySide, label: str) -> list[Difference]:
    try:
        return located(compare_entries(old, new), label)
    except CacheError as error:
        return [_entry_difference(old.hash, new.hash, f"{label} cannot be compared: {error}")]


def _entry_text(entry: EntrySide) -> str:
    return f"entry {entry.label} ({entry.model})"


def _entry_difference(old: str | None, new: str | None, sentence: str) -> Difference:
    return Difference(what="entry", path=str(old or new), old=old, new=new, sentence=sentence)


def machine_differences(key: Key, machine: Machine) -> list[Difference]:
    """Return the factors in which a machine differs from the one that compiled an entry."""
    from cgtool.store.machine import differences_here

    return factor_differences(differences_here(key, machine))


class Side(NamedTuple):
    """One side of a comparison: a cache with its entries, or one entry of it (`hash`)."""

    text: str
    root: Path
    entries: Mapping[str, EntrySide]
    hash: str | None


@contextlib.contextmanager
def open_side(text: str, cache_dir: Path | None = None) -> Iterator[Side]:
    """Yield the side that `text` names (see `cgtool.toolkit.places`); a bundle or store of one entry is that entry."""
    with open_place(text, cache_dir) as place:
        layout, hash_ = place.layout, place.hash
        entries = {other: EntrySide(layout, other) for other in layout.hashes()}
        if place.is_copy and len(entries) == 1:
            (hash_,) = entries
        elif not place.is_copy and not layout.base.is_dir():
            message = f"{text} does not hold a cgtool cache. Name a folder with {CACHE_FOLDER}, or an entry in it."
            raise CacheError(message, path=layout.root)
        elif not entries:
            check_own(layout.root)
        yield Side(place.text, layout.root, entries, hash_)
