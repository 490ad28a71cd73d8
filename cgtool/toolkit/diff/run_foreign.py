"""`diff` of two caches or entries of one other system. Prints nothing; importable without torch.

Grammar of a side::

    side = a cache of another system, a folder or a file | side ":" beginning of an entry's name
         | beginning of an entry's name, of the cache of another system that is named beside it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cgtool.errors import UsageError
from cgtool.toolkit.diff.foreign import compare_foreign_caches, compare_foreign_entries
from cgtool.toolkit.diff.records import Difference
from cgtool.toolkit.foreign.detect import read_foreign
from cgtool.toolkit.foreign.inspect_entry import one_entry
from cgtool.toolkit.foreign.records import ForeignCache, ForeignEntry


@dataclass(frozen=True, kw_only=True)
class _Side:
    cache: ForeignCache
    entry: ForeignEntry | None


def foreign_differences(old: str, new: str | None, *, cache_dir: Path | None) -> list[Difference] | None:
    """Compare two sides if another system wrote them.

    Args:
        old: The first side.
        new: The second side; None: this machine.
        cache_dir: The cache in which beginnings of names are looked up.

    Returns:
        What differs; None where no other system wrote either side.

    Raises:
        UsageError: The sides are not of one system, or one names no entry or several.
        CacheError: A cache went away while it was read.
    """
    first, second = _side(old, cache_dir), None if new is None else _side(new, cache_dir)
    if first is None and second is None:
        return None
    if first is None or second is None or first.cache.system != second.cache.system:
        kinds = [side.cache.system for side in (first, second) if side is not None]
        message = (
            f"What {' and '.join(kinds)} wrote is compared with what the same system wrote alone. Name two sides of "
            "one kind; `cgtool inspect cache PATH` tells what wrote a path."
        )
        raise UsageError(message, actual=[old, new])
    if first.entry is None and second.entry is None:
        return compare_foreign_caches(first.cache, second.cache)
    one = first.entry or _like(first.cache, second.entry)
    return compare_foreign_entries(one, second.entry or _like(second.cache, one))


def _side(text: str, cache_dir: Path | None) -> _Side | None:
    if text and _exists(text):
        cache = read_foreign(Path(text))
        return None if cache is None else _Side(cache=cache, entry=None)
    root, colon, beginning = text.rpartition(":")
    if colon and root and not _exists(root):
        return None
    cache = read_foreign(Path(root) if root else cache_dir)
    return None if cache is None else _Side(cache=cache, entry=one_entry(cache, beginning))


def _like(cache: ForeignCache, entry: ForeignEntry | None) -> ForeignEntry:
    """Return the entry of the same name, else the only one."""
    there = entry is not None and any(other.name == entry.name for other in cache.entries)
    return one_entry(cache, entry.name if there and entry is not None else None)


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False
