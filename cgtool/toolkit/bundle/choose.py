"""What goes into a bundle: which entries, ranks and shapes, and the members that they make. Must not import torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from msgspec.structs import replace

from cgtool.errors import CacheError, RefusedError, UsageError
from cgtool.plan.grammar import sha256_hex
from cgtool.plan.shapes import is_asked, parse_shape, shape_text
from cgtool.store.bundle.reading import CHUNK_BYTES, header_bytes
from cgtool.store.bundle_index import Index, Limits, Member, check_values, parse_index, without_advice
from cgtool.store.entry import read_entry
from cgtool.store.files import cache_error, corrupt, read_bytes, seal
from cgtool.store.key import read_key
from cgtool.store.layout import CACHE_FOLDER, MANIFEST_FILE, SHORT_DIGITS, CacheLayout, RankName, short
from cgtool.store.records import Manifest, parse_manifest
from cgtool.store.walk import EntryView, walk
from cgtool.toolkit.selection import hash_named

#: How often an entry is looked at again that writers change meanwhile.
_ATTEMPTS = 20


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


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a member is written from: its bytes, or the file that has them."""

    member: Member
    data: bytes | None = None
    file: Path | None = None

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes, which match the member's digest once the last was yielded."""
        if self.data is not None:
            yield self.data
        elif self.file is not None:
            yield from _read_file(self.file, self.member)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything that goes into a bundle."""

    contents: tuple[Content, ...]
    manifests: tuple[Manifest, ...]
    index: Index
    index_bytes: bytes


def chosen_names(layout: CacheLayout, choice: Choice) -> tuple[RankName, ...]:
    """Return the ranks and prefixes that a choice means, in order."""
    there = layout.hashes()
    if choice.hashes:
        hashes = sorted({hash_named(layout, text, there) for text in choice.hashes})
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


def gather(layout: CacheLayout, names: Iterable[RankName], choice: Choice) -> Contents:
    """Return what goes into a bundle; artifacts are looked at when they are written."""
    found: dict[str, Content] = {}
    manifests = []
    for name in names:
        base = f"{CACHE_FOLDER}/{name.hash}"
        if f"{base}/key.json" not in found:
            _add(found, f"{base}/key.json", _key(layout, name.hash))
        manifest, files = _rank(layout, name, choice)
        for file, data in files.items():
            _add(found, f"{base}/rank_{name.rank}/{name.prefix}/{file}", data)
        for row in manifest.rows:
            path = f"{base}/artifacts/{row.artifact.file}"
            member = Member(path=path, sha256=row.artifact.digest, size_bytes=row.artifact.size_bytes)
            found[path] = Content(member=member, file=layout.root / path)
        manifests.append(manifest)
    contents = tuple(found[path] for path in sorted(found))
    index = Index(members=tuple(content.member for content in contents))
    index_bytes = seal(index)
    _check_importable(index_bytes, contents)
    return Contents(contents=contents, manifests=tuple(manifests), index=index, index_bytes=index_bytes)


def _check_importable(index_bytes: bytes, contents: Iterable[Content]) -> None:
    """What `import` would refuse is not exported; how many bytes there may be in all is for who imports to say."""
    try:
        parse_index(index_bytes, limits=Limits(max_bytes=sys.maxsize))
        for content in contents:
            if content.data is not None:
                check_values(content.data, content.member.path)
    except RefusedError as error:
        message = f"Nothing was exported, for import would refuse it. {without_advice(error)}"
        advice = "Choose other entries, or fewer of them."
        raise CacheError(
            f"{message} {advice}", path=error.path, expected=error.expected, actual=error.actual
        ) from error
    for content in contents:
        header_bytes(content.member.path, content.member.size_bytes, content.member.mode)


def _add(found: dict[str, Content], path: str, data: bytes) -> None:
    member = Member(path=path, sha256=sha256_hex(data), size_bytes=len(data))
    found[path] = Content(member=member, data=data)


def _key(layout: CacheLayout, hash_: str) -> bytes:
    path = layout.key_file(hash_)
    if read_key(layout, hash_) is None or (data := read_bytes(path)) is None:
        raise corrupt(path, "it is missing")
    return data


def _rank(layout: CacheLayout, name: RankName, choice: Choice) -> tuple[Manifest, dict[str, bytes]]:
    for _ in range(_ATTEMPTS):
        found = _rank_at_once(layout, name, choice)
        if found is not None:
            return found
    raise CacheError(f"{layout.rank_dir(name)} kept changing while it was read. Try again.", path=name.flat)


def _rank_at_once(layout: CacheLayout, name: RankName, choice: Choice) -> tuple[Manifest, dict[str, bytes]] | None:
    """The manifest and files of one moment; None where a writer was at work meanwhile."""
    path = layout.manifest_file(name)
    data = read_bytes(path)
    if data is None:
        raise CacheError(f"{path.parent} is gone. Look again with: cgtool inspect cache", path=path.parent)
    whole = parse_manifest(data, path=path, name=name)
    manifest = trimmed(whole, choice)
    entry = read_entry(layout, name, files=manifest.files)
    if entry is None or entry.manifest != whole:
        return None
    # What stays as it is stays as its writer spelled it: that may have been another version.
    return manifest, {MANIFEST_FILE: data if manifest is whole else manifest.to_bytes(), **entry.files}


def trimmed(manifest: Manifest, choice: Choice) -> Manifest:
    """Return a manifest without the rows and files that a choice leaves out."""
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


def _read_file(path: Path, member: Member) -> Iterator[bytes]:
    digest, size = sha256(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                size += len(chunk)
                if size > member.size_bytes:
                    break
                digest.update(chunk)
                yield chunk
    except FileNotFoundError as error:
        raise corrupt(path, "the manifest names it and it is missing", expected=member.sha256) from error
    except OSError as error:
        raise cache_error(error, path, doing="read") from error
    if size != member.size_bytes or digest.hexdigest() != member.sha256:
        raise corrupt(path, "its bytes differ from its digest", expected=member.sha256, actual=digest.hexdigest())
