"""SHA-256 of many files at a time, in threads: hashlib and the system's calls leave Python's lock. No torch.

A small file is read at once, by whoever asks for it: handing it to a thread would take longer than that.

Files that are one on the disk (hard links) are read once. A file is read no further than it should be long, so that
what a stranger put there cannot be endless; what is no ordinary file is not read at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from cgtool.errors import CacheError
from cgtool.store.files import cache_error

_BUFFER_BYTES = 1 << 20
#: What is no longer than this is read at once.
_SMALL_BYTES = 1 << 16
_MAX_JOBS = 16
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


class Hashed(NamedTuple):
    """What reading a file gave.

    Args:
        digest: The SHA-256 of its bytes; "" where it could not be read.
        size_bytes: How many bytes were read; one more than the limit where there were more than that.
        error: Why it could not be read: None where it was, or is missing.
        is_missing: Whether there is no such file.
        is_file: Whether it is an ordinary file.
    """

    digest: str = ""
    size_bytes: int = 0
    error: CacheError | None = None
    is_missing: bool = False
    is_file: bool = True


class Done:
    """What was read already, where a `Future` would stand for what is being read.

    Args:
        hashed: What reading it gave.
    """

    __slots__ = ("_hashed",)

    def __init__(self, hashed: Hashed) -> None:
        self._hashed = hashed

    def result(self) -> Hashed:
        """Return what reading it gave."""
        return self._hashed


class Hasher:
    """Reads files in threads.

    Args:
        jobs: How many at a time; None: as many as this process has cores.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(jobs or min(num_cores(), _MAX_JOBS), "cgtool-hash")
        self._shared: dict[tuple[int, int], Future[Hashed] | Done] = {}
        self._stop = threading.Event()

    def submit(self, path: str, *, limit: int | None = None, fresh: bool = False) -> Future[Hashed] | Done:
        """Begin to read a file; a small one is read when this returns.

        Args:
            path: The file.
            limit: How many bytes it should have; None: any number.
            fresh: Read it even if it was read before under another name.
        """
        try:
            status = os.stat(path)  # noqa: PTH116 - asked of each file, and pathlib's way takes twice as long
        except OSError:
            return Done(self._hash(path, limit))
        if status.st_nlink == 1 or not stat.S_ISREG(status.st_mode):
            return self._begun(path, status.st_size, limit)
        identity = status.st_dev, status.st_ino  # what a file with several names is known by
        found = self._shared.get(identity)
        if found is None or fresh:
            found = self._shared[identity] = self._begun(path, status.st_size, limit)
        return found

    def _begun(self, path: str, size: int, limit: int | None) -> Future[Hashed] | Done:
        if size <= _SMALL_BYTES:
            return Done(self._hash(path, limit))
        return self._pool.submit(self._hash, path, limit)

    def close(self) -> None:
        """Stop what still runs, and wait until it has."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def _hash(self, path: str, limit: int | None) -> Hashed:
        try:
            descriptor = os.open(path, _FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return Hashed(is_missing=True)
        except OSError as error:
            return Hashed(error=cache_error(error, Path(path), doing="read"))
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return Hashed(is_file=False)
            return self._read(descriptor, limit)
        except OSError as error:
            return Hashed(error=cache_error(error, Path(path), doing="read"))
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, limit: int | None) -> Hashed:
        digest, total = hashlib.sha256(), 0
        while not self._stop.is_set() and (limit is None or total <= limit):
            data = os.read(descriptor, _BUFFER_BYTES if limit is None else min(_BUFFER_BYTES, limit + 1 - total))
            if not data:
                break
            digest.update(data)
            total += len(data)
        return Hashed(digest=digest.hexdigest(), size_bytes=total)


def num_cores() -> int:
    """Return how many cores this process may use; where the system does not say, how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def hashing(jobs: int | None = None) -> Iterator[Hasher]:
    """Yield a `Hasher` whose threads end with the block, whatever ends it."""
    hasher = Hasher(jobs)
    try:
        yield hasher
    finally:
        hasher.close()
