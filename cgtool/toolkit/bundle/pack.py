"""Writing a bundle: entries of a cache become an archive or a folder. Must not import torch.

The same entries give the same archive byte for byte before it is packed, wherever and whenever they lie: only names,
sizes, modes and bytes enter. Each byte is matched to its digest as it is written, so that nothing broken is shipped.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cgtool.errors import CacheError, UsageError
from cgtool.plan.grammar import sha256_hex
from cgtool.records import dataclass
from cgtool.store import signatures
from cgtool.store.bundle_index import INDEX_FILE, SIGNATURE_FILE, Index, Member, names_of_folders
from cgtool.store.entry import read_entry
from cgtool.store.files import RECORD_MODE, cache_error, corrupt, read_bytes, seal, sync_folder
from cgtool.store.key import read_key
from cgtool.store.layout import CACHE_FOLDER, MANIFEST_FILE, SIGNATURES, CacheLayout, RankName
from cgtool.store.records import Manifest, parse_manifest
from cgtool.toolkit.bundle.ahead import ahead
from cgtool.toolkit.bundle.choose import Choice, trimmed
from cgtool.toolkit.bundle.importable import check_importable
from cgtool.toolkit.bundle.tar import CHUNK_BYTES, END, header_bytes, padding

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

#: How often an entry is looked at again that writers change meanwhile.
_ATTEMPTS = 20
#: One artifact of so many shows how long packing takes: few bundles hold more than some of those, and most hold none.
_SAMPLED = 128


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a member is written from: its bytes, or the file that has them."""

    member: Member
    data: bytes | None = None
    file: Path | None = None

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes, which match the member's digest once the last was yielded.

        Raises:
            CacheCorruptError: The file holds others.
            CacheError: It cannot be read.
        """
        if self.data is not None:
            yield self.data
        elif self.file is not None:
            yield from _read_file(self.file, self.member)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything that goes into a bundle.

    Args:
        contents: Of each member, in order.
        manifests: As they will stand in the bundle.
        index: Of all members.
        index_bytes: The text of it.
    """

    contents: tuple[Content, ...]
    manifests: tuple[Manifest, ...]
    index: Index
    index_bytes: bytes


def gather(layout: CacheLayout, names: Iterable[RankName], choice: Choice) -> Contents:
    """Return what goes into a bundle; artifacts are looked at when they are written.

    Args:
        layout: Where the cache lies.
        names: The ranks and prefixes.
        choice: Which rows and files of them.

    Raises:
        UsageError: No row has one of the shapes.
        CacheCorruptError: Something of an entry is missing or not as its digest says.
        CacheSchemaError: Another version of cgtool wrote it.
        CacheError: It cannot be read, or `import` would refuse it.
    """
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
    check_importable(index, index_bytes, {path: content.data for path, content in found.items() if content.data})
    return Contents(contents=contents, manifests=tuple(manifests), index=index, index_bytes=index_bytes)


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


def _read_file(path: Path, member: Member) -> Iterator[bytes]:
    digest, size = hashlib.sha256(), 0
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


def write_archive(
    stream: IO[bytes], contents: Contents, *, keys: Sequence[Ed25519PrivateKey] = (), level: int = 3
) -> int:
    """Write a bundle as an archive.

    Args:
        stream: Where to; it is neither flushed to the disk nor closed.
        contents: What.
        keys: Which keys sign it.
        level: How hard zstd tries, 1 to 19.

    Returns:
        How many bytes were written.

    Raises:
        CacheError: An entry cannot be read, or is not whole.
        OSError: `stream` cannot be written.
    """
    import zstandard  # milliseconds, and only for who writes a bundle

    threads = packing_threads(contents, level)
    packer: Any = zstandard.ZstdCompressor(level=level, threads=threads, write_checksum=True, write_content_size=False)
    out = packer.stream_writer(stream, closefd=False)
    for chunk in ahead(_archive(contents, keys)):
        out.write(chunk)
    out.close()  # ends the frame: one that failed stays torn, and nobody takes it for whole
    return int(out.tell())


def packing_threads(contents: Contents, level: int) -> int:
    """Return how many threads zstd is to have of its own: none where packing is quicker than reading and hashing.

    They would wait for bytes there, and packing with them takes up to twice as much of the processor's time in all.

    Args:
        contents: What is to be packed; a few artifacts are tried.
        level: How hard zstd tries, 1 to 19.

    Returns:
        0, or one for each core; -1 for zstd to count those.

    Raises:
        CacheError: One that was tried cannot be read, or is missing or too long.
    """
    import zstandard

    packer: Any = zstandard.ZstdCompressor(level=level)
    artifacts = [content for content in contents.contents if content.file is not None]
    ahead_secs = packing_secs = 0.0
    for content in artifacts[_SAMPLED - 1 :: _SAMPLED]:
        begin = time.thread_time()
        chunk = next(content.chunks(), b"")
        middle = time.thread_time()
        packer.compress(chunk)
        ahead_secs += middle - begin
        packing_secs += time.thread_time() - middle
    if packing_secs < ahead_secs:
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1


def _archive(contents: Contents, keys: Sequence[Ed25519PrivateKey]) -> Iterator[bytes]:
    """Yield the archive as it is before it is packed."""
    for name, data in _heads(contents.index_bytes, keys).items():
        yield header_bytes(name, len(data), RECORD_MODE) + data + padding(len(data))
    between = b""  # what fills up a body goes along with the next header: each chunk passes from thread to thread
    for content in contents.contents:
        member = content.member
        yield between + header_bytes(member.path, member.size_bytes, member.mode)
        yield from content.chunks()
        between = padding(member.size_bytes)
    yield between + END


def _heads(index: bytes, keys: Sequence[Ed25519PrivateKey]) -> dict[str, bytes]:
    return {INDEX_FILE: index, **({SIGNATURE_FILE: signatures.sign(index, keys)} if keys else {})}


def write_folder(folder: Path, contents: Contents, *, keys: Sequence[Ed25519PrivateKey] = ()) -> int:
    """Write a bundle as a folder, which serves as the root of a cache as it stands.

    All times are the epoch, so that equal entries give equal layers of a container image.

    Args:
        folder: Where to; there may be an empty folder, and nothing else.
        contents: What.
        keys: Which keys sign it.

    Returns:
        How many bytes were written.

    Raises:
        UsageError: Something is at `folder`.
        CacheError: An entry cannot be read or is not whole, or the folder cannot be written.
    """
    check_free(folder)
    index = contents.index_bytes
    heads = _heads(index, keys)
    if keys:
        for hash_ in contents.index.hashes:
            start = f"{CACHE_FOLDER}/{hash_}/{SIGNATURES}/{sha256_hex(index)}"
            heads |= {f"{start}.json": index, f"{start}.sig": heads[SIGNATURE_FILE]}
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(6)}.tmp")
    try:
        try:
            temporary.mkdir(parents=True)
            for name in sorted(names_of_folders([*heads, *(content.member.path for content in contents.contents)])):
                (temporary / name).mkdir()
            num_bytes = sum(_write(temporary / name, [data], RECORD_MODE) for name, data in heads.items())
            for content in contents.contents:
                num_bytes += _write(temporary / content.member.path, content.chunks(), content.member.mode)
            _settle(temporary)
            temporary.replace(folder)
        except OSError as error:
            raise destination_error(error, folder) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(folder.parent)
    return num_bytes


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "it is on a read-only file system",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOENT: "there is no such folder",
    errno.ENOTDIR: "a part of this path is a file and not a folder",
}


def destination_error(error: OSError, path: Path) -> CacheError:
    """Return the sentence for a place that a bundle cannot be written to."""
    words = _WORDS.get(error.errno or 0, error.strerror or str(error))
    advice = "Make room there, or name another place." if error.errno in _FULL else "Name another place."
    return CacheError(f"{path} could not be written: {words}. {advice}", path=path)


def check_free(folder: Path) -> None:
    """Check that nothing would be overwritten.

    Raises:
        UsageError: Something is at `folder`.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UsageError(f"{folder} is there already. Name a folder that is not, or is empty.", path=folder)


def _write(path: Path, chunks: Iterable[bytes], mode: int) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    num_bytes = 0
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            num_bytes += len(view)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return num_bytes


def _settle(folder: Path) -> None:
    """Give everything one time, and flush the names to the disk."""
    for above, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            os.utime(Path(above) / name, (0, 0))
        sync_folder(Path(above))
    os.utime(folder, (0, 0))
