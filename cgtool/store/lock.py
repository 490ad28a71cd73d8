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
from collections.abc import Callable, Iterator
from pathlib import Path

from cgtool.store.files import RECORD_MODE, SAFE_OPEN_FLAGS, cache_error, ensure_folder
from cgtool.store.leases import try_lock, unlock

_log = logging.getLogger(__name__)

#: How often the lock file may vanish under us before we go on without it.
_ATTEMPTS = 100
#: The descriptors of the locks that this process holds.
_held: set[int] = set()


@contextlib.contextmanager
def file_lock(path: Path, *, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
    """Wait for the lock on a path, and hold it while the block runs.

    Each call opens the file by itself, so threads of one process exclude each other, too. A process forked meanwhile
    drops its copy at once, so that it cannot keep the lock beyond its parent.

    Args:
        path: The lock file; it and its folder are made when they are missing.
        on_wait: Called once if another holder makes us wait.

    Yields:
        Whether the lock is held; False where flock does not work.

    Raises:
        CacheError: The lock file cannot be made: read-only, full, no permission.
    """
    descriptor = _taken(path, on_wait)
    if descriptor is None:
        _warn_once()
        yield False
        return
    _held.add(descriptor)
    try:
        yield True
    finally:
        if descriptor in _held:  # and this is no child that was forked meanwhile
            _held.discard(descriptor)
            unlock(descriptor)
            os.close(descriptor)


def _taken(path: Path, on_wait: Callable[[], None] | None) -> int | None:
    """The descriptor of the lock file, locked; None where that cannot be had."""
    for _ in range(_ATTEMPTS):
        with contextlib.ExitStack() as unless_kept:
            descriptor = _open(path)
            unless_kept.callback(os.close, descriptor)
            if not _lock(descriptor, path, on_wait):
                break
            if _is_current(descriptor, path):
                unless_kept.pop_all()
                return descriptor
    return None


def _open(path: Path) -> int:
    error: OSError | None = None
    for _ in range(_ATTEMPTS):
        ensure_folder(path.parent)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | SAFE_OPEN_FLAGS, RECORD_MODE)
        except FileNotFoundError as missing:  # someone removed the folder just now
            error = missing
        except OSError as failed:
            raise cache_error(failed, path, needed_bytes=0) from failed
    raise cache_error(error or OSError(), path) from error


def _lock(descriptor: int, path: Path, on_wait: Callable[[], None] | None) -> bool:
    """Take the lock; False where the file system or the platform has none."""
    try:
        taken = try_lock(descriptor, exclusive=True)
        if taken is not False:
            return bool(taken)
        if on_wait is not None:
            on_wait()
        return bool(try_lock(descriptor, exclusive=True, wait=True))
    except OSError as error:
        raise cache_error(error, path) from error


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


def _drop_inherited() -> None:
    """In a forked child: close the copies of the parent's locks, so that only the parent holds them."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited)
