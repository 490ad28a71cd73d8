r"""Sealed records as a check reads them: their seal, and the very bytes. Must not import torch.

A record must be spelled as cgtool spells it: "\u00E9" means what "\u00e9" does, keeps the seal, and is a flipped bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cgtool.cache.files import read_bytes
from cgtool.cache.verify import findings as found
from cgtool.cache.verify.findings import Problem
from cgtool.errors import CacheError

_INDENT = re.compile(rb"\n *")

_Record = TypeVar("_Record")


def read_record(path: Path, read: Callable[[], _Record | None]) -> tuple[_Record | None, Problem | None, int]:
    """Read a sealed record, and check how it is spelled.

    Args:
        path: Its file.
        read: Reads it; None means that there is none.

    Returns:
        The record, or None; what is wrong, or None; how many bytes it has.
    """
    try:
        if path.exists() and not path.is_file():
            return None, found.no_file(path), 0
        record = read()
        data = None if record is None else read_bytes(path)
    except CacheError as error:
        return None, found.of_error(path, error), 0
    except OSError as error:
        return None, found.of_error(path, CacheError(f"{path} could not be read: {error.strerror}.")), 0
    if data is None:
        return record, None, 0
    return record, None if is_spelled(data) else found.wrong_spelling(path), len(data)


def is_spelled(data: bytes) -> bool:
    """Return whether a sealed record has the very bytes that cgtool writes for what it says."""
    try:
        text = json.dumps(json.loads(data), separators=(",", ": "), ensure_ascii=True, allow_nan=False)
    except ValueError:
        return False
    # Empty lists and objects have no lines of their own; within strings a line's end is spelled \n.
    return data.endswith(b"\n") and _INDENT.sub(b"", data) == text.encode("ascii")
