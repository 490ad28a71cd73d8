"""`inspect cache`: what a cache holds. Prints nothing; importable without torch.

JSON: what `cgtool.toolkit.listing` says of the cache and of each entry that is shown, and of the entries that pass the
filters (all of them, and not only those that `limit` leaves)::

    "num_entries": int         how many entries the cache has
    "matching": int            how many of them pass
    "matching_bytes": int      what those take on the disk, files that they share once
    "unshared_bytes": int      what they would take if each piece and shape had a file of its own
    "saved_secs": float        seconds of compiling that the processes which loaded them did without
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cgtool.records import dataclass, replace
from cgtool.store.layout import CacheLayout, resolve_root
from cgtool.toolkit.filters import parse_filter, parse_order
from cgtool.toolkit.listing import CacheListing
from cgtool.toolkit.scan import scan, with_artifacts


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What the user asked of `inspect cache`.

    Args:
        path: The cache's root; None means the cache that `warm` fills.
        filters: All of which an entry must pass, see `cgtool.toolkit.filters`.
        sort: A field, or one with ":asc" or ":desc"; None is by hash, rank and prefix.
        limit: How many entries to show at most; None for all.
    """

    path: Path | None = None
    filters: Sequence[str] = ()
    sort: str | None = None
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """What a cache holds, and when that was looked at.

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

    def entries_json(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of the document, each with its artifacts as its manifest has them at this moment."""
        layout = CacheLayout(root=self.listing.root)
        for entry in self.listing.entries:
            yield dict(with_artifacts(layout, entry).to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect cache --json` prints, with no artifacts: those of many entries are much."""
        return {
            **self.listing.to_json(),
            "num_entries": self.num_entries,
            "matching": self.matching,
            "matching_bytes": self.matching_bytes,
            "unshared_bytes": self.unshared_bytes,
            "saved_secs": self.saved_secs,
        }


def inspect_cache(options: CacheOptions) -> CacheReport:
    """List the entries of a cache.

    Args:
        options: What the user asked.

    Returns:
        The entries; none where the default cache does not exist yet.

    Raises:
        UsageError: A filter or the order is outside of its grammar.
        CacheError: `path` is no folder, cannot be listed, or holds other things than a cache.
    """
    now = time.time()
    passes = [parse_filter(expression, now=now) for expression in options.filters]
    order = None if options.sort is None else parse_order(options.sort)
    root = resolve_root(options.path)
    # Another system's cache is told from ours by looking at `root`, and would be read here by its own reader.
    # A cache that was named must be there; the default one may wait for its first warm.
    listing = scan(root, missing_ok=options.path is None, artifacts=False)
    if not listing.entries:
        from cgtool.toolkit.foreign.detect import check_known  # the readers of all systems, for what holds no entry

        check_known(root)
    matching = [entry for entry in listing.entries if all(test(entry) for test in passes)]
    shown = matching if order is None else order(matching)
    return CacheReport(
        listing=replace(listing, entries=tuple(shown[: options.limit])),
        num_entries=len(listing.entries),
        matching=len(matching),
        matching_bytes=listing.bytes_of(matching),
        unshared_bytes=sum(entry.unshared_bytes for entry in matching),
        saved_secs=round(sum(entry.saved_secs for entry in matching), 3),
        now=now,
    )
