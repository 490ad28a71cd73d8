"""Parsers for untrusted files: Python literals, JSON, torch's binary formats. Must not import torch.

Sizes are limited, and nothing is executed or unpickled. Literals are those that `pprint` writes for dictionaries,
tuples, lists, strings, integers, True, False and None::

    value = "None" | "True" | "False" | ["-"] digits | text+ | "(" values ")" | "[" values "]" | "{" pairs or values "}"

with quotes and escapes as `repr` writes them. The whole text is matched to these tokens before it is passed to
`ast.literal_eval`, so that no name, call, operator, comment or questionable escape reaches Python's parser. The nesting
is limited because deep nesting could crash the process.

A mega-cache (the bytes of `torch.compiler.save_cache_artifacts`) and a compiled artifact (`CompiledArtifact.save` in
its binary form) are sequences of fields; numbers are eight bytes, big-endian::

    file      = crc32 of the rest (4 bytes) fields
    bytes     = number (their length) bytes
    text      = bytes (base64 of UTF-8)
    mega      = file: number (1, the version) group*
    group     = text (the kind: "inductor", "aot_autograd", "autotune", "pgo", "precompile") number (how many) member*
    member    = text (its key) bytes (its content, usually a pickle)
    artifact  = file: bytes ("CacheCompiledArtifact") bytes (digest of torch's sources) text (key) bytes (a mega-cache)
              | file: bytes ("AOTCompiledArtifact") bytes (digest of torch's sources) bytes (a pickle)

Source: torch/utils/_appending_byte_serializer.py, torch/compiler/_cache.py and torch/_inductor/standalone_compile.py
of torch 2.13.
"""

from __future__ import annotations

import ast
import base64
import binascii
import os
import re
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from cgtool.errors import CacheError
from cgtool.toolkit.foreign.tree import display_text

#: A row of vLLM's index has 400 bytes and about 20 tokens.
MAX_BYTES = 8 << 20
MAX_TOKENS = 600_000
MAX_DEPTH = 32
#: The checksum of a larger file is not checked, because that would make a listing slow.
MAX_CHECKED_BYTES = 1 << 30

_ESCAPE = r"\\(?:['\"\\nrt]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
_TOKEN = re.compile(
    r"(?P<space>[ \n\r\t]+)|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<mark>[,:])"
    r"|(?P<word>None|True|False)(?![A-Za-z0-9_])"
    r"|(?P<number>-?[0-9]{1,18})(?![A-Za-z0-9_.])"
    rf"|(?P<text>'(?:[^'\\\n\r\0]|{_ESCAPE})*'|\"(?:[^\"\\\n\r\0]|{_ESCAPE})*\")"
)
_BEGINS_A_VALUE = frozenset({"open", "word", "number", "text"})
_ENDS_A_VALUE = frozenset({"close", "word", "number", "text"})

_CACHE_HEADER = b"CacheCompiledArtifact"
_AOT_HEADER = b"AOTCompiledArtifact"
_MEGA_VERSION = 1
_CHECKSUM_BYTES = 4
_NUMBER_BYTES = 8
_MAX_TEXT_BYTES = 4096
_MAX_MEMBERS = 100_000
_CHUNK = 1 << 20


class FormatError(CacheError):
    """A file is malformed; the message is a clause that does not name the file."""


def parse_literal(data: bytes) -> Any:
    """Return the value of one Python literal in UTF-8."""
    text = _text_of(data)
    _check_tokens(text)
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise FormatError(f"it is not a complete Python literal ({display_text(error)})") from error


def parse_json(data: bytes) -> Any:
    """Return the value of one JSON document in UTF-8."""
    _text_of(data)
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"it is not valid JSON ({display_text(error)})") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [child for items in inner for child in items]
    if level:
        raise FormatError(f"it is nested more than {MAX_DEPTH} deep")
    return value


def _text_of(data: bytes) -> str:
    if not data:
        raise FormatError("it is empty")
    if len(data) > MAX_BYTES:
        raise FormatError(f"it has {len(data)} bytes, more than the limit of {MAX_BYTES}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("it is not UTF-8 text") from error


def _check_tokens(text: str) -> None:
    position = depth = number = 0
    before: str | None = None
    while (match := _TOKEN.match(text, position)) is not None:
        kind, number = match.lastgroup, number + 1
        if kind != "space":
            # Two adjacent values would be a call, a subscript or a sum, whose syntax tree is as deep as the chain is
            # long.
            if before in _ENDS_A_VALUE and kind in _BEGINS_A_VALUE and (before, kind) != ("text", "text"):
                break
            before = kind
            depth += (kind == "open") - (kind == "close")
        if depth > MAX_DEPTH:
            raise FormatError(f"it is nested more than {MAX_DEPTH} deep")
        if number > MAX_TOKENS:
            raise FormatError(f"it has more than {MAX_TOKENS} tokens")
        position = match.end()
    if position != len(text):
        line = text.count("\n", 0, position) + 1
        raise FormatError(f"it is not a plain literal: line {line} has {display_text(text[position : position + 40])}")
    if before is None or depth != 0:
        raise FormatError("it is truncated")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member of a mega-cache, or the content of a compiled artifact without one."""

    #: The torch cache that it belongs to.
    kind: str
    #: Its key in that cache.
    key: str
    size_bytes: int
    #: The pickle protocol of its content; None if it does not start like a pickle.
    protocol: int | None
    #: The offset of its content in the file.
    start: int

    def describe(self) -> str:
        """Return a short description."""
        pickle = "" if self.protocol is None else f", pickle protocol {self.protocol}"
        return f"{display_text(f'{self.kind} {self.key}'.rstrip())} ({self.size_bytes} bytes{pickle})"


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The structure of a mega-cache or a compiled artifact."""

    is_mega: bool
    torch_key: str | None = None
    key: str | None = None
    members: tuple[Member, ...]
    #: Whether its checksum was compared.
    checked: bool


def pickle_protocol(head: bytes) -> int | None:
    """Return the protocol, 2 to 5, of data that starts like a pickle; None otherwise (0 and 1 have no header)."""
    match = re.match(rb"\x80([\x02-\x05])", head)
    return None if match is None else match[1][0]


def native_target(head: bytes) -> str | None:
    """Return the processor of an ELF file as `uname -m` prints it; None if unknown or not an ELF file."""
    if head[:5] != b"\x7fELF\x02":
        return None
    number = int.from_bytes(head[18:20], "little" if head[5:6] == b"\x01" else "big")
    return {62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}.get(number)


def sniff(head: bytes) -> str | None:
    """Return the torch format of a file by its start: "mega_cache", "compiled_artifact" or None."""
    length = int.from_bytes(head[_CHECKSUM_BYTES : _CHECKSUM_BYTES + _NUMBER_BYTES], "big")
    rest = head[_CHECKSUM_BYTES + _NUMBER_BYTES :]
    if any(length == len(header) and rest.startswith(header) for header in (_CACHE_HEADER, _AOT_HEADER)):
        return "compiled_artifact"
    size = int.from_bytes(rest[:_NUMBER_BYTES], "big")
    try:
        kind = base64.b64decode(rest[_NUMBER_BYTES : _NUMBER_BYTES + size], validate=True)
    except binascii.Error:
        return None
    return "mega_cache" if length == _MEGA_VERSION and kind.replace(b"_", b"").isalnum() else None


def read_structure(stream: BinaryIO) -> Structure:
    """Read the structure of a mega-cache or of a compiled artifact."""
    try:
        size = os.fstat(stream.fileno()).st_size
        checked = _verify_checksum(stream, size)
        fields = _Fields(stream, _CHECKSUM_BYTES, size)
        if fields.number() == _MEGA_VERSION:
            return Structure(is_mega=True, members=fields.members(), checked=checked)
        fields.position -= _NUMBER_BYTES
        return _read_artifact(fields, checked=checked)
    except OSError as error:
        raise FormatError(f"it could not be read: {error.strerror or error}") from error


def _read_artifact(fields: _Fields, *, checked: bool) -> Structure:
    header = fields.data()
    if header not in (_CACHE_HEADER, _AOT_HEADER):
        raise FormatError(f"its header {display_text(ascii(header[:40]))} is unknown")
    torch_key = fields.data().hex()
    if header == _AOT_HEADER:
        key = None
        members: tuple[Member, ...] = (fields.member("callable", ""),)
    else:
        key = fields.text()
        start, length = fields.span()
        inner = _Fields(fields.stream, start + _CHECKSUM_BYTES, start + length)
        if length < _CHECKSUM_BYTES or inner.number() != _MEGA_VERSION:
            raise FormatError("it does not hold a mega-cache of a known version")
        members = inner.members()
    if fields.position != fields.end:
        raise FormatError(f"{fields.end - fields.position} bytes follow its end")
    return Structure(is_mega=False, torch_key=torch_key, key=key, members=members, checked=checked)


def _verify_checksum(stream: BinaryIO, size: int) -> bool:
    """Compare the checksum of a file; return False if the file is too large."""
    if size < _CHECKSUM_BYTES:
        raise FormatError("it is empty" if size == 0 else f"it has only {size} bytes")
    if size > MAX_CHECKED_BYTES:
        return False
    stream.seek(0)
    stored, actual = int.from_bytes(stream.read(_CHECKSUM_BYTES), "big"), 0
    while chunk := stream.read(_CHUNK):
        actual = zlib.crc32(chunk, actual)
    if stored != actual:
        raise FormatError(f"its checksum does not match: {stored:08x} is stored, {actual:08x} computed")
    return True


class _Fields:
    """Reads the fields of a section of a file, and never beyond its end."""

    def __init__(self, stream: BinaryIO, start: int, end: int) -> None:
        self.stream = stream
        self.position = start
        self.end = end

    def number(self) -> int:
        return int.from_bytes(self._take(_NUMBER_BYTES), "big")

    def span(self) -> tuple[int, int]:
        """Skip a bytes field, and return its offset and length."""
        length = self.number()
        self._require(length)
        self.position += length
        return self.position - length, length

    def data(self) -> bytes:
        length = self.number()
        if length > _MAX_TEXT_BYTES:
            raise FormatError(f"a short field has {length} bytes, more than the limit of {_MAX_TEXT_BYTES}")
        return self._take(length)

    def text(self) -> str:
        data = self.data()
        try:
            return base64.b64decode(data, validate=True).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise FormatError(f"a text field is not base64 of UTF-8: {display_text(ascii(data[:40]))}") from error

    def member(self, kind: str, key: str) -> Member:
        start, length = self.span()
        self.stream.seek(start)
        protocol = pickle_protocol(self.stream.read(min(length, 2)))
        return Member(kind=kind, key=key, size_bytes=length, protocol=protocol, start=start)

    def members(self) -> tuple[Member, ...]:
        """Read all members up to the end."""
        members: list[Member] = []
        while self.position < self.end:
            kind = self.text()
            for _ in range(self.number()):
                if len(members) >= _MAX_MEMBERS:
                    raise FormatError(f"it holds more than {_MAX_MEMBERS} members")
                members.append(self.member(kind, self.text()))
        return tuple(members)

    def _take(self, length: int) -> bytes:
        self._require(length)
        self.stream.seek(self.position)
        data = self.stream.read(length)
        self.position += length
        if len(data) != length:
            raise FormatError("it was truncated while it was read")
        return data

    def _require(self, length: int) -> None:
        left = self.end - self.position
        if length > left:
            raise FormatError(f"it is truncated: a field needs {length} bytes, and {left} are left")
