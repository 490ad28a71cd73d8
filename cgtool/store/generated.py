"""The source that Inductor generated, where an artifact holds it or a rank's folder keeps it.

Must not import torch, nor anything that unpickles.

Artifacts of `inductor_standalone` and `inductor` hold pickles of torch's. A pickle writes a text as its opcode, its
length and its UTF-8 bytes: that is looked for and nothing else is read, so that nothing is executed::

    "X" length u32 little-endian, text      BINUNICODE, also within the bytes of a pickle that another one holds
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from cgtool.store.files import is_temporary
from cgtool.store.layout import GENERATED, CacheLayout, RankName

#: What every module that Inductor writes holds.
_MARK = re.compile(rb"# AOT ID: |async_compile\.wait\(globals\(\)\)")
_OPCODE, _LENGTH_BYTES = b"X", 4
#: How much of an artifact's digest names its folder.
_NAME_DIGITS = 16
#: How far before a mark a text may begin, and how long it may be.
_MOST_BYTES = 4 << 20
#: How many bytes are taken for an opcode in all: who writes more of them means to keep us busy.
_MOST_TRIES = 100_000


def generated_dir(layout: CacheLayout, name: RankName, digest: str) -> Path:
    """Return where a rank keeps what a compiler wrote for an artifact, for people; it may be missing."""
    return layout.rank_dir(name) / GENERATED / digest[:_NAME_DIGITS]


def generated_texts(layout: CacheLayout, digest: str) -> dict[str, str]:
    """Return what a compiler wrote for an artifact, by name, from whichever rank of the cache kept it."""
    for folder in sorted(layout.base.glob(f"*/rank_*/*/{GENERATED}/{digest[:_NAME_DIGITS]}")):
        try:
            files = sorted(path for path in folder.iterdir() if path.is_file() and not is_temporary(path.name))
            texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in files}
        except OSError:  # it is being removed
            continue
        if texts:
            return texts
    return {}


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
