"""`inspect cache`: list a cache of cgtool or of another system. Prints nothing; importable without torch.

JSON of cgtool's cache: the listing (`cgtool.toolkit.listing`) with the entries that are shown, and figures of all
entries that pass the filters, including those beyond `limit`::

    "num_entries": int         entries in the cache
    "matching": int            entries that pass the filters
    "matching_bytes": int      their size on disk, shared files counted once
    "unshared_bytes": int      their size if each piece and shape had its own file
    "saved_secs": float        the compile time that processes saved by loading them

JSON of another system's cache: its record (`cgtool.toolkit.foreign.records`) with the entries that are shown,
`num_entries`, `matching`, and `num_problems`, the number of problems of the matching entries.
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
    """A listing of a cache."""

    cache: CacheListing | ForeignCache
    #: The display name of its location.
    where: str
    #: The entries that pass the filters.
    matching: Sequence[Any]
    #: Those in the requested order, up to the limit.
    shown: Sequence[Any]
    #: The time of the listing, in seconds since the epoch.
    now: float

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of the matching entries, by their names in the document."""
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
        """Return the document that `inspect cache --json` prints, without its entries."""
        if isinstance(self.cache, ForeignCache):
            return {"schema": SCHEMA, **foreign_json(structs.replace(self.cache, entries=())), **self.figures}
        return {**self.cache.to_json(), "root": self.where, "entries": [], **self.figures}

    def entries_json(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of the document; for cgtool's entries, manifests are read again to include artifacts."""
        layout = CacheLayout(root=self.cache.root)
        for entry in self.shown:
            if isinstance(entry, EntryListing):
                current = None
                with contextlib.suppress(CacheError):  # just removed or damaged
                    current = list_entry(layout, entry.manifest.name, entry.usage)
                yield dict((current or entry).to_json())
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
    """List the entries of a cache of cgtool or of another system.

    Args:
        path: The cache's root, or another system's folder or file; None means the default cache.
        filters: Filters that an entry must all pass; see `cgtool.toolkit.filters`.
        sort: A field, optionally with ":asc" or ":desc"; None sorts by hash, rank and prefix.
        limit: Maximum number of entries to show; None for all.
        where: The display name of its location; None means its root.

    Returns:
        The listing; without entries if the default cache does not exist yet.

    Raises:
        UsageError: A filter or the order is malformed, or names an unknown field.
        CacheError: `path` is not a folder, cannot be listed, or holds something else than a cache.
    """
    now = time.time()
    foreign = read_foreign(path)
    fields = FIELDS if foreign is None else FOREIGN_FIELDS
    # Report usage errors before reading a large cache.
    predicates = [parse_filter(expression, now=now, fields=fields) for expression in filters]
    order = list if sort is None else parse_order(sort, fields=fields)
    # A cache that is named must exist; the default one may not have been created yet.
    cache = foreign or scan(resolve_root(path), missing_ok=path is None, artifacts=False)
    if foreign is None and not cache.entries:
        check_known(cache.root)
    matching = [entry for entry in cache.entries if all(passes(entry) for passes in predicates)]
    return CacheReport(
        cache=cache, where=where or str(cache.root), matching=matching, shown=order(matching)[:limit], now=now
    )
