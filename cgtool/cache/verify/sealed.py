r"""Sealed records as a check reads them: their seal, and the very bytes. Must not import torch.

A record must be spelled as cgtool spells it: "\u00E9" means what "\u00e9" does, keeps the seal, and is a flipped bit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cgtool.cache.files import read_bytes
from cgtool.cache.verify import findings as found
from cgtool.cache.verify.findings import Problem
from cgtool.errors import CacheError

_INDENT = re.compile(rb"\n *")
_ENCODER = json.JSONEncoder(separators=(",", ": "), ensure_ascii=True, allow_nan=False)

_Record = TypeVar("_Record")


def read_record(path: Path | str, parse: Callable[[bytes], _Record]) -> tuple[_Record | None, Problem | None, int]:
    """Read a sealed record, and check how it is spelled.

    Args:
        path: Its file.
        parse: Returns what its bytes say, or raises `CacheError`.

    Returns:
        The record, or None; what is wrong, or None; how many bytes it has.
    """
    try:
        data = read_bytes(path)
        if data is None:
            return None, None, 0
        record = parse(data)
    except CacheError as error:
        strange = os.path.exists(path) and not os.path.isfile(path)  # noqa: PTH110, PTH113 - Path's raise
        return None, found.no_file(Path(path)) if strange else found.of_error(Path(path), error), 0
    return record, None if is_spelled(data) else found.wrong_spelling(Path(path)), len(data)


def is_spelled(data: bytes) -> bool:
    """Return whether a sealed record has the very bytes that cgtool writes for what it says."""
    try:
        text = _ENCODER.encode(json.loads(data))
    except ValueError:
        return False
    # Empty lists and objects have no lines of their own; within strings a line's end is spelled \n.
    return data.endswith(b"\n") and _INDENT.sub(b"", data) == text.encode("ascii")
