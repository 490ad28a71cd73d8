"""The base class of records, the types of their fields, and canonical JSON.

A record is everything that crosses a file or a process. It is declared once, as a class whose field types are its
grammar, and read by `decode`. Canonical JSON has sorted keys, no spaces, ASCII only and no NaN, so that equal values
have equal digests on every machine. Must not import torch.
"""

import hashlib
import json
from typing import Annotated, Any, TypeVar, dataclass_transform

import msgspec
from msgspec import Meta


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A record in a file or between processes: frozen, and without unknown fields.

    Subclasses repeat `frozen=True, kw_only=True`: `kw_only` applies to the fields of one class only, and type checkers
    require `frozen`.
    """


#: A SHA-256, as 64 hexadecimal digits.
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
#: The name of an adaptor, a kind of artifact, a prefix or the like.
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z")]
#: The user's name of a dimension.
DimName = Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,63}\Z")]
#: A count, an index or a number of bytes.
Count = Annotated[int, Meta(ge=0, le=2**53)]
#: A duration in seconds.
Seconds = Annotated[float, Meta(ge=0, lt=2.0**53)]

_Decoded = TypeVar("_Decoded")


def decode(data: bytes, kind: type[_Decoded]) -> _Decoded:
    """Decode a record of class `kind` from JSON.

    Raises:
        ValueError: `data` is not JSON, or does not match the grammar; the message contains the path
            ("at `$.rows[0].kind`").
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def encode(record: Any) -> bytes:
    """Return a record as compact JSON, without fields that have their default value."""
    return msgspec.json.encode(record)


#: A module constant because `json.dumps` creates an encoder in each call with options.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON of `value`, as ASCII bytes.

    Raises:
        TypeError: `value` contains an object that JSON cannot represent.
        ValueError: `value` contains a NaN or an infinity.
    """
    return _ENCODER.encode(value).encode("ascii")


def sha256_hex(data: bytes) -> str:
    """Return the SHA-256 of `data` as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def digest_of(value: Any) -> str:
    """Return the SHA-256 of `value`'s canonical JSON as 64 lower-case hexadecimal digits."""
    return sha256_hex(canonical_json(value))
