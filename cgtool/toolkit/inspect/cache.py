"""`inspect cache`: what a cache holds, ours or another system's. Prints nothing; importable without torch.

JSON of ours: what `cgtool.toolkit.listing` says of the cache and of each entry that is shown, and of the entries that
pass the filters (all of them, and not only those that `limit` leaves)::

    "num_entries": int         how many entries the cache has
    "matching": int            how many of them pass
    "matching_bytes": int      what those take on the disk, files that they share once
    "unshared_bytes": int      what they would take if each piece and shape had a file of its own
    "saved_secs": float        seconds of compiling that the processes which loaded them did without

and of another system's: what `cgtool.toolkit.foreign.records` says of the cache, with the entries that are shown,
`num_entries`, `matching`, and `num_problems`, how many problems the entries that pass have.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec

from cgtool.errors import UsageError
from cgtool.store.layout import CacheLayout, resolve_root
from cgtool.toolkit.filters import parse_filter, parse_order
from cgtool.toolkit.foreign.detect import check_known, read_foreign
from cgtool.toolkit.foreign.records import SCHEMA, ForeignCache, ForeignEntry, foreign_json
from cgtool.toolkit.scan import scan, with_artifacts

if TYPE_CHECKING:
    from cgtool.toolkit.listing import CacheListing, EntryListing

#: The fields of `cgtool.toolkit.filters` that entries of other systems have; their hash is their name.
FOREIGN_FIELDS = ("hash", "prefix", "artifacts", "size", "created", "last_used")
_FIELD = re.compile(r"\s*([A-Za-z_]*)")
_EPOCH = "1970-01-01T00:00:00.000Z"


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What the user asked of `inspect cache`.

    Args:
        path: The cache's root, or another system's folder or file; None means the cache that `warm` fills.
        filters: All of which an entry must pass, see `cgtool.toolkit.filters`.
        sort: A field, or one with ":asc" or ":desc"; None is by hash, rank and prefix.
        limit: How many entries to show at most; None for all.
    """

    path: Path | None = None
    filters: Sequence[str] = ()
    sort: str | None = None
    limit: int | None = None

    def choose(self, entries: Sequence[EntryListing], now: float) -> tuple[list[EntryListing], list[EntryListing]]:
        """Return the entries that pass the filters, and those of them that are shown.

        Raises:
            UsageError: A filter or the order is outside of its grammar.
        """
        passes = [parse_filter(expression, now=now) for expression in self.filters]
        order = list if self.sort is None else parse_order(self.sort)
        matching = [entry for entry in entries if all(test(entry) for test in passes)]
        return matching, order(matching)[: self.limit]


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """What a cache of cgtool's holds, and when that was looked at.

    Args:
        listing: The cache, with the entries that are shown.
        num_entries: How many it has in all.
        matching: How many pass the filters.
        matching_bytes: What those take on the disk.
        unshared_bytes: What they would take without sharing.
        saved_secs: Seconds of compiling that their hits did without.
        now: Seconds since the epoch.
    """

    listing: CacheListing
    num_entries: int
    matching: int
    matching_bytes: int
    unshared_bytes: int
    saved_secs: float
    now: float

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect cache --json` prints, but for its entries."""
        return {
            **self.listing.to_json(),
            "num_entries": self.num_entries,
            "matching": self.matching,
            "matching_bytes": self.matching_bytes,
            "unshared_bytes": self.unshared_bytes,
            "saved_secs": self.saved_secs,
        }

    def entries_json(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of the document, each with its artifacts as its manifest has them at this moment."""
        layout = CacheLayout(root=self.listing.root)
        for entry in self.listing.entries:
            yield dict(with_artifacts(layout, entry).to_json())


@dataclass(frozen=True, kw_only=True)
class ForeignCacheReport:
    """What another system's cache holds, and when that was looked at.

    Args:
        cache: The cache, as it is read.
        shown: The entries that are shown.
        matching: How many pass the filters.
        num_problems: How many problems those have.
        now: Seconds since the epoch.
    """

    cache: ForeignCache
    shown: tuple[ForeignEntry, ...]
    matching: int
    num_problems: int
    now: float

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect cache --json` prints, but for its entries."""
        return {
            "schema": SCHEMA,
            **foreign_json(msgspec.structs.replace(self.cache, entries=())),
            "num_entries": len(self.cache.entries),
            "matching": self.matching,
            "num_problems": self.num_problems,
        }

    def entries_json(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of the document."""
        return map(foreign_json, self.shown)


def inspect_cache(options: CacheOptions) -> CacheReport | ForeignCacheReport:
    """List the entries of a cache, whichever system wrote it.

    Args:
        options: What the user asked.

    Returns:
        The entries; none where the default cache does not exist yet.

    Raises:
        UsageError: A filter or the order is outside of its grammar, or names a field that such entries lack.
        CacheError: `path` is no folder, cannot be listed, or holds other things than a cache.
    """
    now = time.time()
    cache = read_foreign(options.path)
    if cache is not None:
        return _inspect_foreign(cache, options, now)
    options.choose((), now)  # wrong usage is told before a large cache is read
    root = resolve_root(options.path)
    # A cache that was named must be there; the default one may wait for its first warm.
    listing = scan(root, missing_ok=options.path is None, artifacts=False)
    if not listing.entries:
        check_known(root)
    matching, shown = options.choose(listing.entries, now)
    return CacheReport(
        listing=replace(listing, entries=tuple(shown)),
        num_entries=len(listing.entries),
        matching=len(matching),
        matching_bytes=listing.bytes_of(matching),
        unshared_bytes=sum(entry.unshared_bytes for entry in matching),
        saved_secs=round(sum(entry.saved_secs for entry in matching), 3),
        now=now,
    )


def _inspect_foreign(cache: ForeignCache, options: CacheOptions, now: float) -> ForeignCacheReport:
    for expression in (*options.filters, *([] if options.sort is None else [options.sort])):
        match = _FIELD.match(expression)
        name = "" if match is None else match[1].lower()
        if name not in FOREIGN_FIELDS:
            fields = ", ".join(FOREIGN_FIELDS)
            raise UsageError(
                f"{expression!r} names no field that entries of other systems have. Use one of: {fields}.",
                expected=FOREIGN_FIELDS,
                actual=name,
            )
    chosen = options.choose([_as_listing(entry) for entry in cache.entries], now)
    matching, shown = ([cast("Any", facts).entry for facts in entries] for entries in chosen)
    return ForeignCacheReport(
        cache=cache,
        shown=tuple(shown),
        matching=len(matching),
        num_problems=sum(1 for entry in matching for _ in entry.all_problems()),
        now=now,
    )


def _as_listing(entry: ForeignEntry) -> EntryListing:
    """An entry with the names of a listing's fields, which is what filters and orders read."""
    facts = SimpleNamespace(
        entry=entry,
        manifest=SimpleNamespace(hash=entry.name, prefix=" ".join(entry.prefixes), created=entry.created or _EPOCH),
        usage=SimpleNamespace(last_used=entry.last_used),
        artifact_files=entry.artifacts,
        size_bytes=entry.size_bytes,
    )
    return cast("EntryListing", facts)
