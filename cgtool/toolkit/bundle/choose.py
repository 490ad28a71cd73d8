"""Which entries, ranks and shapes of a cache go into a bundle. Must not import torch."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from msgspec.structs import replace

from cgtool.errors import CacheError, UsageError
from cgtool.plan.shapes import is_asked, parse_shape, shape_text
from cgtool.records import dataclass
from cgtool.store.layout import SHORT_DIGITS, CacheLayout, RankName, short
from cgtool.store.records import Manifest
from cgtool.store.walk import EntryView, walk

_BEGINNING = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the user asked for.

    Args:
        hashes: Beginnings of hashes; none means all where all are of one model.
        everything: All entries, whatever the model.
        filters: Conditions that an entry must fulfil, as `inspect cache --filter` takes them.
        ranks: Only these ranks; none means every one.
        shapes: Only rows of these shapes, as people write them; none means every one.
        debug: Whether the files for people go along.
    """

    hashes: tuple[str, ...] = ()
    everything: bool = False
    filters: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    shapes: tuple[str, ...] = ()
    debug: bool = True


def chosen_names(layout: CacheLayout, choice: Choice) -> tuple[RankName, ...]:
    """Return the ranks and prefixes that a choice means, in order.

    Raises:
        UsageError: A hash or a rank is not there, or nothing says which of several models is meant.
        CacheError: The cache is empty, an entry is not finished, or a manifest cannot be read or trusted.
    """
    there = layout.hashes()
    if choice.hashes:
        hashes = _named(layout, there, choice.hashes)
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


def trimmed(manifest: Manifest, choice: Choice) -> Manifest:
    """Return a manifest without the rows and files that a choice leaves out.

    Raises:
        UsageError: No row has one of the shapes.
    """
    if choice.shapes:
        wanted = [parse_shape(text) for text in choice.shapes]
        rows = tuple(row for row in manifest.rows if any(is_asked(row.shape, asked) for asked in wanted))
        if not rows:
            known = ", ".join(dict.fromkeys(shape_text(row.shape) for row in manifest.rows))
            asked = ", ".join(choice.shapes)
            message = f"Entry {short(manifest.hash)} has no artifact for {asked}. Name some of these shapes: {known}."
            raise UsageError(message, path=manifest.name.flat, expected=known, actual=asked)
        places = {(row.variant, row.piece_index, shape_text(row.shape)) for row in rows}
        fallbacks = tuple(fallback for fallback in manifest.fallbacks if fallback.place in places)
        manifest = replace(manifest, rows=rows, fallbacks=fallbacks)
    if not choice.debug:
        manifest = replace(manifest, files={n: r for n, r in manifest.files.items() if not n.endswith(".py")})
    return manifest


def _named(layout: CacheLayout, there: list[str], beginnings: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    for beginning in beginnings:
        fitting = [hash_ for hash_ in there if hash_.startswith(beginning.lower())]
        if not _BEGINNING.fullmatch(beginning.lower()) or len(fitting) != 1:
            listed = "".join(f"\n  {hash_[: max(SHORT_DIGITS, len(beginning) + 2)]}" for hash_ in fitting or there)
            what = "Several entries begin" if fitting else "No entry begins"
            message = f"{what} with {beginning[:64]!r}. Name one of these:{listed or ' there is none.'}"
            raise UsageError(message, path=layout.root, actual=beginning[:64])
        found[fitting[0]] = None
    return sorted(found)


def _check_one_model(layout: CacheLayout, entries: Iterable[EntryView]) -> None:
    models = {manifest.model: entry.hash for entry in entries for manifest in entry.manifests}
    if len(models) > 1:
        listed = "".join(f"\n  {hash_[:SHORT_DIGITS]} {model[:60]!r}" for model, hash_ in sorted(models.items()))
        message = f"The cache holds several models. Name entries by their hash, or --filter, or --all:{listed}"
        raise UsageError(message, path=layout.root)


def _filtered(layout: CacheLayout, hashes: list[str], filters: tuple[str, ...]) -> list[str]:
    # The listing of everything, and only for who filters.
    from cgtool.toolkit.filters import parse_filter
    from cgtool.toolkit.scan import scan

    holds = [parse_filter(expression, now=time.time()) for expression in filters]
    kept = {entry.manifest.hash for entry in scan(layout.root).entries if all(hold(entry) for hold in holds)}
    return [hash_ for hash_ in hashes if hash_ in kept]
