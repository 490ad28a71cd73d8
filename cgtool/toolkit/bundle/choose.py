"""Which entries and ranks go into a bundle. Must not import torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from cgtool.errors import CacheError, UsageError
from cgtool.store.layout import SHORT_DIGITS, CacheLayout, RankName, short
from cgtool.store.walk import EntryView, walk
from cgtool.toolkit.selection import hash_named


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the user asked for."""

    #: Beginnings of hashes; none means all where all are of one model.
    hashes: tuple[str, ...] = ()
    everything: bool = False
    #: Conditions that an entry must fulfil, as `inspect cache --filter` takes them.
    filters: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    #: Only rows of these shapes, as people write them; none means every one.
    shapes: tuple[str, ...] = ()
    #: Whether the files for people go along.
    debug: bool = True


def chosen_names(layout: CacheLayout, choice: Choice) -> tuple[RankName, ...]:
    """Return the ranks and prefixes that a choice means, in order."""
    there = layout.hashes()
    if choice.hashes:
        hashes = sorted({hash_named(layout.root, text, there) for text in choice.hashes})
    else:
        entries = []
        for entry in walk(layout):
            if entry.is_finished:
                entries.append(entry)
            elif entry.unlisted:  # else it would be left out without a word
                raise entry.unlisted[0]
        hashes = [entry.hash for entry in entries]
        if choice.filters:
            hashes = _filtered(layout, hashes, choice.filters)
        elif not choice.everything:
            _check_one_model(layout, entries)
    names = [name for hash_ in hashes for name in layout.rank_names(hash_) if layout.manifest_file(name).is_file()]
    unfinished = sorted(set(hashes) - {name.hash for name in names})
    if unfinished and choice.hashes:  # any other was pruned meanwhile, and is not meant any more
        message = f"Entry {short(unfinished[0])} is not finished: no warm of it came to its end. Warm the model again."
        raise CacheError(message, path=layout.entry_dir(unfinished[0]))
    if not names:
        what = "holds no entry that these filters let through" if choice.filters else "holds no entry"
        raise CacheError(
            f"The cache at {layout.root} {what}. See what is there with: cgtool inspect cache", path=layout.root
        )
    kept = [name for name in names if not choice.ranks or name.rank in choice.ranks]
    missing = sorted(set(choice.ranks) - {name.rank for name in kept})
    if missing:
        known = ", ".join(map(str, sorted({name.rank for name in names})))
        message = f"There is no rank {missing[0]} in what was chosen. Name one of these: {known}."
        raise UsageError(message, path=layout.root, actual=missing)
    return tuple(kept)


def _check_one_model(layout: CacheLayout, entries: Iterable[EntryView]) -> None:
    models = {manifest.model: entry.hash for entry in entries for manifest in entry.manifests}
    if len(models) > 1:
        listed = "".join(f"\n  {hash_[:SHORT_DIGITS]} {model[:60]!r}" for model, hash_ in sorted(models.items()))
        message = f"The cache holds several models. Name entries by their hash, or --filter, or --all:{listed}"
        raise UsageError(message, path=layout.root)


def _filtered(layout: CacheLayout, hashes: list[str], filters: tuple[str, ...]) -> list[str]:
    # The listing of everything, and only for who filters.
    from cgtool.toolkit.filters import parse_filter
    from cgtool.toolkit.listing import scan

    holds = [parse_filter(expression, now=time.time()) for expression in filters]
    kept = {entry.manifest.hash for entry in scan(layout.root).entries if all(hold(entry) for hold in holds)}
    return [hash_ for hash_ in hashes if hash_ in kept]
