"""Remove files and folders, and count the bytes that this frees. Must not import torch.

A hard-linked file is freed with its last name. Sizes are file sizes, as `inspect cache` reports them; folders count as
zero. Paths are `str` throughout prune, because there may be a hundred thousand of them.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cgtool.errors import CacheError
from cgtool.plan.grammar import Record
from cgtool.store.files import remove
from cgtool.store.layout import CacheLayout
from cgtool.store.leases import remove_if_idle
from cgtool.store.pruned import check_inside, put_aside, remove_tree


class Ledger:
    """Counts removed names and the bytes that they free."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], int] = {}
        self.freed_bytes = 0

    def take(self, path: str) -> tuple[int, int]:
        """Count a file or a whole folder as removed; return its size and the bytes freed."""
        before, size = self.freed_bytes, 0
        for status in _files(path):
            size += status.st_size
            self._count(status)
        return size, self.freed_bytes - before

    def take_files(self, folder: str, names: Iterable[str]) -> int:
        """Count the named files of a folder as removed, without listing it, and return the bytes freed."""
        before = self.freed_bytes
        for name in names:
            for status in _file(f"{folder}/{name}"):
                self._count(status)
        return self.freed_bytes - before

    def would_free(self, paths: Iterable[str]) -> bool:
        """Return whether removing these files or folders would free any byte; count nothing."""
        names = Counter[tuple[int, int]]()
        for status in (status for path in paths for status in _files(path)):
            inode = status.st_dev, status.st_ino
            names[inode] += 1
            if status.st_size and names[inode] + self._names.get(inode, 0) >= status.st_nlink:
                return True
        return False

    def _count(self, status: os.stat_result) -> None:
        names = 1
        if status.st_nlink > 1:
            inode = status.st_dev, status.st_ino
            names = self._names[inode] = self._names.get(inode, 0) + 1
        if names >= status.st_nlink:
            self.freed_bytes += status.st_size


class Failed(Record, frozen=True, kw_only=True):
    """A path that could not be removed; it stays intact or is swept later."""

    path: str
    sentence: str


class Removal:
    """Removes files and folders, and counts the bytes freed; errors are recorded and never raised."""

    def __init__(self, layout: CacheLayout) -> None:
        self.failed: list[Failed] = []
        #: Paths in the trash, to be deleted once the renames are flushed.
        self.aside: list[str] = []
        self._layout = layout
        self._ledger = Ledger()
        self._unfreed_bytes = 0

    @property
    def freed_bytes(self) -> int:
        """The bytes freed so far."""
        return self._ledger.freed_bytes - self._unfreed_bytes

    def delete(self, path: str) -> bool:
        """Delete a file or a whole folder, and return whether all of it is gone."""
        return self._remove(path, lambda path: [*remove_tree(path)])

    def unlink(self, path: str) -> bool:
        """Remove a file, and return whether it is gone."""
        return self._remove(path, lambda path: remove(Path(path)))

    def unlink_idle(self, path: str) -> bool:
        """Remove a lock file that no process holds, and return whether it is gone."""
        return self._remove(path, _unlink_idle)

    def put_aside(self, path: str) -> bool:
        """Move a folder of the cache into the trash, and return whether this call did it."""
        try:
            aside = put_aside(self._layout, path)
        except CacheError as error:
            self.fail(path, error)
            return False
        self.aside += [] if aside is None else [aside]
        return aside is not None

    def fail(self, path: str, error: CacheError) -> None:
        """Record a path that could not be removed."""
        self.failed.append(Failed(path=path, sentence=str(error)))

    def _remove(self, path: str, function: Callable[[str], Iterable[CacheError] | None]) -> bool:
        """Call `function`, which returns or raises errors, or raises BlockingIOError if the file is held."""
        frees, errors, is_gone = 0, list[CacheError](), False
        try:
            check_inside(self._layout, path)
            _, frees = self._ledger.take(path)
            errors += function(path) or ()
            is_gone = not errors
        except CacheError as error:
            errors = [error]
        except BlockingIOError:
            pass
        self._unfreed_bytes += 0 if is_gone else frees
        for problem in errors:
            self.fail(str(problem.path or path), problem)
        return is_gone


def disk_usage(path: str) -> int:
    """Return the size of all files under a folder in bytes, counting hard-linked files once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for status in _files(path, follow=True):
        if status.st_nlink > 1:
            inode = status.st_dev, status.st_ino
            if inode in seen:
                continue
            seen.add(inode)
        total += status.st_size
    return total


def _unlink_idle(path: str) -> None:
    if not remove_if_idle(path):
        raise BlockingIOError


def _files(path: str, *, follow: bool = False) -> Iterator[os.stat_result]:
    """Yield the status of a file or link, or of every file under a folder; `follow` resolves a link at `path`."""
    folders = [path]
    if not follow and os.path.islink(path):  # noqa: PTH114 - paths are str all over prune
        yield from _file(path)
        return
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as found:
                for item in found:
                    if item.is_dir(follow_symlinks=False):
                        folders.append(item.path)
                    else:
                        yield from _file(item.path)
        except NotADirectoryError:
            yield from _file(folder)
        except OSError:
            continue


def _file(path: str) -> Iterator[os.stat_result]:
    try:
        status = os.lstat(path)
    except OSError:  # removed meanwhile
        return
    if not stat.S_ISDIR(status.st_mode):
        yield status
