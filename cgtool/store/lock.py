"""Work locks (flock), which prevent processes from duplicating work. Must not import torch.

Correctness does not depend on these locks: renames alone keep the cache consistent. On a file system without working
flock (ENOLCK, ENOSYS, EOPNOTSUPP) there is one warning, and every process proceeds without the lock. The kernel
releases a lock when its process ends, however that happens.

Lock files are empty and are kept. A process that finds its lock file removed or replaced while waiting opens the new
one.
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

#: How often the lock file may disappear before we proceed without the lock.
_ATTEMPTS = 100
#: The descriptors of the locks that this process holds.
_held: set[int] = set()


@contextlib.contextmanager
def file_lock(path: Path, *, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
    """Wait for the lock on a path, and hold it for the block.

    Each call opens its own descriptor, so the lock also excludes other threads of this process. Forked children close
    their copy immediately, so that they cannot hold the lock longer than their parent.

    Args:
        path: The lock file; created together with its folder if missing.
        on_wait: Called once if the lock is held elsewhere.

    Yields:
        Whether the lock is held; False if flock does not work.

    Raises:
        CacheError: The lock file cannot be created: read-only or full disk, no permission.
    """
    descriptor = _acquire(path, on_wait)
    if descriptor is None:
        _warn_once()
        yield False
        return
    _held.add(descriptor)
    try:
        yield True
    finally:
        if descriptor in _held:  # not in a child that was forked in the block
            _held.discard(descriptor)
            unlock(descriptor)
            os.close(descriptor)


def _acquire(path: Path, on_wait: Callable[[], None] | None) -> int | None:
    """Return the descriptor of the locked file, or None if locking is not possible."""
    for _ in range(_ATTEMPTS):
        with contextlib.ExitStack() as on_failure:
            descriptor = _open(path)
            on_failure.callback(os.close, descriptor)
            if not _lock(descriptor, path, on_wait):
                break
            if _is_current(descriptor, path):
                on_failure.pop_all()
                return descriptor
    return None


def _open(path: Path) -> int:
    error: OSError | None = None
    for _ in range(_ATTEMPTS):
        ensure_folder(path.parent)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | SAFE_OPEN_FLAGS, RECORD_MODE)
        except FileNotFoundError as missing:  # another process has just removed the folder
            error = missing
        except OSError as other:
            raise cache_error(other, path, needed_bytes=0) from other
    raise cache_error(error or OSError(), path) from error


def _lock(descriptor: int, path: Path, on_wait: Callable[[], None] | None) -> bool:
    """Wait for the lock; return False if the file system or the platform does not support locks."""
    try:
        acquired = try_lock(descriptor, exclusive=True)
        if acquired is not False:
            return bool(acquired)
        if on_wait is not None:
            on_wait()
        return bool(try_lock(descriptor, exclusive=True, wait=True))
    except OSError as error:
        raise cache_error(error, path) from error


def _is_current(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the one at `path`; a lock on a removed file excludes nobody."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@functools.cache
def _warn_once() -> None:
    _log.warning(
        "File locks do not work in the cache folder: processes that warm at the same time may duplicate work, and "
        "prune refuses to remove anything. Use a folder on a local disk."
    )


def _drop_inherited() -> None:
    """Close the parent's locks in a forked child, so that only the parent holds them."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited)
