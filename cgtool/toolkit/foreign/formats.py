"""What strangers write, as data: Python literals, JSON, torch's binary forms. Must not import torch.

All of it has limits, and nothing of it is executed or unpickled. The literals are those that `pprint` writes of
dictionaries, tuples, lists, texts, numbers, True, False and None::

    value = "None" | "True" | "False" | ["-"] digits | text+ | "(" values ")" | "[" values "]" | "{" pairs or values "}"

with quotes and escapes as `repr` spells them. All of a text is matched to these tokens before `ast.literal_eval` sees
it, so no name, call, operator, comment or escape that the parser would warn of reaches it, and nesting is bounded, for
a deep one could end the process.

A mega-cache (the bytes of `torch.compiler.save_cache_artifacts`) and a compiled artifact (`CompiledArtifact.save` in
its binary form) are fields one after another; numbers are eight bytes, most significant first::

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
from cgtool.toolkit.foreign.tree import shown

#: An index of vLLM has 400 bytes and about 20 tokens a row.
MOST_BYTES = 8 << 20
MOST_TOKENS = 600_000
MOST_DEPTH = 32
#: Checking more than this takes longer than a person who lists a cache would wait.
MOST_CHECKED_BYTES = 1 << 30

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
_MOST_TEXT_BYTES = 4096
_MOST_MEMBERS = 100_000
_CHUNK = 1 << 20


class FormatError(CacheError):
    """A file is not of the form that it should be; the message is a clause without its path."""


def parse_literal(data: bytes) -> Any:
    """Return the value of one Python literal in UTF-8."""
    text = _text_of(data)
    _check_tokens(text)
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise FormatError(f"it is no whole Python literal ({shown(error)})") from error


def parse_json(data: bytes) -> Any:
    """Return the value of one JSON document in UTF-8."""
    _text_of(data)
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"it is no whole JSON ({shown(error)})") from error
    level = [value]
    for _ in range(MOST_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [child for items in inner for child in items]
    if level:
        raise FormatError(f"it is nested more than {MOST_DEPTH} deep")
    return value


def _text_of(data: bytes) -> str:
    if not data:
        raise FormatError("it has zero bytes")
    if len(data) > MOST_BYTES:
        raise FormatError(f"it has {len(data)} bytes, and {MOST_BYTES} are the limit")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("it is no text in UTF-8") from error


def _check_tokens(text: str) -> None:
    position = depth = number = 0
    before: str | None = None
    while (match := _TOKEN.match(text, position)) is not None:
        kind, number = match.lastgroup, number + 1
        if kind != "space":
            # A call, a subscript or a sum would be a value right after a value; a chain of them is as deep as it is
            # long.
            if before in _ENDS_A_VALUE and kind in _BEGINS_A_VALUE and (before, kind) != ("text", "text"):
                break
            before = kind
            depth += (kind == "open") - (kind == "close")
        if depth > MOST_DEPTH:
            raise FormatError(f"it is nested more than {MOST_DEPTH} deep")
        if number > MOST_TOKENS:
            raise FormatError(f"it has more than {MOST_TOKENS} tokens")
        position = match.end()
    if position != len(text):
        line = text.count("\n", 0, position) + 1
        raise FormatError(f"it is no plain literal: line {line} goes on with {shown(text[position : position + 40])}")
    if before is None or depth != 0:
        raise FormatError("it ends too early")


@dataclass(frozen=True, kw_only=True)
class Member:
    """One thing in a mega-cache, or the one that a compiled artifact of the other form is."""

    #: Which of torch's caches it belongs to.
    kind: str
    #: What it is looked up by.
    key: str
    size_bytes: int
    #: The pickle protocol of its content; None if it does not begin as a pickle does.
    protocol: int | None
    #: Where its content begins in the file.
    start: int

    def describe(self) -> str:
        """Return it in a few words."""
        holds = "" if self.protocol is None else f", pickle protocol {self.protocol}"
        return f"{shown(f'{self.kind} {self.key}'.rstrip())} ({self.size_bytes} bytes{holds})"


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What a mega-cache or a compiled artifact says of itself, and whether its checksum was compared."""

    is_mega: bool
    torch_key: str | None = None
    key: str | None = None
    members: tuple[Member, ...]
    checked: bool


def pickle_protocol(head: bytes) -> int | None:
    """Return the pickle protocol that bytes begin with, 2 to 5; None for anything else (0 and 1 begin with no mark)."""
    match = re.match(rb"\x80([\x02-\x05])", head)
    return None if match is None else match[1][0]


def native_target(head: bytes) -> str | None:
    """Return which processor an ELF file is for, as `uname -m` says it; None for anything else or an unknown one."""
    if head[:5] != b"\x7fELF\x02":
        return None
    number = int.from_bytes(head[18:20], "little" if head[5:6] == b"\x01" else "big")
    return {62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}.get(number)


def sniff(head: bytes) -> str | None:
    """Return which of torch's forms a file has, by its beginning: "mega_cache", "compiled_artifact" or None."""
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
    """Return the structure of a mega-cache or of a compiled artifact."""
    try:
        size = os.fstat(stream.fileno()).st_size
        checked = _check(stream, size)
        fields = _Fields(stream, _CHECKSUM_BYTES, size)
        if fields.number() == _MEGA_VERSION:
            return Structure(is_mega=True, members=fields.members(), checked=checked)
        fields.position -= _NUMBER_BYTES
        return _artifact(fields, checked=checked)
    except OSError as error:
        raise FormatError(f"it could not be read: {error.strerror or error}") from error


def _artifact(fields: _Fields, *, checked: bool) -> Structure:
    header = fields.data()
    if header not in (_CACHE_HEADER, _AOT_HEADER):
        raise FormatError(f"its header {shown(ascii(header[:40]))} is of no known form")
    torch_key = fields.data().hex()
    if header == _AOT_HEADER:
        key = None
        members: tuple[Member, ...] = (fields.member("callable", ""),)
    else:
        key = fields.text()
        start, length = fields.span()
        inner = _Fields(fields.stream, start + _CHECKSUM_BYTES, start + length)
        if length < _CHECKSUM_BYTES or inner.number() != _MEGA_VERSION:
            raise FormatError("it holds no mega-cache of a known version")
        members = inner.members()
    if fields.position != fields.end:
        raise FormatError(f"{fields.end - fields.position} bytes follow its end")
    return Structure(is_mega=False, torch_key=torch_key, key=key, members=members, checked=checked)


def _check(stream: BinaryIO, size: int) -> bool:
    if size < _CHECKSUM_BYTES:
        raise FormatError("it has zero bytes" if size == 0 else f"it has {size} bytes, which are too few")
    if size > MOST_CHECKED_BYTES:
        return False
    stream.seek(0)
    stored, actual = int.from_bytes(stream.read(_CHECKSUM_BYTES), "big"), 0
    while chunk := stream.read(_CHUNK):
        actual = zlib.crc32(chunk, actual)
    if stored != actual:
        raise FormatError(f"its bytes differ from its checksum, which is {stored:08x} and should be {actual:08x}")
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
        self.position += length
        return self.position - length, length

    def data(self) -> bytes:
        length = self.number()
        if length > _MOST_TEXT_BYTES:
            raise FormatError(f"a short field has {length} bytes, and {_MOST_TEXT_BYTES} are the limit")
        return self._take(length)

    def text(self) -> str:
        data = self.data()
        try:
            return base64.b64decode(data, validate=True).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise FormatError(f"a text of it is not base64 of UTF-8: {shown(ascii(data[:40]))}") from error

    def member(self, kind: str, key: str) -> Member:
        start, length = self.span()
        self.stream.seek(start)
        protocol = pickle_protocol(self.stream.read(min(length, 2)))
        return Member(kind=kind, key=key, size_bytes=length, protocol=protocol, start=start)

    def members(self) -> tuple[Member, ...]:
        """All members up to the end."""
        members: list[Member] = []
        while self.position < self.end:
            kind = self.text()
            for _ in range(self.number()):
                if len(members) >= _MOST_MEMBERS:
                    raise FormatError(f"it holds more than {_MOST_MEMBERS} members")
                members.append(self.member(kind, self.text()))
        return tuple(members)

    def _take(self, length: int) -> bytes:
        self._need(length)
        self.stream.seek(self.position)
        data = self.stream.read(length)
        self.position += length
        if len(data) != length:
            raise FormatError("it became shorter while it was read")
        return data

    def _need(self, length: int) -> None:
        left = self.end - self.position
        if length > left:
            raise FormatError(f"it ends too early: {length} bytes should follow, and {left} do")
