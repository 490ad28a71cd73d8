"""The grammar of what crosses a file or a process: the base class of records, their fields' types, canonical JSON.

A record is declared once, as a class with typed fields; its types are its grammar, and `decode` is its one reader.
Canonical JSON has sorted keys, no spaces, ASCII only and no NaN, so that equal values have equal digests on every
machine. Must not import torch.
"""

import hashlib
import json
from typing import Annotated, Any, TypeVar, dataclass_transform

import msgspec
from msgspec import Meta


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What crosses a file or a process: frozen, and unknown fields are refused.

    Each class below names `frozen=True, kw_only=True` again: the second holds for a class's own fields alone, and type
    checkers ask for the first.
    """


#: A SHA-256, as 64 hexadecimal digits.
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
#: What an adaptor, a kind of artifact, a prefix or the like is called.
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z")]
#: A dimension, by the name that the user gave it.
DimName = Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,63}\Z")]
#: A count, an index or a number of bytes.
Count = Annotated[int, Meta(ge=0, le=2**53)]
#: A duration in seconds.
Seconds = Annotated[float, Meta(ge=0, lt=2.0**53)]

_Decoded = TypeVar("_Decoded")


def decode(data: bytes, kind: type[_Decoded]) -> _Decoded:
    """Return the record of class `kind` in the JSON text `data`.

    Raises:
        ValueError: It is no JSON, or outside of the grammar; the message names the place ("at `$.rows[0].kind`").
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def encode(record: Any) -> bytes:
    """Return a record as compact JSON; fields that hold their default are left out."""
    return msgspec.json.encode(record)


#: Made once: `json.dumps` makes an encoder for each call that asks for anything of its own.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """Return the one JSON spelling of `value`, as ASCII bytes.

    Raises:
        TypeError: `value` holds something that JSON has no word for.
        ValueError: `value` holds a NaN or an infinity.
    """
    return _ENCODER.encode(value).encode("ascii")


def sha256_hex(data: bytes) -> str:
    """Return the SHA-256 of `data` as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def digest_of(value: Any) -> str:
    """Return the SHA-256 of `value`'s canonical JSON as 64 lower-case hexadecimal digits."""
    return sha256_hex(canonical_json(value))
