"""`export`: entries of a cache as one file, or as a folder. Prints nothing; importable without torch.

The same entries give the same archive byte for byte before it is packed, wherever and whenever they lie: only names,
sizes, modes and bytes enter. Each byte is matched to its digest as it is written, so that nothing broken is shipped.
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
#: Each lease is an open file.
_MOST_HELD = 256
#: What a prune holds for so many seconds longer and does not remove, it has been stopped with.
_ATTEMPTS = 3
#: How many chunks are read and hashed before the packer asks for them.
_AHEAD = 16
#: What a user can do where a bundle cannot be written.
_ELSEWHERE = "name another place"


class Exported(Record, frozen=True, kw_only=True):
    """One rank and prefix of an entry in a bundle, and how many rows its manifest has there."""

    hash: str
    rank: int
    prefix: str
    model: str
    rows: int


class ExportReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What was exported; its fields are those that `export --json` prints."""

    schema: int = SCHEMA
    root: str
    #: Where to; "-" for a stream.
    dest: str
    form: Literal["archive", "folder", "image"]
    #: The size of all members together.
    size_bytes: int
    written_bytes: int
    #: How many files the bundle holds.
    members: int
    #: The digest of its index, which signatures sign.
    sha256_of_index: str
    #: The ids of the keys that signed it.
    signed_by: tuple[str, ...]
    entries: tuple[Exported, ...]


@runtime_checkable
class Image(Protocol):
    """What a container image is written to; see `cgtool.toolkit.image`."""

    url: str

    def write(self, contents: Contents, heads: Mapping[str, bytes]) -> int:
        """Write a cache of some contents and further files; return how many bytes that took."""


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
    """Write chosen entries as a bundle; what is at the destination is replaced whole or not at all.

    Args:
        dest: Where to: a path, an open stream, or an image.
        choice: Which entries, ranks and shapes; None means all of the one model.
        cache_dir: The cache's root; None means the one that `warm` fills.
        folder: Write a folder instead of an archive.
        level: How hard zstd tries, 1 to 19.
        sign: Files of private keys.

    Raises:
        UsageError: The choice fits nothing, a key is none, or a folder is in the way.
        CacheCorruptError: Something of an entry is missing or not as its digest says.
        CacheError: The cache cannot be read, or the destination cannot be written.
    """
    choice = choice or Choice()
    keys = [signatures.load_private_key(path) for path in sign]
    layout = CacheLayout.at(cache_dir)
    if isinstance(dest, Path) and folder:
        check_free(dest)
    contents = gather(layout, held_names(layout, choice), shapes=choice.shapes, debug=choice.debug)
    form: Literal["archive", "folder", "image"] = "folder" if folder else "archive"
    if isinstance(dest, Path):
        name = str(dest)
        if folder:
            written = write_folder(dest, contents, keys=keys)
        else:
            written = _write_file(dest, contents, keys=keys, level=level)
    elif isinstance(dest, Image):
        name, form, written = dest.url, "image", dest.write(contents, _signatures(contents, keys))
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
            Exported(hash=found.hash, rank=found.rank, prefix=found.prefix, model=found.model, rows=len(found.rows))
            for found in contents.manifests
        ),
    )


def held_names(layout: CacheLayout, choice: Choice) -> tuple[RankName, ...]:
    """Choose, and hold what was chosen until this process ends: prune leaves alone what is being read."""
    before: tuple[RankName, ...] = ()
    times = 0
    while times < _ATTEMPTS:
        names = chosen_names(layout, choice)
        if all(keep(layout, name) for name in names[:_MOST_HELD]):
            return names
        # A prune was quicker with one of them: chosen by its hash it is missed now, and else it is not meant any more.
        times = times + 1 if names == before else 0
        before = names
    message = f"Another process is removing what was chosen from {layout.root}. Wait for its end, and try again."
    raise CacheError(message, path=layout.root)


def _write_file(dest: Path, contents: Contents, *, keys: list[Any], level: int) -> int:
    if dest.is_dir():
        message = f"{dest} is a folder. Name a file such as {dest / 'model.tar.zst'}, or write a folder with --folder."
        raise UsageError(message, path=dest)
    with _appearing(dest) as temporary, temporary.open("xb") as stream:
        written = write_archive(stream, contents, keys=keys, level=level)
        stream.flush()
        os.fsync(stream.fileno())
    return written


@contextlib.contextmanager
def _appearing(dest: Path) -> Iterator[Path]:
    """Yield a path beside `dest` that is renamed to it once the block has ended well, and else removed."""
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
    import zstandard  # milliseconds, and only for who writes a bundle

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1
    packer: Any = zstandard.ZstdCompressor(level=level, threads=threads, write_checksum=True, write_content_size=False)
    out = packer.stream_writer(stream, closefd=False)
    for chunk in _ahead(_archive(contents, keys)):
        out.write(chunk)
    out.close()  # ends the frame: one that failed stays torn, and nobody takes it for whole
    return int(out.tell())


def _ahead(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what `chunks` yields, which runs a few chunks ahead in a thread: reading, hashing and packing overlap."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="cgtool-ahead")
    try:
        waiting = deque(pool.submit(next, chunks, None) for _ in range(_AHEAD))
        while (chunk := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, chunks, None))
            yield chunk
    finally:
        pool.shutdown(cancel_futures=True)


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


def _signatures(contents: Contents, keys: Sequence[Ed25519PrivateKey]) -> dict[str, bytes]:
    """Where a cache keeps what was signed of its entries."""
    if not keys:
        return {}
    index, signed = contents.index_bytes, signatures.sign(contents.index_bytes, keys)
    starts = [f"{CACHE_FOLDER}/{hash_}/{SIGNATURES}/{sha256_hex(index)}" for hash_ in contents.index.hashes]
    return {f"{start}.{suffix}": data for start in starts for suffix, data in (("json", index), ("sig", signed))}


def write_folder(folder: Path, contents: Contents, *, keys: Sequence[Ed25519PrivateKey] = ()) -> int:
    """Write a bundle as a folder, which serves as the root of a cache as it stands.

    All times are the epoch, so that equal entries give equal layers of a container image.
    """
    check_free(folder)
    heads = _heads(contents.index_bytes, keys) | _signatures(contents, keys)
    with _appearing(folder) as temporary:
        temporary.mkdir(parents=True)
        for name in sorted(names_of_folders([*heads, *(content.member.path for content in contents.contents)])):
            (temporary / name).mkdir()
        num_bytes = sum(write_new(temporary / name, [data]) for name, data in heads.items())
        for content in contents.contents:
            num_bytes += write_new(temporary / content.member.path, content.chunks(), content.member.mode)
        _settle(temporary)
    return num_bytes


def check_free(folder: Path) -> None:
    """Check that nothing would be overwritten."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UsageError(f"{folder} is there already. Name a folder that is not, or is empty.", path=folder)


def _settle(folder: Path) -> None:
    """Give everything one time, and flush the names to the disk."""
    for above, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            os.utime(Path(above) / name, (0, 0))
        sync_folder(Path(above))
    os.utime(folder, (0, 0))
