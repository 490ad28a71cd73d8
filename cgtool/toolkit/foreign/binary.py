"""The binary files that torch writes of compiled things: their structure, read without unpickling. No torch.

A mega-cache (the bytes of `torch.compiler.save_cache_artifacts`) and a compiled artifact (`CompiledArtifact.save` in
its binary form) are fields one after another, numbers being eight bytes, the greatest first::

    file      = crc32 of the rest (4 bytes) fields
    bytes     = number (their length) bytes
    text      = bytes (base64 of UTF-8)
    mega      = file: number (1, the version) group*
    group     = text (the kind: "inductor", "aot_autograd", "autotune", "pgo", "precompile") number (how many) member*
    member    = text (its key) bytes (its content, which is pickle more often than not)
    artifact  = file: bytes ("CacheCompiledArtifact") bytes (digest of torch's sources) text (key) bytes (a mega-cache)
              | file: bytes ("AOTCompiledArtifact") bytes (digest of torch's sources) bytes (a pickle)

Source: torch/utils/_appending_byte_serializer.py, torch/compiler/_cache.py and torch/_inductor/standalone_compile.py
of torch 2.13.
"""

from __future__ import annotations

import base64
import binascii
import os
import zlib
from typing import BinaryIO

from cgtool.errors import CacheError
from cgtool.records import dataclass
from cgtool.toolkit.foreign.words import shown

CACHE_HEADER = b"CacheCompiledArtifact"
AOT_HEADER = b"AOTCompiledArtifact"
_MEGA_VERSION = 1
_CHECKSUM_BYTES = 4
_NUMBER_BYTES = 8
_MOST_TEXT_BYTES = 4096
_MOST_MEMBERS = 100_000
#: Checking more than this takes longer than a person who lists a cache would wait.
MOST_CHECKED_BYTES = 1 << 30
_CHUNK = 1 << 20
#: The oldest protocol that begins with its number, and the newest.
_FIRST_PROTOCOL, _LAST_PROTOCOL = 2, 5
_PROTOCOL_OPCODE = 0x80


class BrokenFormatError(CacheError):
    """A file is not of the form that it should be."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One thing in a mega-cache.

    Args:
        kind: Which of torch's caches it belongs to.
        key: What it is looked up by.
        size_bytes: The length of its content.
        protocol: The pickle protocol of its content; None if it does not begin as a pickle does.
        start: Where its content begins in the file.
    """

    kind: str
    key: str
    size_bytes: int
    protocol: int | None
    start: int

    def words(self) -> str:
        """Return it in a few words."""
        holds = "" if self.protocol is None else f", pickle protocol {self.protocol}"
        return f"{shown(f'{self.kind} {self.key}'.rstrip())} ({self.size_bytes} bytes{holds})"


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What such a file says of itself.

    Args:
        header: "mega_cache", "CacheCompiledArtifact" or "AOTCompiledArtifact".
        torch_key: The digest of torch's sources, in hexadecimal; None in a mega-cache.
        key: What an artifact is looked up by; None where the form has none.
        members: What it holds.
        checked: Whether its checksum was compared.
    """

    header: str
    torch_key: str | None
    key: str | None
    members: tuple[Member, ...]
    checked: bool

    @property
    def holds_pickle(self) -> bool:
        """Whether anything of it begins as a pickle does."""
        return any(member.protocol is not None for member in self.members)


def pickle_protocol(head: bytes) -> int | None:
    """Return the pickle protocol that bytes begin with, 2 to 5; None for anything else (0 and 1 begin with no mark)."""
    marked = len(head) > 1 and head[0] == _PROTOCOL_OPCODE and _FIRST_PROTOCOL <= head[1] <= _LAST_PROTOCOL
    return head[1] if marked else None


def native_target(head: bytes) -> str | None:
    """Return which processor an ELF file is for, as `uname -m` says it; None for anything else or an unknown one."""
    if head[:5] != b"\x7fELF\x02" or len(head) < 20:  # noqa: PLR2004  up to the machine's number
        return None
    number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    return {62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}.get(number)


def sniff(head: bytes) -> str | None:
    """Return which of these forms a file has, by its beginning: "mega_cache", "compiled_artifact" or None."""
    length = int.from_bytes(head[_CHECKSUM_BYTES : _CHECKSUM_BYTES + _NUMBER_BYTES], "big")
    rest = head[_CHECKSUM_BYTES + _NUMBER_BYTES :]
    if any(length == len(header) and rest.startswith(header) for header in (CACHE_HEADER, AOT_HEADER)):
        return "compiled_artifact"
    size = int.from_bytes(rest[:_NUMBER_BYTES], "big")
    try:
        kind = base64.b64decode(rest[_NUMBER_BYTES : _NUMBER_BYTES + size], validate=True)
    except binascii.Error:
        return None
    is_mega = length == _MEGA_VERSION and len(kind) > 0 and kind.replace(b"_", b"").isalnum()
    return "mega_cache" if is_mega else None


def read_structure(stream: BinaryIO) -> Structure:
    """Return the structure of a mega-cache or of a compiled artifact.

    Args:
        stream: The file, at its beginning.

    Raises:
        BrokenFormatError: It is torn, its bytes differ from its checksum, or it has another form.
    """
    size = os.fstat(stream.fileno()).st_size
    try:
        checked = _check(stream, size)
        fields = _Fields(stream, _CHECKSUM_BYTES, size)
        first = fields.number()
        if first == _MEGA_VERSION:
            return Structure(header="mega_cache", torch_key=None, key=None, members=_members(fields), checked=checked)
        fields.position -= _NUMBER_BYTES
        return _artifact(fields, checked=checked)
    except OSError as error:
        raise BrokenFormatError(f"it could not be read: {error.strerror or error}") from error


def _artifact(fields: _Fields, *, checked: bool) -> Structure:
    header = fields.data(_MOST_TEXT_BYTES)
    if header not in (CACHE_HEADER, AOT_HEADER):
        raise BrokenFormatError(f"its header {shown(ascii(header[:40]))} is of no known form")
    torch_key = fields.data(_MOST_TEXT_BYTES).hex()
    key = fields.text() if header == CACHE_HEADER else None
    start, length = fields.span()
    if fields.position != fields.end:
        raise BrokenFormatError(f"{fields.end - fields.position} bytes follow its end")
    if header == CACHE_HEADER:
        inner = _Fields(fields.stream, start + _CHECKSUM_BYTES, start + length)
        if length < _CHECKSUM_BYTES or inner.number() != _MEGA_VERSION:
            raise BrokenFormatError("it holds no mega-cache of a known version")
        members = _members(inner)
    else:
        protocol = pickle_protocol(fields.peek(start, min(length, 2)))
        members = (Member(kind="callable", key="", size_bytes=length, protocol=protocol, start=start),)
    return Structure(header=header.decode("ascii"), torch_key=torch_key, key=key, members=members, checked=checked)


def _members(fields: _Fields) -> tuple[Member, ...]:
    members: list[Member] = []
    while fields.position < fields.end:
        kind = fields.text()
        for _ in range(fields.number()):
            if len(members) >= _MOST_MEMBERS:
                raise BrokenFormatError(f"it holds more than {_MOST_MEMBERS} members")
            key = fields.text()
            start, length = fields.span()
            protocol = pickle_protocol(fields.peek(start, min(length, 2)))
            members.append(Member(kind=kind, key=key, size_bytes=length, protocol=protocol, start=start))
    return tuple(members)


def _check(stream: BinaryIO, size: int) -> bool:
    if size < _CHECKSUM_BYTES:
        raise BrokenFormatError("it has zero bytes" if size == 0 else f"it has {size} bytes, which are too few")
    if size > MOST_CHECKED_BYTES:
        return False
    stream.seek(0)
    stored, actual = int.from_bytes(stream.read(_CHECKSUM_BYTES), "big"), 0
    while chunk := stream.read(_CHUNK):
        actual = zlib.crc32(chunk, actual)
    if stored != actual:
        raise BrokenFormatError(f"its bytes differ from its checksum, which is {stored:08x} and should be {actual:08x}")
    return True


class _Fields:
    """The fields between two places of a file; each read moves on, and none reads beyond the end."""

    def __init__(self, stream: BinaryIO, start: int, end: int) -> None:
        self.stream = stream
        self.position = start
        self.end = end

    def number(self) -> int:
        return int.from_bytes(self._take(_NUMBER_BYTES), "big")

    def span(self) -> tuple[int, int]:
        """Where the next bytes lie and how many they are; they are skipped."""
        length = self.number()
        self._need(length)
        start = self.position
        self.position += length
        return start, length

    def data(self, most: int) -> bytes:
        length = self.number()
        if length > most:
            raise BrokenFormatError(f"a short field has {length} bytes, and {most} are the limit")
        return self._take(length)

    def text(self) -> str:
        data = self.data(_MOST_TEXT_BYTES)
        try:
            return base64.b64decode(data, validate=True).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise BrokenFormatError(f"a text of it is not base64 of UTF-8: {shown(ascii(data[:40]))}") from error

    def peek(self, start: int, length: int) -> bytes:
        self.stream.seek(start)
        return self.stream.read(length)

    def _take(self, length: int) -> bytes:
        self._need(length)
        data = self.peek(self.position, length)
        self.position += length
        if len(data) != length:
            raise BrokenFormatError("it became shorter while it was read")
        return data

    def _need(self, length: int) -> None:
        left = self.end - self.position
        if length > left:
            raise BrokenFormatError(f"it ends too early: {length} bytes should follow, and {left} do")
