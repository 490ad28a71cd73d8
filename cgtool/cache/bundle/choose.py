"""Which entries, ranks and shapes of a cache go into a bundle. Must not import torch."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import replace

from cgtool.cache.layout import SHORT_DIGITS, CacheLayout, RankName, short
from cgtool.cache.manifest import Manifest, read_manifest
from cgtool.cache.shapes import Shape, shape_text, shape_words
from cgtool.errors import CacheCorruptError, CacheError, UsageError
from cgtool.records import dataclass

_BEGINNING = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the user asked for.

    Args:
        hashes: Beginnings of hashes; none means all where all are of one model.
        everything: All entries, whatever the model.
        filters: Conditions that an entry must fulfil, as `inspect cache --filter` takes them.
        ranks: Only these ranks; none means every one.
        shapes: Only rows of these shapes; none means every one.
        debug: Whether the files for people go along.
    """

    hashes: tuple[str, ...] = ()
    everything: bool = False
    filters: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    shapes: tuple[Shape, ...] = ()
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
        hashes = [hash_ for hash_ in there if _is_published(layout, hash_)]
        if choice.filters:
            hashes = _filtered(layout, hashes, choice.filters)
        elif not choice.everything:
            _check_one_model(layout, hashes)
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
        wanted = {shape_text(shape) for shape in choice.shapes}
        rows = tuple(row for row in manifest.rows if shape_text(row.shape) in wanted)
        if not rows:
            known = ", ".join(dict.fromkeys(shape_words(row.shape) for row in manifest.rows))
            asked = ", ".join(map(shape_words, choice.shapes))
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


def _is_published(layout: CacheLayout, hash_: str) -> bool:
    return any(layout.manifest_file(name).is_file() for name in layout.rank_names(hash_))


def _check_one_model(layout: CacheLayout, hashes: list[str]) -> None:
    models: dict[str, str] = {}
    for hash_ in hashes:
        for name in layout.rank_names(hash_):
            manifest = _manifest(layout, name)
            if manifest is not None:
                models.setdefault(manifest.model, hash_)
    if len(models) > 1:
        listed = "".join(f"\n  {hash_[:SHORT_DIGITS]} {model[:60]!r}" for model, hash_ in sorted(models.items()))
        message = f"The cache holds several models. Name entries by their hash, or --filter, or --all:{listed}"
        raise UsageError(message, path=layout.root)


def _manifest(layout: CacheLayout, name: RankName) -> Manifest | None:
    try:
        return read_manifest(layout, name)
    except CacheCorruptError:
        return None  # whoever reads the entry says so


def _filtered(layout: CacheLayout, hashes: list[str], filters: tuple[str, ...]) -> list[str]:
    # The listing of everything, and only for who filters.
    from cgtool.cache.filters import parse_filter
    from cgtool.cache.scan import scan

    holds = [parse_filter(expression, now=time.time()) for expression in filters]
    kept = {entry.hash for entry in scan(layout.root).entries if all(hold(entry) for hold in holds)}
    return [hash_ for hash_ in hashes if hash_ in kept]
