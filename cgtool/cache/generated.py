"""The source that Inductor generated, where an artifact holds it. Must not import torch, nor anything that unpickles.

Artifacts of `inductor_standalone` and `inductor` hold pickles of torch's. A pickle writes a text as its opcode, its
length and its UTF-8 bytes: that is looked for and nothing else is read, so that nothing is executed::

    "X" length u32 little-endian, text      BINUNICODE, also within the bytes of a pickle that another one holds
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: What every module that Inductor writes holds.
_MARK = re.compile(rb"# AOT ID: |async_compile\.wait\(globals\(\)\)")
_OPCODE, _LENGTH_BYTES = b"X", 4
#: How far before a mark a text may begin, and how long it may be.
_MOST_BYTES = 4 << 20
#: How many bytes are taken for an opcode in all: who writes more of them means to keep us busy.
_MOST_TRIES = 100_000


def generated_sources(data: bytes) -> tuple[str, ...]:
    """Return the modules that Inductor wrote and an artifact holds, each once, in order.

    Args:
        data: The artifact's bytes, of any kind.
    """
    found: dict[str, None] = {}
    end = tries = 0
    for mark in _MARK.finditer(data):
        if mark.start() < end:
            continue
        for start, stop in _around(data, mark.start()):
            tries += 1
            if tries > _MOST_TRIES:
                return tuple(found)
            if stop <= mark.end():
                continue
            try:
                text = data[start:stop].decode("utf-8")
            except UnicodeDecodeError:
                continue
            if "\0" not in text:
                found[text] = None
                end = stop
                break
    return tuple(found)


def _around(data: bytes, mark: int) -> Iterator[tuple[int, int]]:
    """Yield where a text may begin and end, the nearest beginning before a mark first."""
    at = mark
    first = max(0, mark - _MOST_BYTES)
    while (at := data.rfind(_OPCODE, first, at)) >= 0:
        start = at + 1 + _LENGTH_BYTES
        length = int.from_bytes(data[at + 1 : start], "little")
        # One that ends before the mark is yielded as empty, so that whoever asks can count.
        holds = start <= mark < start + length <= len(data) and length <= _MOST_BYTES
        yield (start, start + length) if holds else (start, 0)
