"""Unpacking a bundle that a stranger may have made, into a folder of its own. Must not import torch.

Every byte is matched to the index before any of it is parsed, and every entry is checked before the caller sees it.
Nothing is written outside of the folder, whose files are all new.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from cgtool.records import dataclass
from cgtool.store import signatures
from cgtool.store.bundle_index import Index, Limits, Member, names_of_folders, parse_index, refused
from cgtool.store.files import cache_error, discard, os_errors_as_cache_errors
from cgtool.store.layout import CACHE_FOLDER, CacheLayout
from cgtool.toolkit.bundle.content import EntryContent, check_entry
from cgtool.toolkit.bundle.flushing import Flusher
from cgtool.toolkit.bundle.opening import OpenBundle, opened


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """A bundle that was checked.

    Args:
        layout: The cache root that it lies under.
        index: Its members.
        index_bytes: The text of its bundle.json.
        signature_bytes: The text of its bundle.sig; None where there is none.
        signed_by: The id of the trusted key that signed it; None where no keys were asked for.
        entries: Its entries, by hash.
    """

    layout: CacheLayout
    index: Index
    index_bytes: bytes
    signature_bytes: bytes | None
    signed_by: str | None
    entries: tuple[EntryContent, ...]

    def members_of(self, hash_: str) -> tuple[Member, ...]:
        """Return the members of one entry."""
        start = f"{CACHE_FOLDER}/{hash_}/"
        return tuple(member for member in self.index.members if member.path.startswith(start))


def unpack(
    source: Path | IO[bytes], folder: Path, *, keys: signatures.PublicKeys | None = None, limits: Limits | None = None
) -> Unpacked:
    """Unpack a bundle into an empty folder, and check all of it.

    Args:
        source: A file, a folder, or a stream that is read forwards.
        folder: An empty folder of the caller's own.
        keys: Public keys by id, one of which must have signed it; None asks for no signature.
        limits: How much it may hold.

    Raises:
        RefusedError: It is not believed; nothing of it may be used.
        CacheError: It cannot be read, or the folder cannot be written.
    """
    limits = limits or Limits()
    with opened(source, limits) as bundle:
        signed_by = None
        if keys is not None:
            signed_by = signatures.check(bundle.index_bytes, bundle.signature_bytes, keys, what="The bundle")
        elif bundle.signature_bytes is not None:
            signatures.parse_signatures(bundle.signature_bytes)
        index = parse_index(bundle.index_bytes, limits=limits)
        _write_all(bundle, index, folder, signed=signed_by is not None)
    layout = CacheLayout(root=folder)
    found = Unpacked(
        layout=layout,
        index=index,
        index_bytes=bundle.index_bytes,
        signature_bytes=bundle.signature_bytes,
        signed_by=signed_by,
        entries=(),
    )
    grouped: dict[str, list[Member]] = {}
    for member in index.members:
        grouped.setdefault(member.place.hash, []).append(member)
    with os_errors_as_cache_errors(folder):
        entries = tuple(check_entry(layout, hash_, members) for hash_, members in grouped.items())
    return Unpacked(**{**vars(found), "entries": entries})


@contextlib.contextmanager
def unpacked(source: Path | IO[bytes], *, limits: Limits | None = None) -> Iterator[Path]:
    """Check a bundle and yield a cache root that holds it, for as long as the block runs.

    What it holds was made by a stranger: it may be looked at, and must not be loaded.

    Args:
        source: A file, a folder, or a stream that is read forwards.
        limits: How much it may hold.

    Raises:
        RefusedError: It is not believed.
        CacheError: It cannot be read, or the temporary folder cannot be written.
    """
    folder = Path(tempfile.mkdtemp(prefix="cgtool-bundle-"))
    try:
        unpack(source, folder, limits=limits)
        yield folder
    finally:
        discard(folder)


def _write_all(bundle: OpenBundle, index: Index, folder: Path, *, signed: bool) -> None:
    for name in sorted(names_of_folders(member.path for member in index.members)):
        try:
            (folder / name).mkdir()
        except OSError as error:
            raise cache_error(error, folder / name) from error
    with Flusher() as flusher:
        for member, body in bundle.members(index):
            actual = _write(folder / member.path, member, body, flusher)
            if actual != member.sha256:
                reason = "tampered" if signed else "digest_mismatch"
                why = "was changed after it was signed" if signed else "differs from its digest"
                raise refused(reason, why, member=member.path, expected=member.sha256, actual=actual)


def _write(path: Path, member: Member, body: Iterable[bytes], flusher: Flusher) -> str:
    """Write a new file whole, which `flusher` flushes to the disk, and return the digest of what was written."""
    digest = hashlib.sha256()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, member.mode)
    except OSError as error:
        raise cache_error(error, path, needed_bytes=member.size_bytes) from error
    try:
        for chunk in body:
            digest.update(chunk)
            view = memoryview(chunk)
            while view:
                view = view[_written(descriptor, view, path, member) :]
    finally:
        flusher.close(descriptor, path)
    return digest.hexdigest()


def _written(descriptor: int, view: memoryview, path: Path, member: Member) -> int:
    # Only errors of writing are the disk's: those of reading pass through the same loop.
    try:
        return os.write(descriptor, view)
    except OSError as error:
        raise cache_error(error, path, needed_bytes=member.size_bytes) from error
