"""Collecting the members of a bundle from a cache, for export and push. Must not import torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from msgspec.structs import replace

from cgtool.errors import CacheError, RefusedError, UsageError
from cgtool.plan.grammar import sha256_hex
from cgtool.plan.shapes import parse_shape, shape_matches, shape_text
from cgtool.store.bundle.reading import CHUNK_BYTES, header_bytes
from cgtool.store.bundle_index import Index, Limits, Member, check_values, parse_index, without_advice
from cgtool.store.entry import read_entry
from cgtool.store.files import cache_error, corrupt_error, open_file, read_bytes, seal
from cgtool.store.key import read_key
from cgtool.store.layout import CACHE_FOLDER, MANIFEST_FILE, CacheLayout, RankName, short
from cgtool.store.records import Manifest, parse_manifest

#: How often to read an entry again because writers changed it.
_ATTEMPTS = 20


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a member: its bytes, or the file that contains them."""

    member: Member
    data: bytes | None = None
    file: Path | None = None

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes; raise CacheCorruptError at the end if they do not match the member's digest."""
        if self.data is not None:
            yield self.data
        elif self.file is not None:
            yield from _read_file(self.file, self.member)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a bundle."""

    contents: tuple[Content, ...]
    manifests: tuple[Manifest, ...]
    index: Index
    index_bytes: bytes


def gather(
    layout: CacheLayout, names: Iterable[RankName], *, shapes: Sequence[str] = (), debug: bool = True
) -> Contents:
    """Return the contents of a bundle of some ranks, without reading the artifacts yet.

    Args:
        layout: The cache.
        names: The ranks to include.
        shapes: Include only the rows of these shapes; empty includes all rows.
        debug: Include the files that are only for people.

    Raises:
        UsageError: No row has one of these shapes.
        CacheError: A file is missing or corrupt, or `import` would refuse the bundle.
    """
    by_path: dict[str, Content] = {}
    manifests = []
    for name in names:
        base = f"{CACHE_FOLDER}/{name.hash}"
        if f"{base}/key.json" not in by_path:
            _add(by_path, f"{base}/key.json", _read_key_file(layout, name.hash))
        manifest, files = _read_rank(layout, name, shapes, debug=debug)
        for file, data in files.items():
            _add(by_path, f"{base}/rank_{name.rank}/{name.prefix}/{file}", data)
        for row in manifest.rows:
            path = f"{base}/artifacts/{row.artifact.file}"
            member = Member(path=path, sha256=row.artifact.digest, size_bytes=row.artifact.size_bytes)
            by_path[path] = Content(member=member, file=layout.root / path)
        manifests.append(manifest)
    contents = tuple(by_path[path] for path in sorted(by_path))
    index = Index(members=tuple(content.member for content in contents))
    index_bytes = seal(index)
    _check_importable(index_bytes, contents)
    return Contents(contents=contents, manifests=tuple(manifests), index=index, index_bytes=index_bytes)


def _check_importable(index_bytes: bytes, contents: Iterable[Content]) -> None:
    """Check that `import` would accept the bundle, except for its total size, which the importing user limits."""
    try:
        parse_index(index_bytes, limits=Limits(max_bytes=sys.maxsize))
        for content in contents:
            if content.data is not None:
                check_values(content.data, content.member.path)
    except RefusedError as error:
        message = f"Nothing was exported, because import would refuse it. {without_advice(error)}"
        advice = "Select other or fewer entries."
        raise CacheError(
            f"{message} {advice}", path=error.path, expected=error.expected, actual=error.actual
        ) from error
    for content in contents:
        header_bytes(content.member.path, content.member.size_bytes, content.member.mode)


def _add(by_path: dict[str, Content], path: str, data: bytes) -> None:
    member = Member(path=path, sha256=sha256_hex(data), size_bytes=len(data))
    by_path[path] = Content(member=member, data=data)


def _read_key_file(layout: CacheLayout, hash_: str) -> bytes:
    path = layout.key_file(hash_)
    if read_key(layout, hash_) is None or (data := read_bytes(path)) is None:
        raise corrupt_error(path, "it is missing")
    return data


def _read_rank(
    layout: CacheLayout, name: RankName, shapes: Sequence[str], *, debug: bool
) -> tuple[Manifest, dict[str, bytes]]:
    """Return a consistent snapshot of a rank: its manifest without the rows and files to leave out, and its files."""
    path = layout.manifest_file(name)
    for _ in range(_ATTEMPTS):
        data = read_bytes(path)
        if data is None:
            raise CacheError(f"{path.parent} was removed. Check with: cgtool inspect cache", path=path.parent)
        complete = parse_manifest(data, path=path, name=name)
        manifest = _trim(complete, shapes, debug=debug)
        entry = read_entry(layout, name, files=manifest.files)
        if entry is not None and entry.manifest == complete:
            # Keep the bytes of an unchanged manifest: another version of cgtool may have written them differently.
            return manifest, {MANIFEST_FILE: data if manifest is complete else manifest.to_bytes(), **entry.files}
    raise CacheError(f"{path.parent} kept changing while it was read. Try again.", path=name.flat)


def _trim(manifest: Manifest, shapes: Sequence[str], *, debug: bool) -> Manifest:
    if shapes:
        wanted = [parse_shape(text) for text in shapes]
        rows = tuple(row for row in manifest.rows if any(shape_matches(row.shape, shape) for shape in wanted))
        if not rows:
            known = ", ".join(dict.fromkeys(shape_text(row.shape) for row in manifest.rows))
            requested = ", ".join(shapes)
            message = f"Entry {short(manifest.hash)} has no artifact for {requested}. Its shapes are: {known}."
            raise UsageError(message, path=manifest.name.flat, expected=known, actual=requested)
        places = {(row.variant, row.piece_index, shape_text(row.shape)) for row in rows}
        fallbacks = tuple(fallback for fallback in manifest.fallbacks if fallback.place in places)
        manifest = replace(manifest, rows=rows, fallbacks=fallbacks)
    if not debug:
        manifest = replace(manifest, files={n: r for n, r in manifest.files.items() if not n.endswith(".py")})
    return manifest


def _read_file(path: Path, member: Member) -> Iterator[bytes]:
    digest, size = sha256(), 0
    try:
        with open_file(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                size += len(chunk)
                if size > member.size_bytes:
                    break
                digest.update(chunk)
                yield chunk
    except FileNotFoundError as error:
        raise corrupt_error(path, "the manifest names it but it is missing", expected=member.sha256) from error
    except OSError as error:
        raise cache_error(error, path, doing="read") from error
    if size != member.size_bytes or digest.hexdigest() != member.sha256:
        raise corrupt_error(
            path, "its bytes do not match its digest", expected=member.sha256, actual=digest.hexdigest()
        )
