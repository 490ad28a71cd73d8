r"""The tar archive of a bundle: plain ustar, one spelling for each file. Must not import torch.

A header is made of a name, a size and a mode; all else is the same in each::

    name 100 | mode 8 | uid 8 | gid 8 | size 12 | mtime 12 | checksum 8 | type 1 | link 100 | "ustar\0" "00" | user 32
    | group 32 | device 8 8 | prefix 155 | 12 zeros

The numbers are octal, with leading zeros and a zero byte at the end; uid, gid and mtime are 0; link, user, group and
device are empty; type is "0". A name of more than 100 bytes is cut at the first slash after which at most 100 are left.
A body is filled up with zeros to a multiple of 512. Two blocks of zeros end the archive.

The reader takes a header only if it is byte for byte the one that the writer makes of its name, size and mode; what
else it may be is told apart for the refusal only. It reads forwards, so that a pipe serves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from cgtool.errors import CacheError
from cgtool.records import dataclass
from cgtool.store.bundle_index import refused

BLOCK = 512
END = bytes(2 * BLOCK)
#: The most that eleven octal digits count.
MAX_SIZE_BYTES = 8**11 - 1
CHUNK_BYTES = 2**20

_NAME, _PREFIX = 100, 155
_OCTAL = re.compile(rb"[0-7]+\0\Z")
#: By typeflag: the reason, and what it is.
_TYPES = {
    b"1": ("link", "is a hard link"),
    b"2": ("link", "is a symbolic link"),
    b"3": ("device", "is a device"),
    b"4": ("device", "is a device"),
    b"5": ("folder_member", "is a folder, and a bundle holds files only"),
    b"6": ("fifo", "is a named pipe"),
    b"S": ("sparse", "is a sparse file"),
    b"x": ("pax_header", "is an extended header, which can say anything about the next member"),
    b"g": ("pax_header", "is an extended header, which can say anything about all others"),
    b"X": ("pax_header", "is an extended header, which can say anything about the next member"),
    b"L": ("pax_header", "is an extended header, which can say anything about the next member"),
    b"K": ("pax_header", "is an extended header, which can say anything about the next member"),
}


class Source(Protocol):
    """Where bytes come from, forwards."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a header says of the file that follows it."""

    name: str
    size_bytes: int
    block: bytes


def header_bytes(name: str, size_bytes: int, mode: int) -> bytes:
    """Return the header of a file.

    Raises:
        CacheError: The name or the size does not fit.
    """
    prefix, own = _cut(name.encode("utf-8"))
    if own is None or size_bytes > MAX_SIZE_BYTES:
        what = "name is too long" if own is None else "size of 8 GiB or more is too large"
        raise CacheError(f"{name} cannot be put into a bundle: its {what} for a tar archive.", path=name)
    fields = [
        own.ljust(_NAME, b"\0"),
        b"%07o\0" % mode,
        b"%07o\0" % 0,
        b"%07o\0" % 0,
        b"%011o\0" % size_bytes,
        b"%011o\0" % 0,
        b" " * 8,
        b"0",
        bytes(100),
        b"ustar\x0000",
        bytes(64),
        bytes(16),
        prefix.ljust(_PREFIX, b"\0"),
        bytes(12),
    ]
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _cut(name: bytes) -> tuple[bytes, bytes | None]:
    if len(name) <= _NAME:
        return b"", name
    slash = name.find(b"/", len(name) - _NAME - 1)
    return (name[:slash], name[slash + 1 :]) if 0 < slash <= _PREFIX else (b"", None)


def padding(size_bytes: int) -> bytes:
    """Return the zeros after a body."""
    return bytes(-size_bytes % BLOCK)


class TarReader:
    """Reads an archive that a stranger may have written.

    Args:
        source: The archive, unpacked.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._left = 0
        self._padding = 0
        self._member = ""

    def next(self) -> Header | None:
        """Return the next header, of which only name, type and size were looked at; None at the archive's end.

        Raises:
            RefusedError: It is no header of a file, or the archive is cut short or goes on after its end.
        """
        for _ in self.body():
            pass
        block = self._exactly(BLOCK, "between two members")
        if not any(block):
            if any(self._exactly(BLOCK, "at its end")) or self._source.read(1):
                raise refused("trailing_data", "holds something after its end")
            return None
        header = _parse(block)
        self._member, self._left, self._padding = header.name, header.size_bytes, len(padding(header.size_bytes))
        return header

    def check(self, header: Header, mode: int) -> None:
        """Check that a header is the one that the writer makes of its name, its size and `mode`.

        Raises:
            RefusedError: bad_header.
        """
        try:
            expected = header_bytes(header.name, header.size_bytes, mode)
        except (CacheError, UnicodeEncodeError):
            expected = b""
        if header.block != expected:
            raise refused("bad_header", "has a header with fields that no bundle has", member=header.name)

    def body(self) -> Iterator[bytes]:
        """Yield the bytes of the file whose header was read last.

        Raises:
            RefusedError: The archive is cut short, or a body is not filled up with zeros.
        """
        while self._left:
            chunk = self._source.read(min(self._left, CHUNK_BYTES))
            if not chunk:
                raise refused("truncated", "ends too early", member=self._member)
            self._left -= len(chunk)
            yield chunk
        if self._padding:
            count, self._padding = self._padding, 0
            if any(self._exactly(count, "after a member")):
                raise refused("trailing_data", "is followed by bytes that belong to no member", member=self._member)

    def _exactly(self, count: int, where: str) -> bytes:
        found = b""
        while len(found) < count:
            chunk = self._source.read(count - len(found))
            if not chunk:
                raise refused("truncated", f"ends too early, {where}")
            found += chunk
        return found


def _parse(block: bytes) -> Header:
    total = sum(block) - sum(block[148:156]) + 8 * 32
    if block[148:156] != b"%06o\0 " % total:
        raise refused("bad_header", "holds a header whose checksum is wrong")
    name = _name(block)
    kind = block[156:157]
    if kind != b"0":
        reason, why = _TYPES.get(kind, ("strange_type", "is neither a file nor anything known"))
        raise refused(reason, why, member=name, expected="0", actual=kind.decode("latin-1"))
    size = block[124:136]
    if _OCTAL.match(size) is None:
        raise refused("bad_header", "has a size that is none", member=name)
    return Header(name=name, size_bytes=int(size[:-1], 8), block=block)


def _name(block: bytes) -> str:
    own, prefix = (part.split(b"\0", 1)[0] for part in (block[:_NAME], block[345 : 345 + _PREFIX]))
    try:
        return (prefix + b"/" + own if prefix else own).decode("utf-8")
    except UnicodeDecodeError as error:
        raise refused("strange_name", "holds a member whose name is no text", actual=repr(own)) from error
