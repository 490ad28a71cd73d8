"""`export`: write entries of a cache to one file, a folder or an image. Prints nothing; importable without torch.

The uncompressed archive of the same entries is identical byte for byte, regardless of place and time: it contains only
names, sizes, modes and contents. Contents are checked against their digests while they are written, so that a corrupt
entry is never shipped.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from cgtool.errors import CacheError, UsageError
from cgtool.plan.grammar import Record, sha256_hex
from cgtool.store import signatures
from cgtool.store.bundle.gather import Contents, gather
from cgtool.store.bundle.reading import END, header_bytes, padding
from cgtool.store.bundle_index import INDEX_FILE, SIGNATURE_FILE, names_of_folders
from cgtool.store.files import RECORD_MODE, cache_error, os_errors_as_cache_errors, sync_folder, write_new
from cgtool.store.layout import CACHE_FOLDER, SIGNATURES, CacheLayout, RankName
from cgtool.store.leases import keep
from cgtool.store.pruned import remove_tree
from cgtool.toolkit.bundle.choose import Choice, chosen_names

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SCHEMA = 1
DEFAULT_LEVEL = 3
#: Each lease keeps a file open.
_MAX_LEASES = 256
#: How often a lease is retried, for about a second each, before the prune that blocks it is taken for stopped.
_ATTEMPTS = 3
#: How many chunks are read and hashed ahead of the compressor.
_AHEAD = 16
#: Advice for a bundle that cannot be written.
_ELSEWHERE = "name another place"


class Exported(Record, frozen=True, kw_only=True):
    """One rank and prefix of an entry in a bundle, and the number of rows in its exported manifest."""

    hash: str
    rank: int
    prefix: str
    model: str
    rows: int


class ExportReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What was exported; its fields are those that `export --json` prints."""

    schema: int = SCHEMA
    root: str
    #: The destination; "-" for a stream.
    dest: str
    form: Literal["archive", "folder", "image"]
    #: The total size of all members.
    size_bytes: int
    written_bytes: int
    #: The number of files in the bundle.
    members: int
    #: The digest of the index, which is what signatures sign.
    sha256_of_index: str
    #: The ids of the keys that signed it.
    signed_by: tuple[str, ...]
    entries: tuple[Exported, ...]


@runtime_checkable
class Image(Protocol):
    """A destination for a container image; see `cgtool.toolkit.image`."""

    url: str

    def write(self, contents: Contents, heads: Mapping[str, bytes]) -> int:
        """Write a cache with these contents and additional files; return the number of bytes written."""


@os_errors_as_cache_errors()
def export(
    dest: Path | IO[bytes] | Image,
    *,
    choice: Choice | None = None,
    cache_dir: Path | None = None,
    folder: bool = False,
    level: int = DEFAULT_LEVEL,
    sign: Sequence[Path] = (),
) -> ExportReport:
    """Write the chosen entries as a bundle; the destination is replaced atomically.

    Args:
        dest: The destination: a path, an open stream, or an image.
        choice: Which entries, ranks and shapes; None means all, if they are of one model.
        cache_dir: The cache's root; None means the one that `warm` fills.
        folder: Write a folder instead of an archive.
        level: The zstd compression level, 1 to 19.
        sign: Files with private keys.

    Raises:
        UsageError: The choice matches nothing, a key is invalid, or a folder exists at the destination.
        CacheCorruptError: A file of an entry is missing or does not match its digest.
        CacheError: The cache cannot be read, or the destination cannot be written.
    """
    choice = choice or Choice()
    keys = [signatures.load_private_key(path) for path in sign]
    layout = CacheLayout.at(cache_dir)
    if isinstance(dest, Path) and folder:
        check_free(dest)
    contents = gather(layout, choose_and_lease(layout, choice), shapes=choice.shapes, debug=choice.debug)
    form: Literal["archive", "folder", "image"] = "folder" if folder else "archive"
    if isinstance(dest, Path):
        name = str(dest)
        if folder:
            written = write_folder(dest, contents, keys=keys)
        else:
            written = _write_file(dest, contents, keys=keys, level=level)
    elif isinstance(dest, Image):
        name, form, written = dest.url, "image", dest.write(contents, _signature_files(contents, keys))
    else:
        name, written = "-", write_archive(dest, contents, keys=keys, level=level)
        dest.flush()
    index = contents.index
    return ExportReport(
        root=str(layout.root),
        dest=name,
        form=form,
        size_bytes=index.size_bytes,
        written_bytes=written,
        members=len(index.members),
        sha256_of_index=sha256_hex(contents.index_bytes),
        signed_by=tuple(sorted(signatures.key_id(key.public_key()) for key in keys)),
        entries=tuple(
            Exported(
                hash=manifest.hash,
                rank=manifest.rank,
                prefix=manifest.prefix,
                model=manifest.model,
                rows=len(manifest.rows),
            )
            for manifest in contents.manifests
        ),
    )


def choose_and_lease(layout: CacheLayout, choice: Choice) -> tuple[RankName, ...]:
    """Resolve a choice, and lease the ranks until this process ends, so that prune keeps them while they are read."""
    before: tuple[RankName, ...] = ()
    attempts = 0
    while attempts < _ATTEMPTS:
        names = chosen_names(layout, choice)
        if all(keep(layout, name) for name in names[:_MAX_LEASES]):
            return names
        # A prune holds or has removed one of them. Choose again: a removed entry is an error if named by its hash, and
        # otherwise no longer part of the choice.
        attempts = attempts + 1 if names == before else 0
        before = names
    message = f"Another process is removing chosen entries from {layout.root}. Wait until it ends, and try again."
    raise CacheError(message, path=layout.root)


def _write_file(dest: Path, contents: Contents, *, keys: list[Any], level: int) -> int:
    if dest.is_dir():
        message = f"{dest} is a folder. Name a file such as {dest / 'model.tar.zst'}, or write a folder with --folder."
        raise UsageError(message, path=dest)
    with _atomic_destination(dest) as temporary, temporary.open("xb") as stream:
        written = write_archive(stream, contents, keys=keys, level=level)
        stream.flush()
        os.fsync(stream.fileno())
    return written


@contextlib.contextmanager
def _atomic_destination(dest: Path) -> Iterator[Path]:
    """Yield a temporary path beside `dest`, renamed to `dest` when the block succeeds and removed otherwise."""
    temporary = dest.with_name(f".{dest.name}.{os.getpid()}.{secrets.token_hex(6)}.tmp")
    try:
        yield temporary
        temporary.replace(dest)
    except OSError as error:
        raise cache_error(error, dest, elsewhere=_ELSEWHERE) from error
    finally:
        list(remove_tree(str(temporary)))
    sync_folder(dest.parent)


def write_archive(
    stream: IO[bytes], contents: Contents, *, keys: Sequence[Ed25519PrivateKey] = (), level: int = 3
) -> int:
    """Write a bundle as an archive."""
    import zstandard  # imported lazily: only archives need it

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1
    packer: Any = zstandard.ZstdCompressor(level=level, threads=threads, write_checksum=True, write_content_size=False)
    out = packer.stream_writer(stream, closefd=False)
    for chunk in _ahead(_archive(contents, keys)):
        out.write(chunk)
    out.close()  # ends the frame; after a failure it stays incomplete, so that no reader accepts it
    return int(out.tell())


def _ahead(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield from `chunks`, a few chunks ahead in a thread, so that reading, hashing and compression overlap."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="cgtool-ahead")
    try:
        waiting = deque(pool.submit(next, chunks, None) for _ in range(_AHEAD))
        while (chunk := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, chunks, None))
            yield chunk
    finally:
        pool.shutdown(cancel_futures=True)


def _archive(contents: Contents, keys: Sequence[Ed25519PrivateKey]) -> Iterator[bytes]:
    """Yield the uncompressed archive."""
    for name, data in _heads(contents.index_bytes, keys).items():
        yield header_bytes(name, len(data), RECORD_MODE) + data + padding(len(data))
    between = b""  # the padding of a body is joined to the next header, to pass fewer chunks between threads
    for content in contents.contents:
        member = content.member
        yield between + header_bytes(member.path, member.size_bytes, member.mode)
        yield from content.chunks()
        between = padding(member.size_bytes)
    yield between + END


def _heads(index: bytes, keys: Sequence[Ed25519PrivateKey]) -> dict[str, bytes]:
    return {INDEX_FILE: index, **({SIGNATURE_FILE: signatures.sign(index, keys)} if keys else {})}


def _signature_files(contents: Contents, keys: Sequence[Ed25519PrivateKey]) -> dict[str, bytes]:
    """Return the signed index and its signatures, by their paths in a cache."""
    if not keys:
        return {}
    index, signed = contents.index_bytes, signatures.sign(contents.index_bytes, keys)
    starts = [f"{CACHE_FOLDER}/{hash_}/{SIGNATURES}/{sha256_hex(index)}" for hash_ in contents.index.hashes]
    return {f"{start}.{suffix}": data for start in starts for suffix, data in (("json", index), ("sig", signed))}


def write_folder(folder: Path, contents: Contents, *, keys: Sequence[Ed25519PrivateKey] = ()) -> int:
    """Write a bundle as a folder that can be used as a cache root.

    All times are the epoch, so that equal entries give equal container image layers.
    """
    check_free(folder)
    heads = _heads(contents.index_bytes, keys) | _signature_files(contents, keys)
    with _atomic_destination(folder) as temporary:
        temporary.mkdir(parents=True)
        for name in sorted(names_of_folders([*heads, *(content.member.path for content in contents.contents)])):
            (temporary / name).mkdir()
        num_bytes = sum(write_new(temporary / name, [data]) for name, data in heads.items())
        for content in contents.contents:
            num_bytes += write_new(temporary / content.member.path, content.chunks(), content.member.mode)
        _reset_times_and_sync(temporary)
    return num_bytes


def check_free(folder: Path) -> None:
    """Raise a UsageError if a folder exists and is not empty."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UsageError(f"{folder} already exists. Name a new or an empty folder.", path=folder)


def _reset_times_and_sync(folder: Path) -> None:
    for above, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            os.utime(Path(above) / name, (0, 0))
        sync_folder(Path(above))
    os.utime(folder, (0, 0))
