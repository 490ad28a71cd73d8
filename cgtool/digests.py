"""Canonical JSON and its digests: how every record of cgtool becomes bytes, and bytes become names.

Must not import torch. Canonical means: keys sorted, no spaces, ASCII only, no NaN. Floats are the caller's business
(records write them as text), so that equal records give equal bytes on every machine.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

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
