"""What comes free on the disk, and the removal of files and folders. Must not import torch.

A file with several names comes free with its last one. Sizes are those of files, as `inspect cache` gives them; folders
count nothing. Paths are plain text throughout a prune, for there may be a hundred thousand of them.
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
    """Counts names that go."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], int] = {}
        self.freed_bytes = 0

    def take(self, path: str) -> tuple[int, int]:
        """Count a file, or a folder with all that is in it, as gone."""
        before, size = self.freed_bytes, 0
        for status in _files(path):
            size += status.st_size
            self._count(status)
        return size, self.freed_bytes - before

    def take_files(self, folder: str, names: Iterable[str]) -> int:
        """Count files of a folder as gone, whose names are known: quicker than to list a hundred thousand folders."""
        before = self.freed_bytes
        for name in names:
            for status in _file(f"{folder}/{name}"):
                self._count(status)
        return self.freed_bytes - before

    def would_free(self, paths: Iterable[str]) -> bool:
        """Return whether any byte would come free with files, or folders with all in them, and count nothing."""
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
    """Something that could not be removed, and stays whole or is swept later."""

    path: str
    sentence: str


class Removal:
    """Removes things, and counts what comes free with them; what goes wrong is noted and never raised."""

    def __init__(self, layout: CacheLayout) -> None:
        self.failed: list[Failed] = []
        #: What was renamed away, and is to be deleted once that is flushed.
        self.aside: list[str] = []
        self._layout = layout
        self._ledger = Ledger()
        self._lost_bytes = 0

    @property
    def freed_bytes(self) -> int:
        """What came free so far."""
        return self._ledger.freed_bytes - self._lost_bytes

    def delete(self, path: str) -> bool:
        """Delete a file, or a folder with all that is in it, and return whether all of it is gone."""
        return self._remove(path, lambda path: [*remove_tree(path)])

    def unlink(self, path: str) -> bool:
        """Remove a file, and return whether it is gone."""
        return self._remove(path, lambda path: remove(Path(path)))

    def unlink_idle(self, path: str) -> bool:
        """Remove a lock that nobody holds, and return whether it is gone."""
        return self._remove(path, _unlink_idle)

    def put_aside(self, path: str) -> bool:
        """Rename a folder of the cache away, and return whether that was done here."""
        try:
            aside = put_aside(self._layout, path)
        except CacheError as error:
            self.fail(path, error)
            return False
        self.aside += [] if aside is None else [aside]
        return aside is not None

    def fail(self, path: str, error: CacheError) -> None:
        """Note what could not be removed."""
        self.failed.append(Failed(path=path, sentence=str(error)))

    def _remove(self, path: str, function: Callable[[str], Iterable[CacheError] | None]) -> bool:
        """Call `function`, which returns or raises what went wrong, or BlockingIOError for what is held by now."""
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
        self._lost_bytes += 0 if is_gone else frees
        for wrong in errors:
            self.fail(str(wrong.path or path), wrong)
        return is_gone


def disk_usage(path: str) -> int:
    """Return what all files under a folder take, in bytes, each file once however many names it has."""
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
    """The status of a file or link, or of every file under a folder; `follow` goes through a link in its place."""
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
    except OSError:  # gone meanwhile
        return
    if not stat.S_ISDIR(status.st_mode):
        yield status
