"""Leases: locks on the entries that live processes use, so that prune keeps them. Must not import torch.

`state/leases` contains empty files that are locked (flock) and never written::

    <hash>-rank_<i>-<prefix>               shared lock of each process that loaded it, until the process ends
    <hash>                                 shared lock of each process that is writing any rank of the entry

If `state/` is not writable, the folder of the entry itself is locked. The kernel releases a lock when its process ends,
however that happens. Where flock does not work there are no leases, and prune refuses to run.

Prune takes the exclusive lock without waiting, moves the entry away while holding it, and removes the lease file. A
process that gets a lock on a removed file discards it and locks the new file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from cgtool.errors import CacheError
from cgtool.host import closing, opening
from cgtool.store.files import RECORD_MODE, SAFE_OPEN_FLAGS, cache_error, may_exist, names_in, open_descriptor
from cgtool.store.layout import CacheLayout, RankName, check_hash

try:
    import fcntl
except ImportError:  # Windows, where processes do not coordinate
    _HAS_FLOCK = False
else:
    _HAS_FLOCK = True

_BUSY = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_CANNOT_CREATE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | _CLOEXEC
#: Prune holds the exclusive lock during a rename, which can be slow. A loader retries for one second in total, and a
#: writer for `_WRITER_ROUNDS` times as long.
_ATTEMPTS = 500
_PAUSE_SECS = 0.002
_WRITER_ROUNDS = 60
#: A new folder is briefly unlocked after its creation. Where locks do not work, only age tells that it was abandoned.
_YOUNG_SECS = 60.0
_ABANDONED_SECS = 86400.0


class Lease:
    """A shared lock on a file or folder, held until it is released or the process ends.

    Raises:
        OSError: The path cannot be opened.
    """

    def __init__(self, path: str, flags: int) -> None:
        self._files: list[int] = []  # one descriptor, or none once closed
        self._finalizer = weakref.finalize(self, _close, self._files)
        self._files.extend(opening(os.open, path, flags | _CLOEXEC, RECORD_MODE))

    def lock(self) -> bool | None:
        """Return whether the lock was acquired and its file still exists; None if locking is not possible."""
        try:
            acquired = try_lock(self._files[0], exclusive=False)
        except OSError:
            return None
        return acquired and self.is_current

    @property
    def is_current(self) -> bool:
        """Whether the locked file still exists, so that other processes see the lock."""
        try:
            return self._finalizer.alive and os.fstat(self._files[0]).st_nlink > 0
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock; may be called again."""
        self._finalizer()


def _close(files: list[int]) -> None:
    with contextlib.suppress(OSError):
        closing(files)


#: Leases of the entries that this process loaded, by path.
_held: dict[str, Lease] = {}


def hold(layout: CacheLayout, name: RankName) -> Lease | None:
    """Lease an entry until this process ends. Waits for up to a second while prune removes the entry.

    Returns:
        The lease, or None if no lease is possible, e.g. because locks do not work.

    Raises:
        BlockingIOError: Prune is still removing the entry.
    """
    path = _path(layout, name.flat)
    held = _held.get(path)
    if held is not None and held.is_current:
        return held
    lease = _lease(path, f"{layout.root}/torch_compile_cache/{name.hash}")
    if lease is not None:
        _held[path] = lease
    return lease


def keep(layout: CacheLayout, name: RankName) -> bool:
    """Lease an existing entry so that prune keeps it; return False if prune has removed it already."""
    try:
        lease = hold(layout, name)
    except BlockingIOError:
        return False
    folder = f"{layout.root}/torch_compile_cache/{name.hash}/rank_{name.rank}/{name.prefix}"
    # The caller has just read the manifest, so an error other than its absence does not mean that it was removed.
    if may_exist(f"{folder}/manifest.json"):
        return True
    if lease is not None:  # do not hold the lease for another process that warms the entry again
        lease.release()
    return False


def hold_writing(layout: CacheLayout, hash_: str) -> Lease | None:
    """Lease an entry for writing, until the lease is released or garbage-collected.

    Waits for up to a minute while prune removes the entry. Never raises `OSError`.

    Raises:
        CacheError: `hash_` is not a valid hash.
    """
    for _ in range(_WRITER_ROUNDS):
        with contextlib.suppress(BlockingIOError):
            return _lease(_path(layout, check_hash(hash_)), str(layout.entry_dir(hash_)))
    return None


def _lease(path: str, entry: str) -> Lease | None:
    """Acquire a lease, or return None if locking is not possible; BlockingIOError if the exclusive lock stays taken."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECS)
        try:
            lease = _open_lease(path)
        except OSError:
            try:
                lease = Lease(entry, os.O_RDONLY | os.O_NONBLOCK)  # needs no write permission
            except OSError:
                return None
        acquired = lease.lock()
        if acquired:
            return lease
        lease.release()
        if acquired is None:
            return None
    raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)


def _open_lease(path: str) -> Lease:
    try:
        return Lease(path, os.O_RDWR | os.O_CREAT | SAFE_OPEN_FLAGS)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - a str, on the load path
        return Lease(path, os.O_RDWR | os.O_CREAT | SAFE_OPEN_FLAGS)
    except PermissionError:
        return Lease(path, os.O_RDONLY | SAFE_OPEN_FLAGS)  # another user's file can still be locked


class LeaseTable:
    """The leases of a cache, listed once; the kernel is queried each time to find out whether one is held."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._files: dict[str, list[str]] = {}
        for name in names_in(_path(layout, "")):
            self._files.setdefault(name[:64], []).append(name)

    def is_used(self, hash_: str) -> bool:
        """Return whether a live process has loaded an entry or is writing it; True if that is unknown."""
        leases = (_path(self._layout, name) for name in self._files.get(hash_, ()))
        return any(map(_is_locked, leases)) or _is_locked(str(self._layout.entry_dir(hash_)))

    def is_written(self, hash_: str) -> bool:
        """Return whether a live process is writing an entry."""
        return hash_ in self._files.get(hash_, ()) and _is_locked(_path(self._layout, hash_))


@contextlib.contextmanager
def claimed(layout: CacheLayout, hash_: str, *, loaders: bool = True) -> Iterator[bool]:
    """Claim an entry for removal: no other process can lease it during the block. Never raises `OSError`.

    Yields:
        Whether the claim succeeded. It fails if a live process is writing the entry, if one has loaded it and `loaders`
        is true, or if locks do not work.
    """
    with contextlib.suppress(OSError):
        (layout.state_dir / "leases").mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Claim the write lease first, so that no rank can be added while the others are claimed.
        claimed_all = _claim(stack, _path(layout, hash_))
        if loaders:
            claimed_all = claimed_all and _claim(stack, str(layout.entry_dir(hash_)), read_only=True)
            names = {name for name in names_in(_path(layout, "")) if name[:64] == hash_ != name}
            with contextlib.suppress(CacheError):  # an entry that cannot be listed cannot be loaded either
                names.update(name.flat for name in layout.rank_names(hash_))
            claimed_all = claimed_all and all(_claim(stack, _path(layout, name)) for name in sorted(names))
        yield claimed_all


@contextlib.contextmanager
def locked(path: str) -> Iterator[bool]:
    """Try to lock a file exclusively for the block, without waiting. Never raises `OSError`.

    Yields:
        Whether the lock was acquired; True if there is no such file.
    """
    with contextlib.ExitStack() as stack:
        yield _claim(stack, path, create=False)


def remove_idle(layout: CacheLayout, hash_: str) -> None:
    """Remove the unused lease files of an entry that was removed. Never raises `OSError`."""
    folder = layout.state_dir / "leases"
    if os.path.islink(folder) or os.path.islink(folder.parent):  # noqa: PTH114 - Path's raises
        return  # the target of a link does not belong to the cache
    for name in names_in(_path(layout, "")):
        if name[:64] == hash_:
            remove_if_idle(_path(layout, name))


def remove_if_idle(path: str | Path) -> bool:
    """Remove a lock file that no process holds; return whether it is gone. Never raises `OSError`.

    A process that waits for the lock notices that the file is gone and locks a new one.
    """
    with locked(str(path)) as is_locked, contextlib.suppress(OSError):
        if is_locked:
            Path(path).unlink(missing_ok=True)
            return True
    return False


def _claim(stack: contextlib.ExitStack, path: str, *, create: bool = True, read_only: bool = False) -> bool:
    """Take an exclusive lock until the stack closes; True if there is no file that others could have locked."""
    try:
        descriptor = _open_to_claim(path, create=create, read_only=read_only)
    except (FileNotFoundError, NotADirectoryError):
        return True  # without a file or its folder, nobody holds the lock
    except OSError as error:
        # If the file does not exist and cannot be created (full or read-only disk), nobody holds the lock. If it exists
        # but cannot be opened, somebody may.
        return error.errno in _CANNOT_CREATE and not os.path.exists(path)  # noqa: PTH110 - a str
    stack.callback(os.close, descriptor)
    try:
        return bool(try_lock(descriptor, exclusive=True)) or not _HAS_FLOCK
    except OSError:
        return False


def _open_to_claim(path: str, *, create: bool, read_only: bool) -> int:
    if not read_only:
        try:
            return os.open(path, os.O_RDWR | (os.O_CREAT if create else 0) | SAFE_OPEN_FLAGS, RECORD_MODE)
        except OSError as error:
            # A file of another user or on a read-only disk can still be locked.
            if error.errno not in (errno.EACCES, errno.EROFS) or not os.path.exists(path):  # noqa: PTH110 - a str
                raise
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | _CLOEXEC)


def _is_locked(path: str) -> bool:
    """Return whether another process holds a lock; True if that is unknown."""
    with contextlib.ExitStack() as stack:
        return not _claim(stack, path, read_only=True)


def _path(layout: CacheLayout, name: str) -> str:
    return f"{layout.root}/torch_compile_cache/state/leases/{name}"


def hold_folder(folder: Path, held: list[int]) -> None:
    """Lock a private folder of this process and append its descriptor to `held`; closing that releases the lock.

    An unlocked folder was left by a killed process, see `is_abandoned`.

    Raises:
        OSError: The folder cannot be opened.
    """
    held.extend(opening(os.open, folder, _FOLDER))
    with contextlib.suppress(OSError):
        try_lock(held[-1], exclusive=True)


def is_abandoned(folder: Path) -> bool:
    """Return whether the process that created a folder with `hold_folder` is gone; False for a new folder."""
    try:
        age = time.time() - folder.stat().st_mtime
        with open_descriptor(os.open, folder, _FOLDER) as descriptor:
            acquired = try_lock(descriptor, exclusive=True)
    except OSError:
        return False
    return age > _ABANDONED_SECS if acquired is None else acquired and age > _YOUNG_SECS


def require_locks(layout: CacheLayout) -> None:
    """Check that file locks work, so that the entries in use are known.

    Raises:
        CacheError: Locks do not work in the cache folder, on a platform that has them.
    """
    try:
        descriptor = os.open(layout.base, os.O_RDONLY | _CLOEXEC)
    except OSError:
        return  # listing the folder reports the error
    try:
        works = not _HAS_FLOCK or try_lock(descriptor, exclusive=False) is not None
    except OSError as error:
        raise cache_error(error, layout.base, doing="removed") from error
    finally:
        os.close(descriptor)
    if not works:
        message = (
            f"File locks do not work in {layout.base}, so the entries in use are unknown and nothing was removed. Stop "
            "all processes that use the cache and remove the folder, or move it to a local disk."
        )
        raise CacheError(message, path=layout.base)


def try_lock(descriptor: int, *, exclusive: bool, wait: bool = False) -> bool | None:
    """Lock an open file or folder.

    Returns:
        Whether the lock was acquired; None if locks do not work.

    Raises:
        OSError: Locking fails for another reason.
    """
    if not _HAS_FLOCK:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _BUSY:
            return False
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def unlock(descriptor: int) -> None:
    """Release a lock for all processes that share the descriptor; closing it would release only this process's copy."""
    if _HAS_FLOCK:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
