"""Locks between processes, over flock. Must not import torch.

A lock saves double work and nothing else: what the cache holds is kept right by renames alone. So a file system
without working flock (ENOLCK, ENOSYS, EOPNOTSUPP) degrades to one warning, after which everyone proceeds. A holder
that is killed lets go, for the lock belongs to its open file; a process forked while the lock is held drops its copy
at once, so that it cannot keep the lock beyond its parent's death.

The lock file is empty and stays; whoever finds that it was removed or replaced while waiting opens the new one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from cgtool.store.files import RECORD_MODE, cache_error, ensure_folder

try:
    import fcntl
except ImportError:  # Windows, where each process does its own work
    _HAS_FLOCK = False
else:
    _HAS_FLOCK = True

_log = logging.getLogger(__name__)

_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
#: How often the lock file may vanish under us before we go on without it.
_ATTEMPTS = 100

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """An exclusive lock on a path, as a context manager.

    Not re-entrant: each object opens the file by itself, so two objects exclude each other within one process, too.

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
                current = not locked or _is_current(descriptor, self.path)
            except BaseException:
                os.close(descriptor)
                raise
            if locked and current:
                self._descriptor = descriptor
                _held.add(self)
                return
            os.close(descriptor)
            if not locked:
                return
        self._go_without("the lock file keeps vanishing")

    def release(self) -> None:
        """Let go; harmless when nothing is held."""
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                _flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def drop(self) -> None:
        """In a forked child: close this process's copy of the lock and leave the parent's alone."""
        descriptor, self._descriptor = self._descriptor, None
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
        for attempt in range(_ATTEMPTS):
            ensure_folder(self.path.parent)
            try:
                return os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), RECORD_MODE)
            except FileNotFoundError as error:  # someone removed the folder just now
                if attempt == _ATTEMPTS - 1:
                    raise cache_error(error, self.path) from error
            except OSError as error:
                raise cache_error(error, self.path, needed_bytes=0) from error
        raise cache_error(FileNotFoundError(errno.ENOENT, "no such file"), self.path)

    def _wait(self, descriptor: int) -> bool:
        """Take the lock; False where the file system or the platform has none."""
        if not _HAS_FLOCK:
            return False
        try:
            _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _BUSY:
                return self._degrade(error)
        else:
            return True
        if self._on_wait is not None:
            self._on_wait()
        try:
            _flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            return self._degrade(error)
        return True

    def _degrade(self, error: OSError) -> bool:
        if error.errno not in _UNSUPPORTED:
            raise cache_error(error, self.path) from error
        self._go_without(error.strerror or str(error))
        return False

    def _go_without(self, reason: str) -> None:
        _log.debug("no lock %s: %s", self.path, reason)
        _warn_once()


def _flock(descriptor: int, operation: int) -> None:
    fcntl.flock(descriptor, operation)


def _is_current(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`; a lock on a removed file excludes nobody."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@functools.cache
def _warn_once() -> None:
    _log.warning(
        "File locks do not work in the cache folder: processes that warm at the same time may do the same work. "
        "Use a folder on a local disk to avoid that."
    )


def _drop_inherited() -> None:
    """In a forked child: close the copies of the parent's locks, so that only the parent holds them."""
    for lock in list(_held):
        lock.drop()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited)
