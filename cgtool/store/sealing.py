"""Sealed records: files that end with the digest of their own bytes. Must not import torch.

A sealed file is a JSON object whose last member is the SHA-256 of all bytes before that member's line::

    {
     "record": "manifest-3",                         what it is, and the version of its grammar
     "cgtool": "<version that wrote it>",
     ...
     "sha256": "<64 hexadecimal digits>"
    }

So a torn file and a flipped bit are noticed by one hash, before anything is parsed, and a newer version says so.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from cgtool import __version__
from cgtool.errors import CacheSchemaError
from cgtool.plan.grammar import Record, decode, encode
from cgtool.store.files import corrupt, read_bytes

_SEAL = b',\n "sha256": "'
_END = b'"\n}\n'
_TAG = re.compile(rb'\{\n "record": "([a-z_]+)-([0-9]{1,9})"')
#: How caches looked before records had tags.
_UNTAGGED = re.compile(rb'\{\n "schema": ([0-9]{1,9}),\n "cgtool": "([^"]*)"')
_WRITER = re.compile(rb'\n "cgtool": "([^"]*)"')


class Sealed(Record, frozen=True, kw_only=True, tag_field="record"):
    """A record that is a file of its own. A class below it has a tag: its name, "-" and the version of its grammar."""

    cgtool: str = msgspec.field(default_factory=lambda: __version__)


_SealedRecord = TypeVar("_SealedRecord", bound=Sealed)


def seal(record: Sealed) -> bytes:
    """Return the text of a sealed file."""
    body = msgspec.json.format(encode(record), indent=1).removesuffix(b"\n}")
    return body + _SEAL + hashlib.sha256(body).hexdigest().encode() + _END


def unseal(data: bytes, kind: type[_SealedRecord], *, path: Path | str) -> _SealedRecord:
    """Return the record in the bytes of a sealed file.

    Args:
        data: The bytes.
        kind: What it must be.
        path: The file, for errors.

    Raises:
        CacheCorruptError: They are torn, differ from their digest, or break the record's grammar.
        CacheSchemaError: Another version of cgtool wrote them.
    """
    body, found, end = data.rpartition(_SEAL)
    actual = hashlib.sha256(body).hexdigest()
    is_intact = bool(found) and end == actual.encode() + _END
    _check_version(data, kind, path, is_intact=is_intact)
    if not found:
        raise corrupt(path, "it is torn: it does not end with its digest")
    if not is_intact:
        stored = end.removesuffix(_END).decode("ascii", "replace")
        raise corrupt(path, "its bytes differ from its digest", expected=stored, actual=actual)
    try:
        return decode(body + b"\n}", kind)
    except ValueError as error:
        raise corrupt(path, f"a field is wrong: {error}") from error


def read_sealed(path: Path, kind: type[_SealedRecord]) -> _SealedRecord | None:
    """Return the record in a sealed file, or None when there is no such file.

    Raises:
        CacheCorruptError: It is torn, differs from its digest, or breaks its grammar.
        CacheSchemaError: Another version of cgtool wrote it.
        CacheError: It cannot be read.
    """
    data = read_bytes(path)
    return None if data is None else unseal(data, kind, path=path)


def _check_version(data: bytes, kind: type[Sealed], path: Path | str, *, is_intact: bool) -> None:
    name, _, number = str(kind.__struct_config__.tag).rpartition("-")
    tag, untagged = _TAG.match(data), _UNTAGGED.match(data)
    if untagged is not None:
        found, writer = int(untagged[1]), untagged[2].decode("utf-8", "replace")
    elif tag is not None and is_intact and tag[1] == name.encode():
        wrote = _WRITER.search(data)
        found, writer = int(tag[2]), "unknown" if wrote is None else wrote[1].decode("utf-8", "replace")
    else:
        return
    expected = int(number)
    if found == expected and untagged is None:
        return
    if found > expected:
        todo = "Update cgtool, or use another cache folder with --cache-dir or CGTOOL_CACHE_DIR."
    else:
        todo = "Warm the model again with this version, or use the version that wrote it."
    text = f"{path} has schema {found} and was written by cgtool {writer}; this cgtool reads schema {expected}. {todo}"
    raise CacheSchemaError(text, path=path, expected=expected, actual=found)
