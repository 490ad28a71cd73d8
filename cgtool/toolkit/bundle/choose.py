"""Select the entries and ranks of a bundle. Must not import torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from cgtool.errors import CacheError, UsageError
from cgtool.store.layout import SHORT_DIGITS, CacheLayout, RankName, short
from cgtool.store.walk import EntryView, walk
from cgtool.toolkit.selection import resolve_hash


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which entries, ranks and shapes the user selects."""

    #: Abbreviated hashes; empty selects all entries, if they are of one model.
    hashes: tuple[str, ...] = ()
    everything: bool = False
    #: Filter expressions that an entry must match, as for `inspect cache --filter`.
    filters: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    #: Only rows of these shapes, such as "num_tokens=8"; empty selects all rows.
    shapes: tuple[str, ...] = ()
    #: Whether to include the files that are for people only.
    debug: bool = True


def chosen_names(layout: CacheLayout, choice: Choice) -> tuple[RankName, ...]:
    """Return the ranks and prefixes that a choice selects, in order."""
    there = layout.hashes()
    if choice.hashes:
        hashes = sorted({resolve_hash(layout.root, text, there) for text in choice.hashes})
    else:
        entries = []
        for entry in walk(layout):
            if entry.is_finished:
                entries.append(entry)
            elif entry.unlisted:  # do not silently omit an entry that cannot be listed
                raise entry.unlisted[0]
        hashes = [entry.hash for entry in entries]
        if choice.filters:
            hashes = _filtered(layout, hashes, choice.filters)
        elif not choice.everything:
            _check_one_model(layout, entries)
    names = [name for hash_ in hashes for name in layout.rank_names(hash_) if layout.manifest_file(name).is_file()]
    unfinished = sorted(set(hashes) - {name.hash for name in names})
    if unfinished and choice.hashes:  # without explicit hashes, it was pruned meanwhile and no longer matches
        message = f"Entry {short(unfinished[0])} is unfinished: no warm of it has completed. Warm the model again."
        raise CacheError(message, path=layout.entry_dir(unfinished[0]))
    if not names:
        what = "holds no entry that matches these filters" if choice.filters else "holds no entry"
        message = f"The cache at {layout.root} {what}. List its entries with: cgtool inspect cache"
        raise CacheError(message, path=layout.root)
    kept = [name for name in names if not choice.ranks or name.rank in choice.ranks]
    missing = sorted(set(choice.ranks) - {name.rank for name in kept})
    if missing:
        known = ", ".join(map(str, sorted({name.rank for name in names})))
        message = f"The selected entries have no rank {missing[0]}. Name one of these: {known}."
        raise UsageError(message, path=layout.root, actual=missing)
    return tuple(kept)


def _check_one_model(layout: CacheLayout, entries: Iterable[EntryView]) -> None:
    models = {manifest.model: entry.hash for entry in entries for manifest in entry.manifests}
    if len(models) > 1:
        listed = "".join(f"\n  {hash_[:SHORT_DIGITS]} {model[:60]!r}" for model, hash_ in sorted(models.items()))
        message = f"The cache holds several models. Name entries by their hash, or --filter, or --all:{listed}"
        raise UsageError(message, path=layout.root)


def _filtered(layout: CacheLayout, hashes: list[str], filters: tuple[str, ...]) -> list[str]:
    # Imported lazily: only filters need the listing.
    from cgtool.toolkit.filters import parse_filter
    from cgtool.toolkit.listing import scan

    matches = [parse_filter(expression, now=time.time()) for expression in filters]
    kept = {entry.manifest.hash for entry in scan(layout.root).entries if all(match(entry) for match in matches)}
    return [hash_ for hash_ in hashes if hash_ in kept]
