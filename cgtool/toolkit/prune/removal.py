"""What comes free on the disk, and the removal of files and folders. Must not import torch.

A file with several names comes free with its last one. Sizes are those of files, as `inspect cache` gives them; folders
count nothing. Paths are plain text throughout a prune, for there may be a hundred thousand of them.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from cgtool.errors import CacheError
from cgtool.store.pruned import remove_tree
from cgtool.toolkit.prune.plan import Failed


class Ledger:
    """Counts names that go."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], int] = {}
        self.freed_bytes = 0

    def take(self, path: str) -> tuple[int, int]:
        """Count a file, or a folder with all that is in it, as gone.

        Returns:
            What its files take, and what comes free with them, in bytes; what is gone meanwhile counts nothing.
        """
        before, size = self.freed_bytes, 0
        for status in _files(path):
            size += status.st_size
            self._count(status)
        return size, self.freed_bytes - before

    def take_files(self, folder: str, names: Iterable[str]) -> int:
        """Count files of a folder as gone, whose names are known: quicker than to list a hundred thousand folders.

        Returns:
            What comes free with them, in bytes.
        """
        before = self.freed_bytes
        for name in names:
            try:
                status = os.lstat(f"{folder}/{name}")
            except OSError:  # gone meanwhile
                continue
            if status.st_nlink == 1:
                self.freed_bytes += status.st_size
            else:
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


class Removal:
    """Removes things, and counts what comes free with them.

    Args:
        check: Raises `CacheError` for a path that is not to be touched.
    """

    def __init__(self, check: Callable[[str], None] = lambda _: None) -> None:
        self.failed: list[Failed] = []
        self._check = check
        self._ledger = Ledger()
        self._lost_bytes = 0

    @property
    def freed_bytes(self) -> int:
        """What came free so far."""
        return self._ledger.freed_bytes - self._lost_bytes

    def delete(self, path: str) -> bool:
        """Delete a file, or a folder with all that is in it, and return whether all of it is gone."""
        return self.remove(path, lambda path: list(remove_tree(path)))

    def remove(self, path: str, function: Callable[[str], Iterable[CacheError] | None]) -> bool:
        """Remove something, and return whether it is gone.

        Args:
            path: What.
            function: Removes it; returns what went wrong or raises it, or raises `BlockingIOError` where it is held by
                now, so that it is no leftover.
        """
        frees = 0
        errors: list[CacheError] = []
        try:
            self._check(path)
            _, frees = self._ledger.take(path)
            errors += function(path) or ()
            is_gone = not errors
        except CacheError as error:
            errors, is_gone = [error], False
        except BlockingIOError:
            is_gone = False
        self._lost_bytes += 0 if is_gone else frees
        for wrong in errors:
            self.fail(str(wrong.path or path), wrong)
        return is_gone

    def fail(self, path: str, error: CacheError) -> None:
        """Note what could not be removed."""
        self.failed.append(Failed(path=path, sentence=str(error)))


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
                    elif (status := _status(item)) is not None:
                        yield status
        except NotADirectoryError:
            yield from _file(folder)
        except OSError:
            continue


def _status(item: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return item.stat(follow_symlinks=False)
    except OSError:  # gone meanwhile
        return None


def _file(path: str) -> Iterator[os.stat_result]:
    try:
        status = os.lstat(path)
    except OSError:
        return
    if not stat.S_ISDIR(status.st_mode):
        yield status
