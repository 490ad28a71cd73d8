"""`diff`: what differs between two caches, entries or bundles, or between an entry and this machine.

Caches and entries are told apart by their names and paired by what they have in common, whichever system wrote them.
Prints nothing; importable without torch. What the user names as a side::

    side = folder of a cache | .../torch_compile_cache/<hash> | file of a bundle
         | URL of a store | URL of a store ":" beginning of a hash
         | folder of a cache ":" beginning of a hash | beginning of a hash, of the cache that is named beside it

What exists as a path is taken for one; a beginning must be that of one entry alone. A cache may be another system's, a
folder or a file; its entries have names for hashes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec.structs import asdict

from cgtool.errors import CacheError, UsageError
from cgtool.plan.shapes import shape_text
from cgtool.remote.stores import is_remote
from cgtool.remote.stores import shown as shown_url
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.key import differences
from cgtool.store.layout import CACHE_FOLDER, CacheLayout, is_hash, resolve_root
from cgtool.store.records import Key
from cgtool.toolkit.diff.entries import EntrySide, factor_differences
from cgtool.toolkit.diff.records import Difference, located, only_in, together
from cgtool.toolkit.foreign.contents import digests_of
from cgtool.toolkit.foreign.detect import read_foreign
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignEntry, one_entry
from cgtool.toolkit.foreign.tree import shown
from cgtool.toolkit.selection import empty, hash_named

if TYPE_CHECKING:
    from cgtool.store.machine import Machine  # costs more to load than two entries to compare

SCHEMA = 1

_BEGINNING = re.compile(r"[0-9a-fA-F]{1,64}")


class DiffReport(NamedTuple):
    """What differs between two sides, of which people are told `old` and `new`: the most telling first."""

    old: str
    new: str
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return the document that `diff --json` prints."""
        return {"schema": SCHEMA, "equal": self.equal, "differences": [asdict(one) for one in self.differences]}


@os_errors_as_cache_errors()
def diff(old: str, new: str | None = None, *, here: bool = False, cache_dir: Path | None = None) -> DiffReport:
    """Compare two sides.

    Args:
        old: The first side, in the grammar above.
        new: The second side; None with `here`.
        here: Compare the first side, an entry, with this machine.
        cache_dir: The cache in which hashes are looked up; None means the one that `warm` fills.

    Raises:
        UsageError: A side names nothing or several things, the sides are of several systems, or an entry is compared
            with a cache of none of its model.
        CacheError: A side cannot be read or trusted.
        RefusedError: A bundle is not whole.
    """
    if here == (new is not None):
        raise UsageError("Name two sides, A and B, or one entry and --here.")
    with contextlib.ExitStack() as stack:
        left = stack.enter_context(open_side(old, cache_dir))
        right = None if new is None else stack.enter_context(open_side(new, cache_dir))
        strange = [side.system for side in (left, right) if side is not None and side.system != "cgtool"]
        if strange and (right is None or left.system != right.system):
            message = (
                f"What {' and '.join(strange)} wrote is compared with what the same system wrote alone. Name two sides "
                "of one kind; `cgtool inspect cache PATH` tells what wrote a path."
            )
            raise UsageError(message, actual=[old, new])
        if right is None:
            return _with_machine(left)
        if left.hash is None and right.hash is None:
            return DiffReport(left.text, right.text, tuple(compare_caches(left, right)))
        first = _chosen(left) if right.hash is None else _like(left, _chosen(right))
        second = _like(right, first)
        return DiffReport(_label(left, first), _label(right, second), tuple(first.differences(second)))


def _label(side: Side, entry: Comparable) -> str:
    """What people are told of an entry of a side."""
    if side.system != "cgtool":
        return side.text
    return entry.label if entry.hash.startswith(side.text.lower()) else f"{entry.label} of {side.text}"


def _chosen(side: Side) -> Comparable:
    """The entry that a side is; that of a cache where it has but one."""
    if side.hash is not None:
        return side.entries[side.hash]
    if len(side.entries) == 1:
        return next(iter(side.entries.values()))
    raise _not_one(side, len(side.entries))


def _like(side: Side, entry: Comparable) -> Comparable:
    """The entry that a side is; of a cache the one of the same hash, else the only one of the same model."""
    hash_ = entry.hash if side.hash is None else side.hash
    if hash_ in side.entries:
        return side.entries[hash_]
    fitting = [other for other in side.entries.values() if other.likeness == entry.likeness]
    if entry.likeness is not None and len(fitting) == 1:
        return fitting[0]
    raise _not_one(side, len(fitting))


def _not_one(side: Side, count: int) -> UsageError:
    several = f"{side.root} holds {count or 'no'} {'entry' if count == 1 else 'entries'} to compare with."
    message = f"{several} Name one as {side.root}:HASH; `cgtool inspect cache` lists them."
    return UsageError(message, path=side.root)


def compare_caches(old: Side, new: Side) -> list[Difference]:
    """Return what differs between two caches of one system.

    Entries of one hash come first; then each pair of entries of which either side has only one of their model, down to
    the factor; then what only one side has. An entry that cannot be read is a difference of its own.
    """
    found: list[Difference] = []
    for hash_, one in old.entries.items():
        if hash_ in new.entries:
            found += _compared(one, new.entries[hash_], f"entry {one.label}")
    left = {hash_: entry for hash_, entry in old.entries.items() if hash_ not in new.entries}
    right = {hash_: entry for hash_, entry in new.entries.items() if hash_ not in old.entries}
    olds, news = _only_ones(left.values()), _only_ones(right.values())
    alone: list[Difference] = []
    for likeness, one in olds.items():
        if likeness in news:
            other = news[likeness]
            named = one.label if one.label == other.label else f"{one.label} → {other.label}"
            found += _compared(one, other, f"{one.model}, entry {named}" if one.model else f"entry {named}")
            if old.root.is_dir() and new.root.is_dir():  # the names of files are nothing of what they hold
                said = f"{_words(one)} is only in the first, and {other.label} only in the second"
                alone.append(_entry(one.hash, other.hash, said))
            del left[one.hash], right[other.hash]
    alone += [_entry(hash_, None, f"{_words(entry)} {only_in(gone=True)}") for hash_, entry in left.items()]
    alone += [_entry(None, hash_, f"{_words(entry)} {only_in(gone=False)}") for hash_, entry in right.items()]
    return [*found, *alone]


def _only_ones(entries: Iterable[Comparable]) -> dict[Hashable, Comparable]:
    """Entries by what they have in common with others, without those of which there are several."""
    groups: dict[Hashable, list[Comparable]] = {}
    for entry in entries:
        if entry.likeness is not None:
            groups.setdefault(entry.likeness, []).append(entry)
    return {likeness: group[0] for likeness, group in groups.items() if len(group) == 1}


def _compared(old: Comparable, new: Comparable, label: str) -> list[Difference]:
    try:
        return located(old.differences(new), label)
    except CacheError as error:
        return [_entry(old.hash, new.hash, f"{label} cannot be compared: {error}")]


def _words(entry: Comparable) -> str:
    return f"entry {entry.label} ({entry.model})" if entry.model else f"entry {entry.label}"


def _entry(old: str | None, new: str | None, sentence: str) -> Difference:
    return Difference(what="entry", path=str(old or new), old=old, new=new, sentence=sentence)


def _with_machine(side: Side) -> DiffReport:
    from cgtool.store.machine import this_machine  # costs more to load than two entries to compare

    entry = cast("EntrySide", _chosen(side))
    found = machine_differences(entry.key, this_machine())
    return DiffReport(_label(side, entry), "this machine", tuple(found))


def machine_differences(key: Key, machine: Machine) -> list[Difference]:
    """Return in which factors a machine differs from the one on which an entry was compiled."""
    from cgtool.store.machine import differences_here

    return factor_differences(differences_here(key, machine))


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
        factors = factor_differences(differences(Key.of(self.entry.key_factors), Key.of(new.entry.key_factors)))
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
    """One side of a comparison: a cache and what it holds, or (`hash`) one entry of it."""

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
    """Yield what `text` names, in the grammar above; a bundle is unpacked for as long as the block runs."""
    if is_remote(text):
        with _store(text) as side:
            yield side
        return
    path = _existing(text)
    root_text, colon, beginning = text.rpartition(":")
    has_root = bool(colon and root_text)
    above = _existing(root_text) if has_root else cache_dir
    cache = read_foreign(path or above) if path or above or not has_root else None
    if cache is not None:
        entries = {entry.name: ForeignSide(entry) for entry in cache.entries}
        yield Side(text, cache.root, cache.system, entries, None if path else one_entry(cache, beginning).name)
    elif path is not None and not path.is_dir():
        from cgtool.store.bundle.unpack import unpacked  # zstandard and more, for bundles alone

        with unpacked(path) as root:
            layout = CacheLayout(root=root)
            hashes = layout.hashes()
            yield _own(text, layout, hashes[0] if len(hashes) == 1 else None)
    elif path is not None:
        yield _folder(text, path.absolute())
    elif _BEGINNING.fullmatch(beginning) and (above is not None or not has_root):
        layout = CacheLayout(root=resolve_root(above))
        hashes = layout.hashes()
        if not hashes:
            raise empty(layout)
        yield _own(text, layout, hash_named(layout, beginning, hashes))
    else:
        raise UsageError(
            f"There is no {text!r:.200}. Name a cache's folder, an entry by its hash or as ROOT:HASH, or a bundle.",
            actual=text,
        )


@contextlib.contextmanager
def _store(text: str) -> Iterator[Side]:
    """Yield a store, or the entry that is named behind its URL; none of its artifacts is fetched."""
    from cgtool.toolkit.mirror import mirrored  # for stores alone

    url, _, beginning = text.rpartition(":")
    # Behind a host alone, figures are a port.
    names_entry = "/" in url.partition("://")[2] and _BEGINNING.fullmatch(beginning) is not None
    with mirrored(url if names_entry else text) as mirror:
        hashes = mirror.layout.hashes()
        hash_ = hash_named(mirror.layout, beginning, hashes) if names_entry else None
        yield _own(shown_url(text), mirror.layout, hash_ or (hashes[0] if len(hashes) == 1 else None))


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
