"""Two caches or entries of one other system: which entries, factors and artifacts differ. Must not import torch.

Artifacts are one where path, shape and piece are; whether they differ, their bytes say. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from cgtool.plan.shapes import shape_text
from cgtool.store.key import Key, differences
from cgtool.toolkit.diff.records import Difference, located, together
from cgtool.toolkit.foreign.contents import digests_of
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignCache, ForeignEntry
from cgtool.toolkit.foreign.tree import shown


def compare_foreign_caches(old: ForeignCache, new: ForeignCache) -> list[Difference]:
    """Return what differs between two caches of one system.

    Entries of one name come first; then each pair of which either side has only one alike; then what one side has.
    """
    olds, news = ({entry.name: entry for entry in cache.entries} for cache in (old, new))
    left = [entry for name, entry in olds.items() if name not in news]
    right = [entry for name, entry in news.items() if name not in olds]
    pairs = [(entry, news[name]) for name, entry in olds.items() if name in news]
    renamed = _alike(left, right)
    found: list[Difference] = []
    for one, other in [*pairs, *renamed]:
        label = f"entry {shown(one.name)}" + ("" if one.name == other.name else f" → {shown(other.name)}")
        found += located(compare_foreign_entries(one, other), label)
    if old.root.is_dir() and new.root.is_dir():  # the names of files are nothing of what they hold
        found += [_renamed(one, other) for one, other in renamed]
    taken = {entry.name for pair in renamed for entry in pair}
    found += [_only(entry, is_old=True) for entry in left if entry.name not in taken]
    return [*found, *(_only(entry, is_old=False) for entry in right if entry.name not in taken)]


def compare_foreign_entries(old: ForeignEntry, new: ForeignEntry) -> list[Difference]:
    """Return what differs between two entries of one system: factors first, then artifacts."""
    factors = [
        Difference(what="factor", path=found.path, old=found.old, new=found.new, sentence=found.sentence)
        for found in differences(Key.of(old.key_factors), Key.of(new.key_factors))
    ]
    return [*factors, *together(_artifacts(old, new))]


def _artifacts(old: ForeignEntry, new: ForeignEntry) -> Iterator[Difference]:
    old_digests, new_digests = digests_of(old), digests_of(new)
    yield from _torn(old, old_digests.get(""), new_digests.get(""))
    olds, news = ({_place(entry, one): one for one in entry.artifacts} for entry in (old, new))
    for place in [*olds, *(place for place in news if place not in olds)]:
        one, other = olds.get(place), news.get(place)
        first = None if one is None else old_digests.get(one.path)
        second = None if other is None else new_digests.get(other.path)
        artifact = one or other
        if artifact is None or (one is not None and other is not None and _is_same(artifact, first, second)):
            continue
        if one is None or other is None:
            said = f"is only in the {'second' if one is None else 'first'}"
        elif first is None or second is None:
            said = f"is missing or cannot be read in the {'first' if first is None else 'second'}"
        elif one.size_bytes != other.size_bytes:
            said = f"had {one.size_bytes} bytes and has {other.size_bytes} now"
        else:
            said = f"has other bytes, {one.size_bytes} as before"
        sentence = f"{_words(artifact)} {said}"
        yield Difference(what="artifact", path=artifact.path, old=first, new=second, sentence=sentence)


def _torn(entry: ForeignEntry, first: str | None, second: str | None) -> Iterator[Difference]:
    """Yield what is to be said of a file that cannot be read on a side, of which a digest of the whole file tells."""
    if first == second:
        return
    said = "cannot be read in the second" if first is None else "cannot be read in the first"
    if first is not None and second is not None:
        said = "cannot be read in either, and has other bytes"
    yield Difference(what="entry", path=entry.name, old=first, new=second, sentence=f"entry {shown(entry.name)} {said}")


def _is_same(artifact: ForeignArtifact, first: str | None, second: str | None) -> bool:
    """Whether two digests are one; of what neither side could read nobody knows, and what both miss is the same."""
    return first == second and (first is not None or not artifact.size_bytes)


def _place(entry: ForeignEntry, artifact: ForeignArtifact) -> Hashable:
    if entry.kind == "artifact":  # the file itself, whatever it is called
        return ""
    return artifact.path, artifact.piece_index, None if artifact.shape is None else shape_text(artifact.shape)


def _words(artifact: ForeignArtifact) -> str:
    facts = [f"piece {artifact.piece_index}"] if artifact.piece_index is not None else []
    facts += [f"for {shape_text(artifact.shape)}"] if artifact.shape is not None else []
    return f"{artifact.what} {shown(artifact.path)}" + (f" ({' '.join(facts)})" if facts else "")


def _alike(left: Iterable[ForeignEntry], right: Iterable[ForeignEntry]) -> list[tuple[ForeignEntry, ForeignEntry]]:
    olds, news = _grouped(left), _grouped(right)
    return [(olds[like][0], news[like][0]) for like in olds if len(olds[like]) == 1 == len(news.get(like, ()))]


def _grouped(entries: Iterable[ForeignEntry]) -> dict[tuple[str, ...], list[ForeignEntry]]:
    groups: dict[tuple[str, ...], list[ForeignEntry]] = {}
    for entry in entries:
        kernel = entry.factors.get("name") if isinstance(entry.factors, dict) else None
        groups.setdefault((entry.kind, str(kernel), *entry.prefixes), []).append(entry)
    return groups


def _renamed(old: ForeignEntry, new: ForeignEntry) -> Difference:
    sentence = f"entry {shown(old.name)} is only in the first, and {shown(new.name)} only in the second"
    return Difference(what="entry", path=old.name, old=old.name, new=new.name, sentence=sentence)


def _only(entry: ForeignEntry, *, is_old: bool) -> Difference:
    sentence = f"entry {shown(entry.name)} is only in the {'first' if is_old else 'second'}"
    sides = (entry.name, None) if is_old else (None, entry.name)
    return Difference(what="entry", path=entry.name, old=sides[0], new=sides[1], sentence=sentence)
