"""Leases: which entries live processes use, so that prune leaves them alone. Must not import torch.

In `state/leases`, empty files that are locked (flock) and never written::

    <hash>-rank_<i>-<prefix>               shared by each process that loaded it, for as long as that process lives
    <hash>                                 shared by each process that is writing any rank of the entry

Where `state/` cannot be written to, the folder of the entry itself is locked. The kernel lets go of a lock as its
process ends, however that happens. Where flock does not work, there are no leases, and prune refuses.

Prune takes the exclusive lock without waiting, moves the entry away under it, and removes the lease's file: whoever got
a lock on a file that is no longer there takes the lock of the new one.
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
except ImportError:  # Windows, where each process does its own work
    _HAS_FLOCK = False
else:
    _HAS_FLOCK = True

_BUSY = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_CANNOT_MAKE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | _CLOEXEC
#: A prune holds the exclusive lock for as long as a rename takes, which may be long on a slow disk: whoever loads tries
#: again this often, a second in all, and who writes sixty times that.
_TRIES = 500
_PAUSE_SECS = 0.002
_WAITS = 60
#: Between making a folder and locking it, nobody holds it. Where locks do not work, age alone tells.
_YOUNG_SECS = 60.0
_ABANDONED_SECS = 86400.0


class Lease:
    """A shared lock on a file or folder, until it is released or the process ends.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str, flags: int) -> None:
        self._files: list[int] = []  # one, or none
        self._finalizer = weakref.finalize(self, _close, self._files)
        self._files.extend(opening(os.open, path, flags | _CLOEXEC, RECORD_MODE))

    def lock(self) -> bool | None:
        """Return whether it is locked now and still there; None where it cannot be locked."""
        try:
            taken = try_lock(self._files[0], exclusive=False)
        except OSError:
            return None
        return taken and self.is_current

    @property
    def is_current(self) -> bool:
        """Whether the lock still lies on a file that others can find."""
        try:
            return self._finalizer.alive and os.fstat(self._files[0]).st_nlink > 0
        except OSError:
            return False

    def release(self) -> None:
        """Let go; harmless the second time."""
        self._finalizer()


def _close(files: list[int]) -> None:
    with contextlib.suppress(OSError):
        closing(files)


#: What this process loaded: path of the lease → the lease.
_held: dict[str, Lease] = {}


def hold(layout: CacheLayout, name: RankName) -> Lease | None:
    """Say that this process uses an entry, until it ends. Waits for a second while prune removes the entry.

    Returns:
        The lease; None where none can be had: locks do not work, say.

    Raises:
        BlockingIOError: Prune goes on removing it.
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
    """Hold an entry that was found, and return whether it is still there: from here on prune leaves it alone."""
    try:
        lease = hold(layout, name)
    except BlockingIOError:
        return False
    folder = f"{layout.root}/torch_compile_cache/{name.hash}/rank_{name.rank}/{name.prefix}"
    if may_exist(f"{folder}/manifest.json"):  # it was read just now: what ails the disk is not that it is gone
        return True
    if lease is not None:  # who warms it again meanwhile is not us
        lease.release()
    return False


def hold_writing(layout: CacheLayout, hash_: str) -> Lease | None:
    """Say that this process is writing an entry, until the lease is released or nobody refers to it.

    Waits while prune removes the entry, for up to a minute. Never raises on account of the disk.

    Raises:
        CacheError: It is no hash.
    """
    for _ in range(_WAITS):
        with contextlib.suppress(BlockingIOError):
            return _lease(_path(layout, check_hash(hash_)), str(layout.entry_dir(hash_)))
    return None


def _lease(path: str, entry: str) -> Lease | None:
    """The lease; None where none can be had, BlockingIOError where the exclusive lock is held, and goes on being so."""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_SECS)
        try:
            lease = _opened(path)
        except OSError:
            try:
                lease = Lease(entry, os.O_RDONLY | os.O_NONBLOCK)  # which takes no leave to write
            except OSError:
                return None
        taken = lease.lock()
        if taken:
            return lease
        lease.release()
        if taken is None:
            return None
    raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)


def _opened(path: str) -> Lease:
    try:
        return Lease(path, os.O_RDWR | os.O_CREAT | SAFE_OPEN_FLAGS)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - a str on the way of a load
        return Lease(path, os.O_RDWR | os.O_CREAT | SAFE_OPEN_FLAGS)
    except PermissionError:
        return Lease(path, os.O_RDONLY | SAFE_OPEN_FLAGS)  # another user's, which may be locked all the same


class LeaseTable:
    """The leases of a cache as they are listed at one moment; whether one is held is asked of the kernel each time."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._files: dict[str, list[str]] = {}
        for name in names_in(_path(layout, "")):
            self._files.setdefault(name[:64], []).append(name)

    def is_used(self, hash_: str) -> bool:
        """Return whether a live process loaded an entry or is writing it; True also where that cannot be found out."""
        leases = (_path(self._layout, name) for name in self._files.get(hash_, ()))
        return any(map(_is_locked, leases)) or _is_locked(str(self._layout.entry_dir(hash_)))

    def is_written(self, hash_: str) -> bool:
        """Return whether a live process is writing an entry."""
        return hash_ in self._files.get(hash_, ()) and _is_locked(_path(self._layout, hash_))


@contextlib.contextmanager
def claimed(layout: CacheLayout, hash_: str, *, loaders: bool = True) -> Iterator[bool]:
    """Yield whether an entry was claimed for removal: while the block runs nobody else can hold it.

    It is not where a live process uses it, or only writes it where `loaders` do not count, or where locks do not work.
    Never raises on account of the disk.
    """
    with contextlib.suppress(OSError):
        (layout.state_dir / "leases").mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Its writers first: then no rank can be added while the others are claimed.
        taken = _claim(stack, _path(layout, hash_))
        if loaders:
            taken = taken and _claim(stack, str(layout.entry_dir(hash_)), to_read=True)
            names = {name for name in names_in(_path(layout, "")) if name[:64] == hash_ != name}
            with contextlib.suppress(CacheError):  # an entry that cannot be listed cannot be loaded from either
                names.update(name.flat for name in layout.rank_names(hash_))
            taken = taken and all(_claim(stack, _path(layout, name)) for name in sorted(names))
        yield taken


@contextlib.contextmanager
def locked(path: str) -> Iterator[bool]:
    """Hold the lock of a file while the block runs, without waiting for it. Never raises on account of the disk.

    Yields:
        Whether nobody else holds it; True also where there is no such file.
    """
    with contextlib.ExitStack() as stack:
        yield _claim(stack, path, make=False)


def remove_idle(layout: CacheLayout, hash_: str) -> None:
    """Remove the files of leases that nobody holds, of an entry that is gone. Never raises on account of the disk."""
    folder = layout.state_dir / "leases"
    if os.path.islink(folder) or os.path.islink(folder.parent):  # noqa: PTH114 - Path's raises
        return  # what is behind a link is not the cache's
    for name in names_in(_path(layout, "")):
        if name[:64] == hash_:
            remove_if_idle(_path(layout, name))


def remove_if_idle(path: str | Path) -> bool:
    """Remove a lock file that nobody holds; return whether it is gone. Never raises on account of the disk.

    Whoever waits for the lock meanwhile finds that its file is gone, and takes the lock of a new one.
    """
    with locked(str(path)) as mine, contextlib.suppress(OSError):
        if mine:
            Path(path).unlink(missing_ok=True)
            return True
    return False


def _claim(stack: contextlib.ExitStack, path: str, *, make: bool = True, to_read: bool = False) -> bool:
    """Take an exclusive lock until the stack ends; True also where there is nothing that anyone could hold."""
    try:
        descriptor = _open_to_claim(path, make=make, to_read=to_read)
    except (FileNotFoundError, NotADirectoryError):
        return True  # its folder is not there, so nobody holds it
    except OSError as error:
        # One that cannot be made (a full disk, a read-only one) is held by nobody; one that cannot be opened may be.
        return error.errno in _CANNOT_MAKE and not os.path.exists(path)  # noqa: PTH110 - a str
    stack.callback(os.close, descriptor)
    try:
        return bool(try_lock(descriptor, exclusive=True)) or not _HAS_FLOCK
    except OSError:
        return False


def _open_to_claim(path: str, *, make: bool, to_read: bool) -> int:
    if not to_read:
        try:
            return os.open(path, os.O_RDWR | (os.O_CREAT if make else 0) | SAFE_OPEN_FLAGS, RECORD_MODE)
        except OSError as error:
            # Another user's file, or one of a read-only disk, may be locked all the same.
            if error.errno not in (errno.EACCES, errno.EROFS) or not os.path.exists(path):  # noqa: PTH110 - a str
                raise
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | _CLOEXEC)


def _is_locked(path: str) -> bool:
    """Whether someone holds a lock; True where it cannot be asked for."""
    with contextlib.ExitStack() as stack:
        return not _claim(stack, path, to_read=True)


def _path(layout: CacheLayout, name: str) -> str:
    return f"{layout.root}/torch_compile_cache/state/leases/{name}"


def hold_folder(folder: Path, held: list[int]) -> None:
    """Add a descriptor to a list that holds a folder of this process's own until it is closed.

    A folder that nobody holds was left by a killed process.

    Raises:
        OSError: The folder cannot be opened.
    """
    held.extend(opening(os.open, folder, _FOLDER))
    with contextlib.suppress(OSError):
        try_lock(held[-1], exclusive=True)


def is_abandoned(folder: Path) -> bool:
    """Return whether the process that made a folder is gone; a young one counts as held."""
    try:
        age = time.time() - folder.stat().st_mtime
        with open_descriptor(os.open, folder, _FOLDER) as descriptor:
            taken = try_lock(descriptor, exclusive=True)
    except OSError:
        return False
    return age > _ABANDONED_SECS if taken is None else taken and age > _YOUNG_SECS


def require_locks(layout: CacheLayout) -> None:
    """Refuse to go on where nobody can say what live processes use.

    Raises:
        CacheError: Locks do not work in the cache folder, on a platform that has them.
    """
    try:
        descriptor = os.open(layout.base, os.O_RDONLY | _CLOEXEC)
    except OSError:
        return  # whoever lists it says so
    try:
        works = not _HAS_FLOCK or try_lock(descriptor, exclusive=False) is not None
    except OSError as error:
        raise cache_error(error, layout.base, doing="removed") from error
    finally:
        os.close(descriptor)
    if not works:
        message = (
            f"File locks do not work in {layout.base}, so nobody can tell which entries live processes use, and "
            "nothing was removed. Stop whatever uses the cache and remove the folder, or move it to a local disk."
        )
        raise CacheError(message, path=layout.base)


def try_lock(descriptor: int, *, exclusive: bool, wait: bool = False) -> bool | None:
    """Lock an open file or folder.

    Returns:
        Whether it is locked now; None where locks do not work.

    Raises:
        OSError: The system says something else of it.
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
    """Let go of a lock for all processes that share it; to close the file lets go for this one alone."""
    if _HAS_FLOCK:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
