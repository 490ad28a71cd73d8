"""Which entry, or which rank and prefix of one, the user means by the beginning of a hash. Importable without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cgtool.errors import CacheError, UsageError
from cgtool.store.layout import SHORT_DIGITS, CacheLayout, RankName

#: Entries that a message lists.
MOST_LISTED = 20


def one_name(layout: CacheLayout, entry: str | None, *, rank: int | None, prefix: str | None) -> RankName:
    """Return the one rank and prefix that fits."""
    there = published(layout)
    named = [name for name in there if name.hash.startswith((entry or "").lower())]
    fitting = [name for name in named if rank in (None, name.rank) and prefix in (None, name.prefix)]
    if len(fitting) == 1:
        return fitting[0]
    hashes = [name.hash for name in fitting or there]
    fits = "Several entries fit" if fitting else "No entry fits"
    what = f"{fits}. Name one of these by its hash, and by --rank and --prefix where the hash is the same"
    listed = [f"{beginning(name.hash, hashes)} --rank {name.rank} --prefix {name.prefix}" for name in fitting or there]
    raise not_one(what, listed, path=layout.root, actual=entry)


def one_hash(layout: CacheLayout, entry: str | None) -> str:
    """Return the hash of the published entry that begins so; None takes the only one."""
    return hash_named(layout.root, entry, list(dict.fromkeys(name.hash for name in published(layout))))


def hash_named(place: Path | str, text: str | None, hashes: Sequence[str]) -> str:
    """Return the one of several hashes that begins with `text`; they are those of a cache, or of the store at a URL."""
    found = [hash_ for hash_ in hashes if hash_.startswith((text or "").lower())]
    if len(found) == 1 and text != "":
        return found[0]
    begin = f"{len(found)} entries begin" if found else "No entry begins"
    what = f"{place} holds {len(hashes)} entries" if text is None else f"{begin} with {text[:64]!r} in {place}"
    listed = [beginning(hash_, hashes) for hash_ in found or hashes]
    advice = "Name one of these" if listed else "It holds no entry: warm a model first"
    raise not_one(f"{what}. {advice}", listed, path=place, actual=(text or "")[:64])


def not_one(message: str, listed: Sequence[str], *, more: str = "cache", **facts: Any) -> UsageError:
    """Return the error of a name that fits nothing or several things, some of which are listed below the message.

    What is left out is counted, with the command `inspect ...` that shows it.
    """
    rest = len(listed) - MOST_LISTED
    lines = [*listed[:MOST_LISTED], *([f"and {rest} more, which `cgtool inspect {more}` shows"] if rest > 0 else [])]
    return UsageError("".join([message, ":" if lines else ".", *(f"\n  {line}" for line in lines)]), **facts)


def empty(layout: CacheLayout) -> CacheError:
    """Return the error of a cache without entries."""
    return CacheError(f"The cache at {layout.root} holds no entry. Fill it with: cgtool warm MODEL", path=layout.root)


def published(layout: CacheLayout) -> list[RankName]:
    """Return every rank and prefix that has a manifest."""
    found = [
        name for hash_ in layout.hashes() for name in layout.rank_names(hash_) if layout.manifest_file(name).is_file()
    ]
    if not found:
        raise empty(layout)
    return found


def beginning(hash_: str, among: Iterable[str]) -> str:
    """Return the shortest beginning of a hash that tells it from the others, ten digits or more."""
    others = set(among) - {hash_}
    digits = SHORT_DIGITS
    while any(other.startswith(hash_[:digits]) for other in others):
        digits += 1
    return hash_[:digits]
