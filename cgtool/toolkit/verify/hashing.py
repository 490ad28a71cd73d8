"""SHA-256 of many files at a time, in threads: hashlib and the system's calls leave Python's lock. No torch.

What is no ordinary file is not read, and a file no further than it should be long: what a stranger put there cannot
hold the reader up, nor be endless.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple, Self

from cgtool.errors import CacheError
from cgtool.store.files import cache_error

_BUFFER_BYTES = 1 << 20
_MAX_JOBS = 16
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


class Hashed(NamedTuple):
    """What reading a file gave; one byte more than the limit where there were more, or why it was not read."""

    digest: str = ""
    size_bytes: int = 0
    failed: Literal["missing", "not_a_file"] | CacheError | None = None


class Hasher:
    """Reads files in threads, and what is one file of the disk (hard links) once."""

    def __init__(self, jobs: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(jobs or min(cores, _MAX_JOBS), "cgtool-hash")
        self._shared: dict[tuple[int, int], Future[Hashed]] = {}
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def submit(self, path: str, *, limit: int | None = None, fresh: bool = False) -> Future[Hashed]:
        """Begin to read a file, no further than `limit` bytes; `fresh` reads again what was read under another name."""
        try:
            status = os.stat(path)  # noqa: PTH116 - asked of each file, and pathlib's way takes twice as long
        except OSError:
            return self._pool.submit(self._hash, path, limit)
        if status.st_nlink == 1:
            return self._pool.submit(self._hash, path, limit)
        identity = status.st_dev, status.st_ino
        found = self._shared.get(identity)
        if found is None or fresh:
            found = self._shared[identity] = self._pool.submit(self._hash, path, limit)
        return found

    def _hash(self, path: str, limit: int | None) -> Hashed:
        try:
            descriptor = os.open(path, _FLAGS)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return Hashed(failed="not_a_file")
                digest, total = hashlib.sha256(), 0
                while not self._stop.is_set() and (limit is None or total <= limit):
                    data = os.read(
                        descriptor, _BUFFER_BYTES if limit is None else min(_BUFFER_BYTES, limit + 1 - total)
                    )
                    if not data:
                        break
                    digest.update(data)
                    total += len(data)
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return Hashed(failed="missing")
        except OSError as error:
            return Hashed(failed=cache_error(error, path, doing="read"))
        return Hashed(digest=digest.hexdigest(), size_bytes=total)
