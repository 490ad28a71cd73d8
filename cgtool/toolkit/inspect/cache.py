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

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from cgtool.errors import CacheError
from cgtool.store.layout import CacheLayout, resolve_root
from cgtool.toolkit.filters import FIELDS, FOREIGN_FIELDS, parse_filter, parse_order
from cgtool.toolkit.foreign.detect import check_known, read_foreign
from cgtool.toolkit.foreign.records import SCHEMA, ForeignCache, foreign_json
from cgtool.toolkit.listing import CacheListing, EntryListing, list_entry, scan


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """What a cache holds; `matching` entries pass the filters, `now` is in seconds since the epoch.

    `where` is what people are told of its place.
    """

    cache: CacheListing | ForeignCache
    where: str
    matching: Sequence[Any]
    shown: Sequence[Any]
    now: float

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of all entries that pass, by their names in the document."""
        counts = {"num_entries": len(self.cache.entries), "matching": len(self.matching)}
        if isinstance(self.cache, ForeignCache):
            return {**counts, "num_problems": sum(1 for entry in self.matching for _ in entry.all_problems())}
        return {
            **counts,
            "matching_bytes": self.cache.bytes_of(self.matching),
            "unshared_bytes": sum(entry.unshared_bytes for entry in self.matching),
            "saved_secs": round(sum(entry.saved_secs for entry in self.matching), 3),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect cache --json` prints, but for its entries."""
        if isinstance(self.cache, ForeignCache):
            return {"schema": SCHEMA, **foreign_json(structs.replace(self.cache, entries=())), **self.figures}
        return {**self.cache.to_json(), "root": self.where, "entries": [], **self.figures}

    def entries_json(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of the document; one of ours with its artifacts as its manifest has them at this moment."""
        layout = CacheLayout(root=self.cache.root)
        for entry in self.shown:
            if isinstance(entry, EntryListing):
                now = None
                with contextlib.suppress(CacheError):  # it was removed or torn meanwhile
                    now = list_entry(layout, entry.manifest.name, entry.usage)
                yield dict((now or entry).to_json())
            else:
                yield foreign_json(entry)


def inspect_cache(
    path: Path | None = None,
    *,
    filters: Sequence[str] = (),
    sort: str | None = None,
    limit: int | None = None,
    where: str | None = None,
) -> CacheReport:
    """List the entries of a cache, whichever system wrote it.

    Args:
        path: The cache's root, or another system's folder or file; None means the cache that `warm` fills.
        filters: All of which an entry must pass, see `cgtool.toolkit.filters`.
        sort: A field, or one with ":asc" or ":desc"; None is by hash, rank and prefix.
        limit: How many entries to show at most; None for all.
        where: What people are told of its place; None means its root.

    Returns:
        The entries; none where the default cache does not exist yet.

    Raises:
        UsageError: A filter or the order is outside of its grammar, or names a field that such entries lack.
        CacheError: `path` is no folder, cannot be listed, or holds other things than a cache.
    """
    now = time.time()
    foreign = read_foreign(path)
    fields = FIELDS if foreign is None else FOREIGN_FIELDS
    # Wrong usage is told before a large cache is read.
    passes = [parse_filter(expression, now=now, fields=fields) for expression in filters]
    order = list if sort is None else parse_order(sort, fields=fields)
    # A cache that was named must be there; the default one may wait for its first warm.
    cache = foreign or scan(resolve_root(path), missing_ok=path is None, artifacts=False)
    if foreign is None and not cache.entries:
        check_known(cache.root)
    matching = [entry for entry in cache.entries if all(test(entry) for test in passes)]
    return CacheReport(
        cache=cache, where=where or str(cache.root), matching=matching, shown=order(matching)[:limit], now=now
    )
