"""`diff`: what differs between two caches, entries or bundles, or between an entry and this machine.

Owns what the user asked (`DiffOptions`) and what was found (`DiffReport`); what other systems wrote is compared by
`cgtool.toolkit.diff.run_foreign`, to the same records. Prints nothing; importable without torch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgtool.errors import UsageError
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.layout import CacheLayout, short
from cgtool.toolkit.diff.caches import compare_caches, same_model
from cgtool.toolkit.diff.entries import EntrySide, compare_entries
from cgtool.toolkit.diff.here import machine_differences
from cgtool.toolkit.diff.records import Difference
from cgtool.toolkit.diff.run_foreign import foreign_differences
from cgtool.toolkit.diff.sides import Side, open_side

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """What the user asked of `diff`.

    Args:
        old: The first side, as `cgtool.toolkit.diff.sides` reads it.
        new: The second side; None with `here`.
        here: Compare the first side, an entry, with this machine.
        cache_dir: The cache in which hashes are looked up; None means the one that `warm` fills.
    """

    old: str
    new: str | None = None
    here: bool = False
    cache_dir: Path | None = None


@dataclass(frozen=True, kw_only=True)
class DiffReport:
    """What differs.

    Args:
        old: What the first side is, for people.
        new: What the second side is, for people.
        differences: The most telling first; empty where the sides are equal.
    """

    old: str
    new: str
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return the document that `diff --json` prints."""
        return {
            "schema": SCHEMA,
            "equal": self.equal,
            "differences": [difference.to_json() for difference in self.differences],
        }


@os_errors_as_cache_errors()
def diff(options: DiffOptions) -> DiffReport:
    """Compare two sides.

    Args:
        options: What the user asked.

    Returns:
        What differs, the most telling first.

    Raises:
        UsageError: A side names nothing or several things, or an entry is compared with a cache of none of its model.
        CacheError: A side cannot be read or trusted.
        RefusedError: A bundle is not whole.
    """
    if options.here == (options.new is not None):
        message = "Name two sides, A and B, or one entry and --here."
        raise UsageError(message)
    foreign = foreign_differences(options.old, options.new, cache_dir=options.cache_dir)
    if foreign is not None:
        return DiffReport(old=options.old, new=options.new or "", differences=tuple(foreign))
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(open_side(options.old, options.cache_dir))
        if options.new is None:
            return _with_machine(_chosen(old), options.old)
        new = stack.enter_context(open_side(options.new, options.cache_dir))
        return _between(old, new, options.old, options.new)


def _with_machine(entry: EntrySide, text: str) -> DiffReport:
    from cgtool.store.machine import this_machine  # costs more to load than two entries to compare

    found = machine_differences(entry.key, this_machine())
    return DiffReport(old=_label(entry, text), new="this machine", differences=tuple(found))


def _between(old: Side, new: Side, old_text: str, new_text: str) -> DiffReport:
    if old.hash is None and new.hash is None:
        found = compare_caches(old.layout, new.layout)
        return DiffReport(old=old_text, new=new_text, differences=tuple(found))
    first = _chosen(old) if new.hash is None else _like(old, _chosen(new))
    second = _like(new, first)
    found = compare_entries(first, second)
    return DiffReport(old=_label(first, old_text), new=_label(second, new_text), differences=tuple(found))


def _chosen(side: Side) -> EntrySide:
    """Return the entry that a side is; that of a cache where it has but one.

    Raises:
        UsageError: It has none, or several.
    """
    if side.hash is not None:
        return EntrySide(side.layout, side.hash)
    hashes = side.layout.hashes()
    if len(hashes) == 1:
        return EntrySide(side.layout, hashes[0])
    raise UsageError(_which(side.layout, len(hashes)), path=side.layout.root)


def _like(side: Side, entry: EntrySide) -> EntrySide:
    """Return the entry that a side is; of a cache the one of the same hash, else the only one of the same model.

    Raises:
        UsageError: It has none, or several.
    """
    if side.hash is not None:
        return EntrySide(side.layout, side.hash)
    hashes = side.layout.hashes()
    if entry.hash in hashes:
        return EntrySide(side.layout, entry.hash)
    model = same_model(entry)
    fitting = [other for hash_ in hashes if same_model(other := EntrySide(side.layout, hash_)) == model]
    if model is not None and len(fitting) == 1:
        return fitting[0]
    raise UsageError(_which(side.layout, len(fitting)), path=side.layout.root)


def _which(layout: CacheLayout, count: int) -> str:
    several = f"{layout.root} holds {count or 'no'} {'entry' if count == 1 else 'entries'} to compare with."
    return f"{several} Name one as {layout.root}:HASH; `cgtool inspect cache` lists them."


def _label(entry: EntrySide, text: str) -> str:
    label = short(entry.hash)
    return label if entry.hash.startswith(text.lower()) else f"{label} of {text}"
