"""Which glibc the native code of an entry asks for, read from its libraries and never run. Must not import torch.

A package (see `cgtool.store.artifacts`) holds one shared library, uncompressed. What it needs of the C library stands
in its section of needed versions, by the layout of ELF for 64 bits and little endian::

    Elf64_Ehdr     at byte 40: where the section headers are; at 58 and 60: the bytes of each and how many
    Elf64_Shdr     at byte 4: its type (0x6ffffffe: needed versions); at 24 and 40: its offset, the section of its names
    Elf64_Verneed  2 version, 2 how many, 4 file, 4 its first Vernaux, 4 the next Verneed
    Elf64_Vernaux  4 hash, 2 flags, 2 other, 4 name ("GLIBC_2.34"), 4 the next Vernaux

Source: the Linux Standard Base, "Symbol Versioning".
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from cgtool.store.machine import version_pair

_MAGIC = b"\x7fELF\x02\x01"
_VERNEED = 0x6FFFFFFE
_GLIBC = re.compile(rb"GLIBC_(\d+\.\d+)(?:\.\d+)?\0")
#: What a stranger's library may claim to have, at most: a loop of records has an end.
_MOST_RECORDS = 4096
_KIND = ".pt2"
_SMALL_BYTES = 1 << 16
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
#: How many artifacts of an entry are looked into: those of one entry were made by one compiler.
_MOST_ARTIFACTS = 64


def glibc_of_entry(artifacts: Iterable[str | Path]) -> str | None:
    """Return the newest glibc that any of several artifacts needs, "2.34"; None where none of them says.

    Args:
        artifacts: Files; those that are no packages are passed over.
    """
    packages = sorted(path for path in map(str, artifacts) if path.endswith(_KIND))[:_MOST_ARTIFACTS]
    needed = [version for path in packages if (version := glibc_needed(path)) is not None]
    return max(needed, key=version_pair, default=None)


def glibc_needed(path: str | Path) -> str | None:
    """Return the newest glibc that a package's library needs; None where it holds none or does not say.

    Args:
        path: The package, or a library as it is.
    """
    try:
        with _content(path) as data:
            start = data.find(_MAGIC)
            versions = [] if start < 0 else list(_versions(data, start))
    except (OSError, ValueError, OverflowError, struct.error, IndexError):  # gone, empty, torn: the digests tell
        return None
    return max(versions, key=version_pair, default=None)


@contextlib.contextmanager
def _content(path: str | Path) -> Iterator[bytes | mmap.mmap]:
    descriptor = os.open(path, _FLAGS)
    try:
        size = os.fstat(descriptor).st_size
        if size <= _SMALL_BYTES:  # asked of each artifact of a cache, and quicker than to map it
            yield os.read(descriptor, size)
            return
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
            yield data
    finally:
        os.close(descriptor)


def _versions(data: bytes | mmap.mmap, start: int) -> Iterator[str]:
    (table,) = struct.unpack_from("<Q", data, start + 40)
    size, count = struct.unpack_from("<HH", data, start + 58)
    headers = [start + table + size * number for number in range(count)]
    for at in headers:
        (kind,) = struct.unpack_from("<I", data, at + 4)
        if kind == _VERNEED:
            (offset,) = struct.unpack_from("<Q", data, at + 24)
            (link,) = struct.unpack_from("<I", data, at + 40)
            (names,) = struct.unpack_from("<Q", data, headers[link] + 24)
            yield from _needed(data, start + offset, start + names)


def _needed(data: bytes | mmap.mmap, at: int, names: int) -> Iterator[str]:
    left = _MOST_RECORDS
    more = True
    while more and left > 0:
        _, count, _, first, following = struct.unpack_from("<HHIII", data, at)
        inner = at + first
        for _ in range(min(count, left)):
            left -= 1
            _, _, _, name, after = struct.unpack_from("<IHHII", data, inner)
            match = _GLIBC.match(data, names + name)
            if match is not None:
                yield match[1].decode("ascii")
            inner += after
        left -= 1
        at, more = at + following, bool(following)
