"""`inspect cache` on a cache of another system: what it holds. Prints nothing; importable without torch.

JSON: what `cgtool.toolkit.foreign.records` says of the cache, with the entries that are shown, and of those that pass::

    "num_entries": int         how many entries the cache has
    "matching": int            how many of them pass the filters
    "num_problems": int        how many problems those have
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from cgtool.errors import UsageError
from cgtool.toolkit.filters import parse_filter, parse_order
from cgtool.toolkit.foreign.detect import read_foreign
from cgtool.toolkit.foreign.records import SCHEMA, ForeignCache, ForeignEntry, foreign_json
from cgtool.toolkit.listing import EntryListing

#: The fields of `cgtool.toolkit.filters` that entries of other systems have; their hash is their name.
FIELDS = ("hash", "prefix", "artifacts", "size", "created", "last_used")
_FIELD = re.compile(r"\s*([A-Za-z_]*)")
_EPOCH = "1970-01-01T00:00:00.000Z"


@dataclass(frozen=True, kw_only=True)
class ForeignReport:
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
        """Return the document that `inspect cache --json` prints."""
        return {
            "schema": SCHEMA,
            **foreign_json(self.cache),
            "entries": [foreign_json(entry) for entry in self.shown],
            "num_entries": len(self.cache.entries),
            "matching": self.matching,
            "num_problems": self.num_problems,
        }


def inspect_foreign(
    path: Path, *, filters: Iterable[str] = (), sort: str | None = None, limit: int | None = None
) -> ForeignReport | None:
    """List the entries of another system's cache.

    Args:
        path: A folder or a file.
        filters: All of which an entry must pass, of the fields in `FIELDS`.
        sort: A field, or one with ":asc" or ":desc"; None is as the cache has them.
        limit: How many entries to show at most; None for all.

    Returns:
        The entries; None where cgtool wrote what lies there, or no known system did.

    Raises:
        UsageError: A filter or the order is outside of its grammar, or names a field that such entries lack.
        CacheError: The cache went away while it was read.
    """
    now = time.time()
    cache = read_foreign(path)
    if cache is None:
        return None
    passes = [parse_filter(_checked(expression), now=now) for expression in filters]
    order = None if sort is None else parse_order(_checked(sort))
    facts = [_facts_of(entry) for entry in cache.entries]
    matching = [fact for fact in facts if all(test(fact) for test in passes)]
    in_order = matching if order is None else order(matching)
    entries = [cast("Any", fact).entry for fact in matching]
    return ForeignReport(
        cache=cache,
        shown=tuple(cast("Any", fact).entry for fact in in_order[:limit]),
        matching=len(matching),
        num_problems=sum(1 for entry in entries for _ in entry.all_problems()),
        now=now,
    )


def _checked(expression: str) -> str:
    """Return a filter or an order if its field is one that entries of other systems have."""
    match = _FIELD.match(expression)
    name = "" if match is None else match[1].lower()
    if name not in FIELDS:
        raise UsageError(
            f"{expression!r} names no field that entries of other systems have. Use one of: {', '.join(FIELDS)}.",
            expected=FIELDS,
            actual=name,
        )
    return expression


def _facts_of(entry: ForeignEntry) -> EntryListing:
    """An entry with the names of a listing's fields, which is what filters and orders read."""
    facts = SimpleNamespace(
        entry=entry,
        manifest=SimpleNamespace(hash=entry.name, prefix=" ".join(entry.prefixes), created=entry.created or _EPOCH),
        usage=SimpleNamespace(last_used=entry.last_used),
        artifact_files=entry.artifacts,
        size_bytes=entry.size_bytes,
    )
    return cast("EntryListing", facts)
