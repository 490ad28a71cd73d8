"""Reading a bundle that a stranger may have made, forwards and in either form. Must not import torch.

Nothing here writes. `tarfile` makes and parses the headers; the loop over them is ours, for its own takes extended
headers at their word, stops at the first torn one as at an end, and reads on into whatever follows. A header is taken
only if it is byte for byte the one that `tarfile` makes of its name, size and mode; what else it may be is told apart
for the refusal only. Of a folder nothing is looked at but what its index names, each with its size and its digest.
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

_NOT_A_BUNDLE = "Name a file or a folder that cgtool export wrote."
_NO_FILE = "Name a file or a folder that cgtool export wrote, or - to read a pipe as standard input."
_READ = os.O_RDONLY | os.O_CLOEXEC
_EXTENDED = ("pax_header", "is an extended header, which can say anything about other members")
#: By type of a header: the reason, and what it is.
_TYPES = {
    tarfile.LNKTYPE: ("link", "is a hard link"),
    tarfile.SYMTYPE: ("link", "is a symbolic link"),
    tarfile.CHRTYPE: ("device", "is a device"),
    tarfile.BLKTYPE: ("device", "is a device"),
    tarfile.DIRTYPE: ("folder_member", "is a folder, and a bundle holds files only"),
    tarfile.FIFOTYPE: ("fifo", "is a named pipe"),
    tarfile.GNUTYPE_SPARSE: ("sparse", "is a sparse file"),
    **dict.fromkeys((tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE), _EXTENDED),
    **dict.fromkeys((tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK), _EXTENDED),
}
_MAGIC = b"\x28\xb5\x2f\xfd"
#: The magic number of a frame, and its descriptor.
_HEAD_BYTES = 5
_DICTIONARY_BITS = 0x03
#: What is unpacked at once: a few bytes may come to a hundred thousand times as many.
_FEED_BYTES = 4096
#: A packer of ours never looks further back; more would be memory that a stranger asks for.
_MAX_WINDOW_BYTES = 2**27
#: What cannot be packed grows by less than a hundredth, and a block that is not whole yet comes to nothing.
_MOST_GROWTH, _GROWTH_FROM_BYTES = 1.01, 2**20


@runtime_checkable
class OpenBundle(Protocol):
    """A bundle that is being read, forwards.

    Attributes:
        index_bytes: The text of bundle.json.
        signature_bytes: The text of bundle.sig; None where there is none.
        what: What it is called in a message.
        at_once: How many members may be read at a time, each by a thread; 1 where each must be read before the next
            is asked for.
    """

    index_bytes: bytes
    signature_bytes: bytes | None
    what: str
    at_once: int

    def members(self, index: Index) -> Iterator[tuple[Member, Iterator[bytes]]]:
        """Yield every member of `index` in order with its bytes."""


#: A file, a folder, an open stream, or what reads a bundle from elsewhere.
Source = Path | IO[bytes] | OpenBundle


@contextlib.contextmanager
def opened(source: Source, limits: Limits) -> Iterator[OpenBundle]:
    """Yield a bundle with its index and signatures read, and nothing else."""
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
            # Without waiting for a writer of what is a pipe.
            with open(source, "rb", opener=lambda path, _: os.open(path, _READ | os.O_NONBLOCK)) as stream:
                if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                    raise refused("not_a_bundle", "is neither a file nor a folder", advice=_NO_FILE)
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
        message = f"{name} cannot be put into a bundle: its name or its size does not fit into a tar archive ({error})."
        raise CacheError(message, path=name) from error


def padding(size_bytes: int) -> bytes:
    """Return the zeros after a body in an archive."""
    return bytes(-size_bytes % tarfile.BLOCKSIZE)


class Unpacker:
    """Unpacks exactly one frame of zstd, and refuses what grows out of all proportion."""

    def __init__(self, source: IO[bytes], limits: Limits) -> None:
        import zstandard  # milliseconds, and only for who reads a bundle

        self._error: type[Exception] = zstandard.ZstdError
        self._frame: Any = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
        self._source = source
        self._limits = limits
        self._most = limits.max_bytes + limits.max_index_bytes + limits.max_members * 2 * tarfile.BLOCKSIZE
        self._packed = self._unpacked = 0
        self._waiting = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end."""
        while not self._waiting and not self._frame.eof:
            self._feed()
        chunk, self._waiting = bytes(self._waiting[:size]), self._waiting[size:]
        return chunk

    def check_end(self) -> None:
        """Check that all was read and that nothing follows."""
        if self.read(1):
            raise refused("trailing_data", "holds something after its end")
        if self._frame.unused_data or self._source.read(1):
            raise refused("trailing_data", "goes on after its end")

    def _feed(self) -> None:
        data = self._source.read(_FEED_BYTES)
        while not self._packed and len(data) < _HEAD_BYTES and (more := self._source.read(_FEED_BYTES)):
            data += more
        if not self._packed and (data[:4] != _MAGIC or data[4:5] == b"" or data[4] & _DICTIONARY_BITS):
            raise refused("not_a_bundle", "is not packed by zstd", advice="Name a file that cgtool export wrote.")
        if not data:
            raise refused("truncated", "ends too early")
        self._packed += len(data)
        try:
            self._waiting = memoryview(self._frame.decompress(data))
        except self._error as error:
            raise refused("bad_compression", "cannot be unpacked", actual=str(error)) from error
        self._unpacked += len(self._waiting)
        if self._packed > self._unpacked * _MOST_GROWTH + _GROWTH_FROM_BYTES:
            raise refused("bad_compression", "is longer than what it holds")
        ratio = self._unpacked / self._packed
        grown = self._unpacked > self._limits.ratio_from_bytes and ratio > self._limits.max_ratio
        if grown or self._unpacked > self._most:
            advice = "Nothing was changed. Allow more with --max-ratio and --max-size where you expect so much."
            why = f"grows to more than {self._unpacked} bytes from {self._packed}"
            raise refused("bomb", why, expected=self._limits.max_ratio, actual=round(ratio), advice=advice)


class Archive:
    """A bundle as one file."""

    what = "The bundle"
    at_once = 1

    def __init__(self, source: IO[bytes], limits: Limits) -> None:
        self._source = Unpacker(source, limits)
        header = self._next()
        if header is None or header.name != INDEX_FILE:
            name = None if header is None else header.name[:100]
            raise refused("not_a_bundle", f"does not begin with {INDEX_FILE}", actual=name, advice=_NOT_A_BUNDLE)
        self.index_bytes = self._text(header, limits.max_index_bytes)
        self.signature_bytes: bytes | None = None
        self._pending = self._next()
        if self._pending is not None and self._pending.name == SIGNATURE_FILE:
            self.signature_bytes = self._text(self._pending, MAX_SIGNATURE_BYTES)
            self._pending = self._next()

    def members(self, index: Index) -> Iterator[tuple[Member, Iterator[bytes]]]:
        """Yield every member with its bytes; see `OpenBundle`."""
        header = self._pending
        for member in index.members:
            if header is None:
                raise refused("missing_member", "is named by the index and is missing", member=member.path)
            if header.name != member.path:
                raise _stray(header.name, member.path, index)
            _check_size(member, header.size)
            _check_mode(header, member.mode)
            yield member, self._body(header)
            header = self._next()
        if header is not None:
            raise _stray(header.name, None, index)
        self._source.check_end()

    def _text(self, header: tarfile.TarInfo, most: int) -> bytes:
        if header.size > most:
            raise refused("too_large", f"promises {header.size} bytes", member=header.name, expected=most)
        _check_mode(header, RECORD_MODE)
        return b"".join(self._body(header))

    def _next(self) -> tarfile.TarInfo | None:
        """Read the next header; None at the archive's end."""
        block = self._exactly(tarfile.BLOCKSIZE, "between two members")
        if any(block):
            return _parse(block)
        if any(self._exactly(tarfile.BLOCKSIZE, "at its end")) or self._source.read(1):
            raise refused("trailing_data", "holds something after its end")
        return None

    def _body(self, header: tarfile.TarInfo) -> Iterator[bytes]:
        left = header.size
        while left:
            chunk = self._source.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise refused("truncated", "ends too early", member=header.name)
            left -= len(chunk)
            yield chunk
        if any(self._exactly(len(padding(header.size)), "after a member")):
            raise refused("trailing_data", "is followed by bytes that belong to no member", member=header.name)

    def _exactly(self, count: int, where: str) -> bytes:
        found = b""
        while len(found) < count:
            chunk = self._source.read(count - len(found))
            if not chunk:
                raise refused("truncated", f"ends too early, {where}")
            found += chunk
        return found


def _parse(block: bytes) -> tarfile.TarInfo:
    """Return the header in a block, which is the one that an export writes of its name, size and mode."""
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except UnicodeDecodeError as error:
        raise refused("strange_name", "holds a member whose name is no text", actual=str(error)) from error
    except (tarfile.HeaderError, ValueError) as error:
        raise refused("bad_header", "holds a header that is none", actual=str(error)) from error
    if header.type != tarfile.REGTYPE:
        reason, why = _TYPES.get(header.type, ("strange_type", "is neither a file nor anything known"))
        raise refused(reason, why, member=header.name, expected="0", actual=header.type.decode("latin-1"))
    try:
        expected = header_bytes(header.name, header.size, header.mode)
    except CacheError:
        expected = b""
    if block != expected:
        raise refused("bad_header", "has a header with fields that no bundle has", member=header.name)
    return header


def _check_mode(header: tarfile.TarInfo, mode: int) -> None:
    if header.mode != mode:
        raise refused("bad_header", "has other permissions than a bundle gives it", member=header.name)


def _check_size(member: Member, size_bytes: int) -> None:
    if size_bytes != member.size_bytes:
        raise refused(
            "size_mismatch",
            "has another size than the index says",
            member=member.path,
            expected=member.size_bytes,
            actual=size_bytes,
        )


def _stray(name: str, expected: str | None, index: Index) -> RefusedError:
    """Return the refusal of a member that the index does not have at this place."""
    if name in (INDEX_FILE, SIGNATURE_FILE):
        return refused("duplicate_member", "is there twice, or at the wrong place", member=name)
    place_of(name)
    if all(member.path != name for member in index.members):
        return refused("unlisted_member", "is not in the index", member=name, expected=expected)
    if expected is None or name < expected:
        return refused("duplicate_member", "is there twice", member=name, expected=expected)
    return refused("missing_member", "is named by the index and is not at its place", member=expected, actual=name)


class Folder:
    """A bundle as a folder; what else lies there is none of it."""

    what = "The bundle"
    at_once = 1

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder = folder
        index = self._text(INDEX_FILE, limits.max_index_bytes)
        if index is None:
            raise refused("not_a_bundle", f"has no {INDEX_FILE}", advice=_NOT_A_BUNDLE)
        self.index_bytes = index
        self.signature_bytes = self._text(SIGNATURE_FILE, MAX_SIGNATURE_BYTES)

    def _text(self, name: str, most: int) -> bytes | None:
        try:
            with _file(self._folder, name) as (file, size):
                if size > most:
                    raise refused("too_large", f"has {size} bytes", member=name, expected=most, actual=size)
                return b"".join(_chunks(file, size, name))
        except FileNotFoundError:
            return None

    def members(self, index: Index) -> Iterator[tuple[Member, Iterator[bytes]]]:
        """Yield every member with its bytes; see `OpenBundle`."""
        for member in index.members:
            try:
                with _file(self._folder, member.path) as (file, size):
                    _check_size(member, size)
                    yield member, _chunks(file, size, member.path)
            except FileNotFoundError as error:
                raise refused("missing_member", "is named by the index and is missing", member=member.path) from error


def _chunks(file: int, size: int, name: str) -> Iterator[bytes]:
    left = size
    while left:
        chunk = os.read(file, min(left, CHUNK_BYTES))
        if not chunk:
            raise refused("truncated", "ends too early", member=name)
        left -= len(chunk)
        yield chunk


@contextlib.contextmanager
def _file(folder: Path, name: str) -> Iterator[tuple[int, int]]:
    """Yield a regular file of a folder, and its size; no link in its place is followed, and no pipe waited for."""
    try:
        file = os.open(folder / name, _READ | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise refused("link", "is a link or no file, or lies below one", member=name) from error
        raise CacheError(f"{name} cannot be read: {error.strerror}. Check its permissions.", path=name) from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise refused("strange_type", "is no file", member=name)
        yield file, status.st_size
    finally:
        os.close(file)
