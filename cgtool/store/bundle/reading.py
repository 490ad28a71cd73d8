"""Sequential reading of untrusted bundles, archives or folders. Must not import torch.

Nothing here writes. `tarfile` builds and parses headers, but its own loop is not used, because it trusts extended
headers, treats a corrupt header as the end of the archive, and reads on into whatever follows. A header is accepted
only if it is byte for byte the one that `tarfile` builds from its name, size and mode; other headers are classified
only for the refusal. In a folder, only the files that the index names are read, and their sizes and digests are
checked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from cgtool.errors import CacheError, RefusedError
from cgtool.store.bundle_index import (
    INDEX_FILE,
    MAX_SIGNATURE_BYTES,
    SIGNATURE_FILE,
    Index,
    Limits,
    Member,
    place_of,
    refused,
)
from cgtool.store.files import RECORD_MODE, cache_error

CHUNK_BYTES = 2**20
END = bytes(2 * tarfile.BLOCKSIZE)

_NOT_A_BUNDLE = "Use a file or folder written by cgtool export."
_NOT_A_FILE = "Use a file or folder written by cgtool export, or - to read a pipe as standard input."
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_EXTENDED = ("pax_header", "is an extended header, which can override the headers of other members")
#: Reason and description of a refusal, by header type.
_REFUSED_TYPES = {
    tarfile.LNKTYPE: ("link", "is a hard link"),
    tarfile.SYMTYPE: ("link", "is a symbolic link"),
    tarfile.CHRTYPE: ("device", "is a device"),
    tarfile.BLKTYPE: ("device", "is a device"),
    tarfile.DIRTYPE: ("folder_member", "is a folder, but a bundle contains only files"),
    tarfile.FIFOTYPE: ("fifo", "is a named pipe"),
    tarfile.GNUTYPE_SPARSE: ("sparse", "is a sparse file"),
    **dict.fromkeys((tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE), _EXTENDED),
    **dict.fromkeys((tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK), _EXTENDED),
}
_MAGIC = b"\x28\xb5\x2f\xfd"
#: The magic number of a frame and its descriptor byte.
_HEAD_BYTES = 5
_DICTIONARY_BITS = 0x03
#: Compressed bytes to decompress at a time; they may expand by a factor of a hundred thousand.
_FEED_BYTES = 4096
#: The largest window that export uses. Limits the memory that a crafted bundle can request.
_MAX_WINDOW_BYTES = 2**27
#: Incompressible data grows by less than 1 %; up to 1 MiB may belong to an incomplete block that gives no output yet.
_MAX_GROWTH, _GROWTH_FROM_BYTES = 1.01, 2**20


@runtime_checkable
class OpenBundle(Protocol):
    """A bundle that is read sequentially.

    Attributes:
        index_bytes: The contents of bundle.json.
        signature_bytes: The contents of bundle.sig; None if there is none.
        what: The subject of messages about it, such as "The bundle".
        at_once: The number of members that can be read concurrently, each by a thread; 1 if each must be read before
            requesting the next.
    """

    index_bytes: bytes
    signature_bytes: bytes | None
    what: str
    at_once: int

    def members(self, index: Index) -> Iterator[tuple[Member, Iterator[bytes]]]:
        """Yield every member of `index` in order with its bytes."""


#: A file, a folder, an open stream, or a bundle that is open already.
Source = Path | IO[bytes] | OpenBundle


@contextlib.contextmanager
def open_bundle(source: Source, limits: Limits) -> Iterator[OpenBundle]:
    """Open a bundle and read its index and signatures."""
    if isinstance(source, OpenBundle):
        yield source
        return
    if not isinstance(source, Path):
        yield Archive(source, limits)
        return
    try:
        if source.is_dir():
            yield Folder(source, limits)
        else:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            with open(source, "rb", opener=lambda path, _: os.open(path, _READ_FLAGS | os.O_NONBLOCK)) as stream:
                if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                    raise refused("not_a_bundle", "is neither a file nor a folder", advice=_NOT_A_FILE)
                yield Archive(stream, limits)
    except OSError as error:
        raise cache_error(error, source, doing="read") from error


def header_bytes(name: str, size_bytes: int, mode: int) -> bytes:
    """Return the header of a file: plain ustar, without times and users."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size_bytes, mode
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError as error:
        message = f"{name} cannot be added to a bundle: its name or size does not fit into a tar header ({error})."
        raise CacheError(message, path=name) from error


def padding(size_bytes: int) -> bytes:
    """Return the zeros that pad a member of an archive to full blocks."""
    return bytes(-size_bytes % tarfile.BLOCKSIZE)


class Unpacker:
    """Decompresses exactly one zstd frame, and refuses one that expands too much."""

    def __init__(self, source: IO[bytes], limits: Limits) -> None:
        import zstandard  # imported lazily: takes milliseconds

        self._error: type[Exception] = zstandard.ZstdError
        self._frame: Any = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
        self._source = source
        self._limits = limits
        self._max_bytes = limits.max_bytes + limits.max_index_bytes + limits.max_members * 2 * tarfile.BLOCKSIZE
        self._packed = self._unpacked = 0
        self._waiting = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; b"" at the end."""
        while not self._waiting and not self._frame.eof:
            self._feed()
        chunk, self._waiting = bytes(self._waiting[:size]), self._waiting[size:]
        return chunk

    def check_end(self) -> None:
        """Check that everything was read and that nothing follows the frame."""
        if self.read(1):
            raise refused("trailing_data", "contains data after the end of its archive")
        if self._frame.unused_data or self._source.read(1):
            raise refused("trailing_data", "contains data after the end of its zstd frame")

    def _feed(self) -> None:
        data = self._source.read(_FEED_BYTES)
        while not self._packed and len(data) < _HEAD_BYTES and (more := self._source.read(_FEED_BYTES)):
            data += more
        if not self._packed and (data[:4] != _MAGIC or data[4:5] == b"" or data[4] & _DICTIONARY_BITS):
            raise refused("not_a_bundle", "is not compressed with zstd", advice="Use a file written by cgtool export.")
        if not data:
            raise refused("truncated", "is truncated")
        self._packed += len(data)
        try:
            self._waiting = memoryview(self._frame.decompress(data))
        except self._error as error:
            raise refused("bad_compression", "cannot be decompressed", actual=str(error)) from error
        self._unpacked += len(self._waiting)
        if self._packed > self._unpacked * _MAX_GROWTH + _GROWTH_FROM_BYTES:
            raise refused("bad_compression", "is larger than its decompressed content")
        ratio = self._unpacked / self._packed
        exceeds_ratio = self._unpacked > self._limits.ratio_from_bytes and ratio > self._limits.max_ratio
        if exceeds_ratio or self._unpacked > self._max_bytes:
            advice = "Nothing was changed. Raise --max-ratio and --max-size if you expect this much."
            why = f"expands to more than {self._unpacked} bytes from {self._packed}"
            raise refused("bomb", why, expected=self._limits.max_ratio, actual=round(ratio), advice=advice)


class Archive:
    """A bundle in an archive."""

    what = "The bundle"
    at_once = 1

    def __init__(self, source: IO[bytes], limits: Limits) -> None:
        self._source = Unpacker(source, limits)
        header = self._next()
        if header is None or header.name != INDEX_FILE:
            name = None if header is None else header.name[:100]
            raise refused("not_a_bundle", f"does not begin with {INDEX_FILE}", actual=name, advice=_NOT_A_BUNDLE)
        self.index_bytes = self._read_file(header, limits.max_index_bytes)
        self.signature_bytes: bytes | None = None
        self._pending = self._next()
        if self._pending is not None and self._pending.name == SIGNATURE_FILE:
            self.signature_bytes = self._read_file(self._pending, MAX_SIGNATURE_BYTES)
            self._pending = self._next()

    def members(self, index: Index) -> Iterator[tuple[Member, Iterator[bytes]]]:
        """Yield every member with its bytes; see `OpenBundle`."""
        header = self._pending
        for member in index.members:
            if header is None:
                raise refused("missing_member", "is named by the index but missing", member=member.path)
            if header.name != member.path:
                raise _unexpected_member(header.name, member.path, index)
            _check_size(member, header.size)
            _check_mode(header, member.mode)
            yield member, self._body(header)
            header = self._next()
        if header is not None:
            raise _unexpected_member(header.name, None, index)
        self._source.check_end()

    def _read_file(self, header: tarfile.TarInfo, max_bytes: int) -> bytes:
        if header.size > max_bytes:
            raise refused("too_large", f"has {header.size} bytes", member=header.name, expected=max_bytes)
        _check_mode(header, RECORD_MODE)
        return b"".join(self._body(header))

    def _next(self) -> tarfile.TarInfo | None:
        """Read the next header; return None at the end of the archive."""
        block = self._exactly(tarfile.BLOCKSIZE, "between two members")
        if any(block):
            return _parse_header(block)
        if any(self._exactly(tarfile.BLOCKSIZE, "at its end")) or self._source.read(1):
            raise refused("trailing_data", "contains data after the end of its archive")
        return None

    def _body(self, header: tarfile.TarInfo) -> Iterator[bytes]:
        left = header.size
        while left:
            chunk = self._source.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise refused("truncated", "is truncated", member=header.name)
            left -= len(chunk)
            yield chunk
        if any(self._exactly(len(padding(header.size)), "after a member")):
            raise refused("trailing_data", "is followed by bytes that belong to no member", member=header.name)

    def _exactly(self, count: int, where: str) -> bytes:
        data = b""
        while len(data) < count:
            chunk = self._source.read(count - len(data))
            if not chunk:
                raise refused("truncated", f"is truncated {where}")
            data += chunk
        return data


def _parse_header(block: bytes) -> tarfile.TarInfo:
    """Return the header in a block, which must be identical to the one that export writes."""
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except UnicodeDecodeError as error:
        raise refused("strange_name", "contains a member whose name is not UTF-8", actual=str(error)) from error
    except (tarfile.HeaderError, ValueError) as error:
        raise refused("bad_header", "contains an invalid header", actual=str(error)) from error
    if header.type != tarfile.REGTYPE:
        reason, why = _REFUSED_TYPES.get(header.type, ("strange_type", "has an unknown type"))
        raise refused(reason, why, member=header.name, expected="0", actual=header.type.decode("latin-1"))
    try:
        expected = header_bytes(header.name, header.size, header.mode)
    except CacheError:
        expected = b""
    if block != expected:
        raise refused("bad_header", "has a header that export does not write", member=header.name)
    return header


def _check_mode(header: tarfile.TarInfo, mode: int) -> None:
    if header.mode != mode:
        raise refused("bad_header", "has unexpected permissions", member=header.name)


def _check_size(member: Member, size_bytes: int) -> None:
    if size_bytes != member.size_bytes:
        raise refused(
            "size_mismatch",
            "has a different size than in the index",
            member=member.path,
            expected=member.size_bytes,
            actual=size_bytes,
        )


def _unexpected_member(name: str, expected: str | None, index: Index) -> RefusedError:
    """Return the refusal of a member that the index does not list at this position."""
    if name in (INDEX_FILE, SIGNATURE_FILE):
        return refused("duplicate_member", "is duplicated or in the wrong place", member=name)
    place_of(name)
    if all(member.path != name for member in index.members):
        return refused("unlisted_member", "is not in the index", member=name, expected=expected)
    if expected is None or name < expected:
        return refused("duplicate_member", "is duplicated", member=name, expected=expected)
    return refused("missing_member", "is named by the index but not in its place", member=expected, actual=name)


class Folder:
    """A bundle in a folder; files that do not belong to the bundle are ignored."""

    what = "The bundle"
    at_once = 1

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder = folder
        index = self._read_file(INDEX_FILE, limits.max_index_bytes)
        if index is None:
            raise refused("not_a_bundle", f"has no {INDEX_FILE}", advice=_NOT_A_BUNDLE)
        self.index_bytes = index
        self.signature_bytes = self._read_file(SIGNATURE_FILE, MAX_SIGNATURE_BYTES)

    def _read_file(self, name: str, max_bytes: int) -> bytes | None:
        try:
            with _open_file(self._folder, name) as (file, size):
                if size > max_bytes:
                    raise refused("too_large", f"has {size} bytes", member=name, expected=max_bytes, actual=size)
                return b"".join(_chunks(file, size, name))
        except FileNotFoundError:
            return None

    def members(self, index: Index) -> Iterator[tuple[Member, Iterator[bytes]]]:
        """Yield every member with its bytes; see `OpenBundle`."""
        for member in index.members:
            try:
                with _open_file(self._folder, member.path) as (file, size):
                    _check_size(member, size)
                    yield member, _chunks(file, size, member.path)
            except FileNotFoundError as error:
                raise refused("missing_member", "is named by the index but missing", member=member.path) from error


def _chunks(file: int, size: int, name: str) -> Iterator[bytes]:
    left = size
    while left:
        chunk = os.read(file, min(left, CHUNK_BYTES))
        if not chunk:
            raise refused("truncated", "is truncated", member=name)
        left -= len(chunk)
        yield chunk


@contextlib.contextmanager
def _open_file(folder: Path, name: str) -> Iterator[tuple[int, int]]:
    """Yield the descriptor and size of a regular file in a folder, without following symlinks or blocking on a FIFO."""
    try:
        file = os.open(folder / name, _READ_FLAGS | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise refused("link", "is a link or not a file, or is below one", member=name) from error
        raise CacheError(f"{name} cannot be read: {error.strerror}. Check its permissions.", path=name) from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise refused("strange_type", "is not a regular file", member=name)
        yield file, status.st_size
    finally:
        os.close(file)
