"""What the user names as a side of a comparison: a cache, an entry of one, a bundle. No torch here.

Grammar::

    side = folder of a cache | .../torch_compile_cache/<hash> | file of a bundle
         | folder of a cache ":" beginning of a hash | beginning of a hash, of the cache that is named beside it

What exists as a path is taken for one; a beginning must be that of one entry alone. A cache may be another system's, a
folder or a file; its entries have names for hashes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cgtool.errors import CacheError, UsageError
from cgtool.plan.shapes import shape_text
from cgtool.store.layout import CACHE_FOLDER, CacheLayout, is_hash, resolve_root
from cgtool.store.records import Key
from cgtool.toolkit.diff.entries import EntrySide, factor_differences
from cgtool.toolkit.diff.records import Difference, only_in, together
from cgtool.toolkit.foreign.contents import digests_of
from cgtool.toolkit.foreign.detect import read_foreign
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignEntry, one_entry
from cgtool.toolkit.foreign.tree import shown
from cgtool.toolkit.selection import hash_named

_BEGINNING = re.compile(r"[0-9a-fA-F]{1,64}")


class ForeignSide:
    """One entry of another system's cache, of which nothing is unpickled."""

    model = ""

    def __init__(self, entry: ForeignEntry) -> None:
        self.entry = entry
        self.hash = entry.name
        self.label = shown(entry.name)
        self.likeness = (entry.kind, str(entry.kernel.get("name")), *entry.prefixes)

    def differences(self, new: Any) -> list[Difference]:
        """Return what differs between it and another entry of its system: factors first, then artifacts."""
        factors = factor_differences(Key.of(self.entry.key_factors), Key.of(new.entry.key_factors))
        return [*factors, *together(self._artifacts(new.entry))]

    def _artifacts(self, new: ForeignEntry) -> Iterator[Difference]:
        """Yield the artifacts that differ: one is where path, shape and piece are, and its bytes say the rest."""
        old_digests, new_digests = digests_of(self.entry), digests_of(new)
        digests = old_digests.get(""), new_digests.get("")  # of the whole file, where it cannot be read
        if digests[0] != digests[1]:
            said = f"cannot be read in the {'second' if digests[0] is None else 'first'}"
            said = said if None in digests else "cannot be read in either, and has other bytes"
            sentence = f"entry {self.label} {said}"
            yield Difference(what="entry", path=self.hash, old=digests[0], new=digests[1], sentence=sentence)
        sides = [{_place(entry, one): one for one in entry.artifacts} for entry in (self.entry, new)]
        for place in {**sides[0], **sides[1]}:
            one, other = (side.get(place) for side in sides)
            first, second = one and old_digests.get(one.path), other and new_digests.get(other.path)
            artifact = one or other
            if artifact is None or (one and other and first == second and (first or not artifact.size_bytes)):
                continue  # what neither side could read is the same only if both miss it
            if one is None or other is None:
                said = only_in(gone=other is None)
            elif first is None or second is None:
                said = f"is missing or cannot be read in the {'first' if first is None else 'second'}"
            elif one.size_bytes != other.size_bytes:
                said = f"had {one.size_bytes} bytes and has {other.size_bytes} now"
            else:
                said = f"has other bytes, {one.size_bytes} as before"
            sentence = f"{_artifact_words(artifact)} {said}"
            yield Difference(what="artifact", path=artifact.path, old=first, new=second, sentence=sentence)


#: An entry of any system: its hash or name, what people are told of it, and what it may be compared with.
Comparable = EntrySide | ForeignSide


class Side(NamedTuple):
    """One side of a comparison.

    Args:
        text: What the user wrote.
        root: The cache that it is, or lies in.
        system: Which system wrote that.
        entries: What the cache holds, by hash.
        hash: The entry that it is; None for a cache as a whole.
    """

    text: str
    root: Path
    system: str
    entries: Mapping[str, Comparable]
    hash: str | None


def _place(entry: ForeignEntry, artifact: ForeignArtifact) -> Hashable:
    if entry.kind == "artifact":  # the file itself, whatever it is called
        return ""
    return artifact.path, artifact.piece_index, None if artifact.shape is None else shape_text(artifact.shape)


def _artifact_words(artifact: ForeignArtifact) -> str:
    facts = [f"piece {artifact.piece_index}"] if artifact.piece_index is not None else []
    facts += [f"for {shape_text(artifact.shape)}"] if artifact.shape is not None else []
    return f"{artifact.what} {shown(artifact.path)}" + (f" ({' '.join(facts)})" if facts else "")


@contextlib.contextmanager
def open_side(text: str, cache_dir: Path | None = None) -> Iterator[Side]:
    """Yield what `text` names; a bundle is unpacked for as long as the block runs."""
    path = _existing(text)
    root_text, colon, beginning = text.rpartition(":")
    has_root = bool(colon and root_text)
    above = _existing(root_text) if has_root else cache_dir
    cache = read_foreign(path or above) if path or above or not has_root else None
    if cache is not None:
        entries = {entry.name: ForeignSide(entry) for entry in cache.entries}
        yield Side(text, cache.root, cache.system, entries, None if path else one_entry(cache, beginning).name)
    elif path is not None and not path.is_dir():
        from cgtool.toolkit.bundle.unpack import unpacked  # zstandard and more, for bundles alone

        with unpacked(path) as root:
            layout = CacheLayout(root=root)
            hashes = layout.hashes()
            yield _own(text, layout, hashes[0] if len(hashes) == 1 else None)
    elif path is not None:
        yield _folder(text, path.absolute())
    elif _BEGINNING.fullmatch(beginning) and (above is not None or not has_root):
        layout = CacheLayout(root=resolve_root(above))
        yield _own(text, layout, _one_hash(layout, beginning))
    else:
        raise UsageError(
            f"There is no {text!r:.200}. Name a cache's folder, an entry by its hash or as ROOT:HASH, or a bundle.",
            actual=text,
        )


def _existing(text: str) -> Path | None:
    """The path that a text names; None where there is none."""
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long for a path, a null byte, the home of nobody
        return None


def _own(text: str, layout: CacheLayout, hash_: str | None) -> Side:
    entries = {other: EntrySide(layout, other) for other in layout.hashes()}
    return Side(text, layout.root, "cgtool", entries, hash_)


def _folder(text: str, path: Path) -> Side:
    if is_hash(path.name) and path.parent.name == CACHE_FOLDER:
        return _own(text, CacheLayout(root=path.parent.parent), path.name)
    layout = CacheLayout(root=resolve_root(path))
    if not layout.base.is_dir():
        message = f"{path} holds no cache of cgtool. Name a folder that holds {CACHE_FOLDER}, or an entry in it."
        raise CacheError(message, path=path)
    return _own(text, layout, None)


def _one_hash(layout: CacheLayout, beginning: str) -> str:
    hashes = layout.hashes()
    if not hashes:
        message = f"The cache at {layout.root} holds no entry. Fill it with: cgtool warm MODEL"
        raise CacheError(message, path=layout.root)
    return hash_named(layout, beginning, hashes)
