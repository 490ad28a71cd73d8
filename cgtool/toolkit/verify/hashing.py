"""SHA-256 of many files in threads: hashlib and system calls release the GIL. Must not import torch.

Only regular files are read, and only up to their expected size, so that a file from an untrusted source can neither
block the reader nor be endless.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, Self, TypeVar

from cgtool.errors import CacheError
from cgtool.machine import num_cores
from cgtool.store.files import cache_error

_BUFFER_BYTES = 1 << 20
_MAX_JOBS = 16
#: How many values are submitted at a time: a cache may hold a hundred thousand units.
_BATCH_SIZE = 512
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


class Hashed(NamedTuple):
    """The digest and size of the bytes read, at most one byte past the limit; or why the file was not read."""

    digest: str = ""
    size_bytes: int = 0
    failed: Literal["missing", "not_a_file"] | CacheError | None = None


class Hasher:
    """Hashes files in threads, and reads each inode (hard links) once."""

    def __init__(self, jobs: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(jobs or min(num_cores(), _MAX_JOBS), "cgtool-hash")
        self._shared: dict[tuple[int, int], Hashed] = {}
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def map(self, check: Callable[[_Value], _Result], values: Iterable[_Value]) -> Iterator[_Result]:
        """Call `check` with each value, several at a time; yield the results in order."""
        remaining = iter(values)
        while batch := list(itertools.islice(remaining, _BATCH_SIZE)):
            yield from self._pool.map(check, batch)

    def read(self, path: str, *, limit: int | None = None, fresh: bool = False) -> Hashed:
        """Hash a file up to one byte past `limit`; `fresh` rereads an inode that was read before."""
        try:
            descriptor = os.open(path, _FLAGS)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    return Hashed(failed="not_a_file")
                if status.st_nlink == 1:
                    return self._hashed(descriptor, limit)
                identity = status.st_dev, status.st_ino
                if fresh or identity not in self._shared:
                    self._shared[identity] = self._hashed(descriptor, limit)
                return self._shared[identity]
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return Hashed(failed="missing")
        except OSError as error:
            return Hashed(failed=cache_error(error, path, doing="read"))

    def _hashed(self, descriptor: int, limit: int | None) -> Hashed:
        digest, total = hashlib.sha256(), 0
        while not self._stop.is_set() and (limit is None or total <= limit):
            data = os.read(descriptor, _BUFFER_BYTES if limit is None else min(_BUFFER_BYTES, limit + 1 - total))
            if not data:
                break
            digest.update(data)
            total += len(data)
        return Hashed(digest=digest.hexdigest(), size_bytes=total)
