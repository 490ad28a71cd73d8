"""Locks of work, over flock: so that two processes do not do the same work twice. Must not import torch.

A lock saves double work and nothing else: what the cache holds is kept right by renames alone. So a file system
without working flock (ENOLCK, ENOSYS, EOPNOTSUPP) is one warning, after which everyone proceeds. The kernel lets go of
a lock as its process ends, however that happens.

The lock file is empty and stays; whoever finds that it was removed or replaced while waiting opens the new one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from cgtool.store.files import RECORD_MODE, cache_error, ensure_folder
from cgtool.store.leases import try_lock, unlock

_log = logging.getLogger(__name__)

_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
#: How often the lock file may vanish under us before we go on without it.
_ATTEMPTS = 100


class FileLock:
    """An exclusive lock on a path, as a context manager.

    Not re-entrant: each object opens the file by itself, so two objects exclude each other within one process, too. A
    process forked while the lock is held drops its copy at once, so that it cannot keep the lock beyond its parent.

    Args:
        path: The lock file; it and its folder are made when they are missing.
        on_wait: Called once if another holder makes us wait.
    """

    def __init__(self, path: Path, *, on_wait: Callable[[], None] | None = None) -> None:
        self.path = path
        self._on_wait = on_wait
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock; False after acquiring where flock does not work."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Wait for the lock and take it.

        Raises:
            CacheError: The lock file cannot be made: read-only, full, no permission.
        """
        for _ in range(_ATTEMPTS):
            descriptor = self._open()
            try:
                locked = self._wait(descriptor)
                current = locked and _is_current(descriptor, self.path)
            except BaseException:
                os.close(descriptor)
                raise
            if current:
                self._descriptor = descriptor
                _locked.add(self)
                return
            os.close(descriptor)
            if not locked:
                break
        _warn_once()

    def release(self) -> None:
        """Let go; harmless when nothing is held."""
        descriptor = self._descriptor
        if descriptor is not None:
            unlock(descriptor)
            self.drop()

    def drop(self) -> None:
        """In a forked child: close this process's copy of the lock and leave the parent's alone."""
        descriptor, self._descriptor = self._descriptor, None
        _locked.discard(self)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _open(self) -> int:
        error: OSError | None = None
        for _ in range(_ATTEMPTS):
            ensure_folder(self.path.parent)
            try:
                return os.open(self.path, os.O_RDWR | os.O_CREAT | _CLOEXEC, RECORD_MODE)
            except FileNotFoundError as missing:  # someone removed the folder just now
                error = missing
            except OSError as failed:
                raise cache_error(failed, self.path, needed_bytes=0) from failed
        raise cache_error(error or OSError(), self.path) from error

    def _wait(self, descriptor: int) -> bool:
        """Take the lock; False where the file system or the platform has none."""
        try:
            taken = try_lock(descriptor, exclusive=True)
            if taken is not False:
                return bool(taken)
            if self._on_wait is not None:
                self._on_wait()
            return bool(try_lock(descriptor, exclusive=True, wait=True))
        except OSError as error:
            raise cache_error(error, self.path) from error


def _is_current(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`; a lock on a removed file excludes nobody."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@functools.cache
def _warn_once() -> None:
    _log.warning(
        "File locks do not work in the cache folder: processes that warm at the same time may do the same work, and "
        "prune refuses to remove anything. Use a folder on a local disk to avoid that."
    )


_locked: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _drop_inherited() -> None:
    """In a forked child: close the copies of the parent's locks, so that only the parent holds them."""
    for lock in list(_locked):
        lock.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited)
