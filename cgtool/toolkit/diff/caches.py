"""Two caches: which entries only one has, which differ though their hash is one, which are of one model. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cgtool.errors import CacheError
from cgtool.plan.grammar import canonical_json
from cgtool.plan.pieces import Json
from cgtool.store.layout import CacheLayout, short
from cgtool.toolkit.diff.entries import EntrySide, compare_entries
from cgtool.toolkit.diff.records import Difference, located


def compare_caches(old: CacheLayout, new: CacheLayout) -> list[Difference]:
    """Return what differs between two caches.

    Entries of one hash come first; then each pair of entries of which either side has only one of their model, down to
    the factor; then what only one side has. An entry that cannot be read is a difference of its own.

    Raises:
        CacheError: A cache's folder cannot be listed.
    """
    olds, news = set(old.hashes()), set(new.hashes())
    found: list[Difference] = []
    for hash_ in sorted(olds & news):
        found += _compared(EntrySide(old, hash_), EntrySide(new, hash_), f"entry {short(hash_)}")
    left = {hash_: EntrySide(old, hash_) for hash_ in sorted(olds - news)}
    right = {hash_: EntrySide(new, hash_) for hash_ in sorted(news - olds)}
    paired = _pairs(left.values(), right.values())
    alone: list[Difference] = []
    for one, other in paired:
        label = f"{model_of(one)}, entry {short(one.hash)} → {short(other.hash)}"
        found += _compared(one, other, label)
        alone.append(_entry(one, other))
    taken = {side.hash for pair in paired for side in pair}
    alone += [_entry(side, None) for side in left.values() if side.hash not in taken]
    alone += [_entry(None, side) for side in right.values() if side.hash not in taken]
    return [*found, *alone]


def model_of(side: EntrySide) -> str:
    """Return what an entry's model is called; "a model" where its manifest cannot be read."""
    try:
        return next((side.manifest(place).model for place in side.names), "a model")
    except CacheError:
        return "a model"


def same_model(side: EntrySide) -> bytes | None:
    """Return what entries of one model have in common, as text: its class, its name, its prefixes; None: unknown."""
    try:
        prefixes = sorted({prefix for _, prefix in side.names})
        return canonical_json([side.key.value("model"), model_of(side), prefixes]) if prefixes else None
    except CacheError:
        return None


def _pairs(left: Iterable[EntrySide], right: Iterable[EntrySide]) -> list[tuple[EntrySide, EntrySide]]:
    olds, news = _by_model(left), _by_model(right)
    return [
        (olds[model][0], news[model][0]) for model in olds if len(olds[model]) == 1 and len(news.get(model, ())) == 1
    ]


def _by_model(sides: Iterable[EntrySide]) -> Mapping[bytes, list[EntrySide]]:
    groups: dict[bytes, list[EntrySide]] = {}
    for side in sides:
        model = same_model(side)
        if model is not None:
            groups.setdefault(model, []).append(side)
    return groups


def _compared(old: EntrySide, new: EntrySide, label: str) -> list[Difference]:
    try:
        return located(compare_entries(old, new), label)
    except CacheError as error:
        said = f"{label} cannot be compared: {error}"
        return [Difference(what="entry", path=old.hash, old=old.hash, new=new.hash, sentence=said)]


def _entry(old: EntrySide | None, new: EntrySide | None) -> Difference:
    sides: list[Json] = [None if side is None else side.hash for side in (old, new)]
    side = old or new
    model = "" if side is None else model_of(side)
    if old is not None and new is not None:
        said = f"entry {short(old.hash)} ({model}) is only in the first, and {short(new.hash)} only in the second"
    else:
        said = f"entry {short(str(sides[0] or sides[1]))} ({model}) is only in the {'first' if old else 'second'}"
    return Difference(what="entry", path=str(sides[0] or sides[1]), old=sides[0], new=sides[1], sentence=said)
