"""Leases: which entries live processes use, so that prune leaves them alone. Must not import torch.

In `state/leases`, empty files that are locked (flock) and never written::

    <hash>-rank_<i>-<prefix>               shared by each process that loaded it, for as long as that process lives
    <hash>                                 shared by each process that is writing any rank of the entry
    <either>~<machine>~<pid>~<start>       a stamp instead of a lock, where flock does not work (ENOLCK and the like)

Of stamps see `cgtool.store.stamps`. Where `state/` cannot be written to, the folder of the entry itself is locked. The
kernel lets go of a lock as its process ends, however that happens.

Prune takes the exclusive lock without waiting, moves the entry away under it, and removes the lease's file: whoever got
a lock on a file that is no longer there takes the lock of the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path

from cgtool.errors import CacheError
from cgtool.store.descriptors import made
from cgtool.store.files import RECORD_MODE, may_exist
from cgtool.store.layout import CacheLayout, RankName, check_hash

try:
    import fcntl
except ImportError:  # Windows, where stamps serve
    _HAS_FLOCK = False
else:
    _HAS_FLOCK = True

_CANNOT_MAKE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
#: A prune holds the exclusive lock for as long as a rename takes, which may be long on a slow disk: whoever loads tries
#: again this often, a second in all, and who writes sixty times that.
_TRIES = 500
_PAUSE_SECS = 0.002
_WAITS = 60
_SEPARATOR = "~"
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)


class Lease:
    """A hold on an entry, until it is released or the process ends.

    Args:
        stamp: The stamp's path; None where a lock serves.
    """

    def __init__(self, *, stamp: str | None = None) -> None:
        self._files: list[int] = []  # one, or none
        self._finalizer = weakref.finalize(self, _let_go, self._files, stamp, os.getpid())

    def open(self, path: str, flags: int) -> None:
        """Open the file or folder that is to be locked. Raises OSError where that cannot be done."""
        self._files.extend(made(os.open, path, flags | _CLOEXEC, RECORD_MODE))

    def lock(self) -> bool:
        """Return whether what is locked now is still there. Raises OSError: BlockingIOError where another holds it."""
        if not _HAS_FLOCK:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fcntl.flock(self._files[0], fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.fstat(self._files[0]).st_nlink > 0

    @property
    def is_current(self) -> bool:
        """Whether the lock still lies on a file that others can find."""
        if not self._finalizer.alive:
            return False
        try:
            return not self._files or os.fstat(self._files[0]).st_nlink > 0
        except OSError:
            return False

    def release(self) -> None:
        """Let go; harmless the second time."""
        self._finalizer()


def _let_go(files: list[int], stamp: str | None, owner: int) -> None:
    with contextlib.suppress(OSError):
        for descriptor in files:
            os.close(descriptor)
    if stamp is not None and os.getpid() == owner:
        with contextlib.suppress(OSError):
            os.unlink(stamp)  # noqa: PTH108 - a str on the way of a load


#: What this process loaded: path of the lease → the lease.
_held: dict[str, Lease] = {}


def hold(layout: CacheLayout, name: RankName) -> Lease | None:
    """Say that this process uses an entry, until it ends. Waits for a second while prune removes the entry.

    Args:
        layout: Where the cache lies.
        name: What was found.

    Returns:
        The lease; None where none can be had: a read-only cache without flock, say.

    Raises:
        BlockingIOError: Prune goes on removing it.
    """
    path = f"{layout.root}/torch_compile_cache/state/leases/{name.flat}"
    held = _held.get(path)
    if held is not None and held.is_current:
        return held
    lease = _lease(path, f"{layout.root}/torch_compile_cache/{name.hash}")
    if lease is not None:
        _held[path] = lease
    return lease


def keep(layout: CacheLayout, name: RankName) -> bool:
    """Hold an entry that was found, and return whether it is still there: from here on prune leaves it alone.

    Args:
        layout: Where the cache lies.
        name: What was found.
    """
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

    Args:
        layout: Where the cache lies.
        hash_: The entry's hash; the entry need not be there.

    Raises:
        CacheError: It is no hash.
    """
    for _ in range(_WAITS):
        with contextlib.suppress(BlockingIOError):
            return _lease(_path(layout, check_hash(hash_)), str(layout.entry_dir(hash_)))
    return None


def in_use(layout: CacheLayout, name: RankName) -> bool:
    """Return whether a live process loaded an entry or is writing it; True also where that cannot be found out."""
    return LeaseTable(layout).is_used(name.hash, (name,))


class LeaseTable:
    """The leases of a cache as they are listed at one moment; whether one is held is asked of the kernel each time.

    Args:
        layout: Where the cache lies.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._files: dict[str, list[str]] = {}
        self._stamps: dict[str, list[str]] = {}
        for text in _listed(layout.state_dir / "leases"):
            owner, stamped, _ = text.partition(_SEPARATOR)
            (self._stamps if stamped else self._files).setdefault(owner[:64], []).append(text)

    def is_used(self, hash_: str, names: Collection[RankName] | None = None) -> bool:
        """Return whether a live process uses an entry.

        Args:
            hash_: The entry.
            names: The ranks and prefixes to ask for, beside its writers; None for all.
        """
        wanted = None if names is None else {hash_, *(name.flat for name in names)}
        stamps = [text for text in self._stamps.get(hash_, ()) if wanted is None or _owner(text) in wanted]
        if any(_lives(_path(self._layout, text)) for text in stamps):
            return True
        files = [text for text in self._files.get(hash_, ()) if wanted is None or text in wanted]
        if any(_is_locked(_path(self._layout, text)) for text in files):
            return True
        return wanted != {hash_} and _is_locked(str(self._layout.entry_dir(hash_)))

    def is_written(self, hash_: str) -> bool:
        """Return whether a live process is writing an entry."""
        return self.is_used(hash_, ())


@contextlib.contextmanager
def claimed(layout: CacheLayout, hash_: str, *, loaders: bool = True) -> Iterator[bool]:
    """Claim an entry for removal: while the block runs nobody else can hold it. Never raises on account of the disk.

    Args:
        layout: Where the cache lies.
        hash_: The entry.
        loaders: Whether processes that loaded it count; else only those that are writing it.

    Yields:
        Whether it was claimed; False where a live process uses it.
    """
    with contextlib.suppress(OSError):
        (layout.state_dir / "leases").mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Its writers first: then no rank can be added while the others are claimed.
        mine = _claim(stack, _path(layout, hash_))
        if mine is None:
            from cgtool.store.stamps import claiming  # nearly all file systems do without

            stack.enter_context(claiming(_path(layout, hash_)))
        taken = mine is not False
        if loaders:
            taken = taken and _claim(stack, str(layout.entry_dir(hash_)), to_read=True) is not False
        owners, stamps = _leases_of(layout, hash_, loaders=loaders)
        taken = taken and not any(_lives(path) for path in stamps)
        yield taken and all(_claim(stack, _path(layout, text)) is not False for text in sorted(owners - {hash_}))


def _leases_of(layout: CacheLayout, hash_: str, *, loaders: bool) -> tuple[set[str], list[str]]:
    """The names of an entry's leases, those that may be taken meanwhile too, and the paths of its stamps."""
    listed = [text for text in _listed(layout.state_dir / "leases") if text[:64] == hash_]
    wanted = [text for text in listed if loaders or _owner(text) == hash_]
    owners = {text for text in wanted if _owner(text) == text}
    if loaders:
        with contextlib.suppress(CacheError):  # an entry that cannot be listed cannot be loaded from either
            owners.update(name.flat for name in layout.rank_names(hash_))
    return owners, [_path(layout, text) for text in wanted if _owner(text) != text]


@contextlib.contextmanager
def locked(path: str) -> Iterator[bool]:
    """Hold the lock of a file while the block runs, without waiting for it. Never raises on account of the disk.

    Yields:
        Whether nobody else holds it; True also where there is no such file, or nothing locks.
    """
    with contextlib.ExitStack() as stack:
        yield _claim(stack, path, make=False) is not False


def remove_idle(layout: CacheLayout, hash_: str) -> None:
    """Remove the files of leases that nobody holds, of an entry that is gone. Never raises on account of the disk."""
    folder = layout.state_dir / "leases"
    if os.path.islink(folder) or os.path.islink(folder.parent):  # noqa: PTH114 - Path's raises
        return  # what is behind a link is not the cache's
    for text in _listed(folder):
        if text[:64] == hash_:
            remove_if_idle(_path(layout, text))


def remove_if_idle(path: str | Path) -> bool:
    """Remove a lock file or stamp that nobody holds; return whether it is gone. Never raises on account of the disk.

    Whoever waits for the lock meanwhile finds that its file is gone, and takes the lock of a new one.
    """
    text = str(path)
    if _owner(Path(text).name) != Path(text).name and _lives(text):
        return False
    with locked(text) as mine, contextlib.suppress(OSError):
        if mine:
            Path(text).unlink(missing_ok=True)
            return True
    return False


def _lease(path: str, entry: str) -> Lease | None:
    """The lease; None where none can be had, BlockingIOError where the exclusive lock is held, and goes on being so."""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_SECS)
        lease = Lease()
        try:
            _open(lease, path)
        except OSError:
            try:
                return _lease_of_folder(entry)
            except BlockingIOError:
                continue
        try:
            if lease.lock():
                return lease
        except OSError as error:
            if error.errno not in _BUSY:
                with contextlib.suppress(BlockingIOError):
                    return _stamped(path)
        lease.release()
    raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)


def _open(lease: Lease, path: str) -> None:
    try:
        lease.open(path, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - a str on the way of a load
        lease.open(path, os.O_RDWR | os.O_CREAT)
    except PermissionError:
        lease.open(path, os.O_RDONLY)  # another user's, which may be locked all the same


def _lease_of_folder(entry: str) -> Lease | None:
    """Lock the entry's own folder, which takes no leave to write; BlockingIOError where the exclusive lock is held."""
    lease = Lease()
    try:
        lease.open(entry, os.O_RDONLY)
        lease.lock()
    except BlockingIOError:
        raise
    except OSError:
        return None
    return lease


def _stamped(path: str) -> Lease | None:
    """A stamp; None where none can be made, BlockingIOError where a prune has claimed the entry."""
    from cgtool.store.stamps import is_claimed, stamp  # nearly all file systems do without

    try:
        lease = Lease(stamp=stamp(path))
    except OSError:
        return None
    if is_claimed(path):
        lease.release()
        raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)
    return lease


def _claim(stack: contextlib.ExitStack, path: str, *, make: bool = True, to_read: bool = False) -> bool | None:
    """Take an exclusive lock until the stack ends; None where there is nothing to lock, or nothing locks."""
    try:
        descriptor = _open_to_claim(path, make=make, to_read=to_read)
    except (FileNotFoundError, NotADirectoryError):
        return None  # its folder is not there, so nobody holds it
    except OSError as error:
        # One that cannot be made (a full disk, a read-only one) is held by nobody; one that cannot be opened may be.
        return None if error.errno in _CANNOT_MAKE and not os.path.exists(path) else False  # noqa: PTH110 - a str
    stack.callback(os.close, descriptor)
    return _take(descriptor) if _HAS_FLOCK else None


def _open_to_claim(path: str, *, make: bool, to_read: bool) -> int:
    if not to_read:
        try:
            return os.open(path, os.O_RDWR | (os.O_CREAT if make else 0) | _CLOEXEC, RECORD_MODE)
        except OSError as error:
            # Another user's file, or one of a read-only disk, may be locked all the same.
            if error.errno not in (errno.EACCES, errno.EROFS) or not os.path.exists(path):  # noqa: PTH110 - a str
                raise
    return os.open(path, os.O_RDONLY | _CLOEXEC)


def _take(descriptor: int) -> bool | None:
    """Take the exclusive lock; False where someone else holds it, None where nothing locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _BUSY else None
    return True


def _is_locked(path: str) -> bool:
    """Whether someone holds a lock; True where it cannot be asked for."""
    with contextlib.ExitStack() as stack:
        return _claim(stack, path, to_read=True) is False


def _lives(stamp: str) -> bool:
    from cgtool.store.stamps import stamp_lives  # nearly all file systems do without

    return stamp_lives(stamp)


def _owner(text: str) -> str:
    return text.partition(_SEPARATOR)[0]


def _path(layout: CacheLayout, text: str) -> str:
    return f"{layout.root}/torch_compile_cache/state/leases/{text}"


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone, and thousands of them
    except OSError:
        return []
