"""Resolve an abbreviated hash to an entry, or to one of its ranks and prefixes. Importable without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cgtool.errors import CacheError, UsageError
from cgtool.store.layout import SHORT_DIGITS, CacheLayout, RankName

#: How many entries an error message lists.
_MAX_LISTED = 20


def resolve_rank(layout: CacheLayout, entry: str | None, *, rank: int | None, prefix: str | None) -> RankName:
    """Return the only rank and prefix that matches.

    Raises:
        UsageError: None matches, or several do.
    """
    there = published_ranks(layout)
    named = [name for name in there if name.hash.startswith((entry or "").lower())]
    fitting = [name for name in named if rank in (None, name.rank) and prefix in (None, name.prefix)]
    if len(fitting) == 1:
        return fitting[0]
    hashes = [name.hash for name in fitting or there]
    fits = "Several entries match" if fitting else "No entry matches"
    what = f"{fits}. Name one of these by its hash, and by --rank and --prefix where the hash is the same"
    listed = [f"{abbreviate(name.hash, hashes)} --rank {name.rank} --prefix {name.prefix}" for name in fitting or there]
    raise selection_error(what, listed, path=layout.root, actual=entry)


def resolve_entry(layout: CacheLayout, entry: str | None) -> str:
    """Return the full hash of a published entry; None means the only one."""
    return resolve_hash(layout.root, entry, list(dict.fromkeys(name.hash for name in published_ranks(layout))))


def resolve_hash(place: Path | str, text: str | None, hashes: Sequence[str]) -> str:
    """Return the only one of several hashes that starts with `text`; None means the only hash.

    Args:
        place: The cache's root or the store's URL, for the error message.
        text: An abbreviated hash.
        hashes: The hashes to choose from.

    Raises:
        UsageError: No hash matches, or several do.
    """
    matching = [hash_ for hash_ in hashes if hash_.startswith((text or "").lower())]
    if len(matching) == 1 and text != "":
        return matching[0]
    begin = f"{len(matching)} entries begin" if matching else "No entry begins"
    what = f"{place} holds {len(hashes)} entries" if text is None else f"{begin} with {text[:64]!r} in {place}"
    listed = [abbreviate(hash_, hashes) for hash_ in matching or hashes]
    advice = "Name one of these" if listed else "It holds no entry: warm a model first"
    raise selection_error(f"{what}. {advice}", listed, path=place, actual=(text or "")[:64])


def selection_error(message: str, listed: Sequence[str], *, more: str = "cache", **facts: Any) -> UsageError:
    """Return the error for a name that matches nothing or several things, with a list of the candidates.

    The list is cut at `_MAX_LISTED`, and ends with the count of the rest and the `inspect` command that shows them.
    """
    rest = len(listed) - _MAX_LISTED
    lines = [*listed[:_MAX_LISTED], *([f"and {rest} more, which `cgtool inspect {more}` shows"] if rest > 0 else [])]
    return UsageError("".join([message, ":" if lines else ".", *(f"\n  {line}" for line in lines)]), **facts)


def empty_cache_error(layout: CacheLayout) -> CacheError:
    """Return the error for a cache without entries."""
    return CacheError(f"The cache at {layout.root} holds no entry. Fill it with: cgtool warm MODEL", path=layout.root)


def published_ranks(layout: CacheLayout) -> list[RankName]:
    """Return every rank and prefix that has a manifest; raise a CacheError if there is none."""
    found = [
        name for hash_ in layout.hashes() for name in layout.rank_names(hash_) if layout.manifest_file(name).is_file()
    ]
    if not found:
        raise empty_cache_error(layout)
    return found


def abbreviate(hash_: str, among: Iterable[str]) -> str:
    """Return the shortest abbreviation of a hash that is unique, ten digits or more."""
    others = set(among) - {hash_}
    digits = SHORT_DIGITS
    while any(other.startswith(hash_[:digits]) for other in others):
        digits += 1
    return hash_[:digits]
