"""Looking at the folders of a stranger: names, sizes, times and the beginnings of files. Must not import torch.

Links are not followed, pipes and devices not opened, and what cannot be read is a warning. Folders deeper or of more
files than any cache has are cut short with a warning. Reading leaves the access times alone where the system lets us.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from cgtool.errors import CacheError
from cgtool.records import dataclass
from cgtool.toolkit.foreign.words import shown

MOST_FILES = 2_000_000
MOST_DEPTH = 24
#: One number for a device and an inode on it.
_DEVICE = 1 << 64
#: File systems round times, and a file is often looked at as it is written.
_SECS_AFTER_WRITING = 2.0


@dataclass(frozen=True, kw_only=True)
class File:
    """One regular file.

    Args:
        path: Under the folder that was walked, with "/".
        size_bytes: Its length.
        identity: Which file of the disk it is; two names of one file share it.
        written: When it was written, in seconds since the epoch.
        read: When it was read last, as the file system noted it.
    """

    path: str
    size_bytes: int
    identity: int
    written: float
    read: float

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]


class Tree:
    """All regular files under a folder, or one file.

    Args:
        top: The folder, or the file. Itself it may be a link, for the user named it.
        warnings: Where to put what was skipped.
    """

    def __init__(self, top: Path, warnings: list[str]) -> None:
        self.top = top
        self.warnings = warnings
        self.files: dict[str, File] = {}
        #: folder → the names of the folders and of the files right in it
        self._held: dict[str, tuple[list[str], list[str]]] = {}
        if top.is_dir():
            self._walk()
        else:
            with contextlib.suppress(OSError):
                self._add("", top.stat())

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders right in a folder, sorted; "" is the top."""
        return sorted(self._held.get(folder, ([], []))[0])

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files right in a folder, sorted."""
        return sorted(self._held.get(folder, ([], []))[1])

    def is_folder(self, path: str) -> bool:
        """Return whether it is one of its folders."""
        return path in self._held

    def under(self, folder: str = "") -> list[File]:
        """Return the files under one of its folders, by path."""
        found: list[File] = []
        left = [folder]
        while left:
            here = left.pop()
            inner, names = self._held.get(here, ([], []))
            found.extend(self.files[join(here, name)] for name in names)
            left.extend(join(here, name) for name in inner)
        return sorted(found, key=lambda file: file.path)

    def _walk(self) -> None:
        left = [("", 0)]
        while left:
            folder, depth = left.pop()
            if depth > MOST_DEPTH:
                self._warn(folder, f"is deeper than {MOST_DEPTH} folders and was not looked into")
                continue
            folders, names = self._held.setdefault(folder, ([], []))
            for child in self._listed(folder):
                path = join(folder, child.name)
                if len(self.files) >= MOST_FILES:
                    self._warn("", f"has more than {MOST_FILES} files; the rest was not looked at")
                    return
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if child.is_dir(follow_symlinks=False):
                        folders.append(child.name)
                        left.append((path, depth + 1))
                    elif self._add(path, child.stat(follow_symlinks=False)):
                        names.append(child.name)

    def _listed(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.top / folder) as found:
                return sorted(found, key=lambda child: child.name, reverse=True)
        except OSError as error:
            self._warn(folder, f"could not be listed: {error.strerror}")
            return []

    def _add(self, path: str, status: os.stat_result) -> bool:
        if stat.S_ISLNK(status.st_mode):
            self._warn(path, "is a link and was not followed")
        elif not stat.S_ISREG(status.st_mode):
            self._warn(path, "is neither a file nor a folder and was not opened")
        else:
            if not path.isprintable():
                self._warn(path, "has a name with characters that do not print")
            self.files[path] = File(
                path=path,
                size_bytes=status.st_size,
                identity=status.st_dev * _DEVICE + status.st_ino,
                written=status.st_mtime,
                read=status.st_atime,
            )
            return True
        return False

    def _warn(self, path: str, what: str) -> None:
        self.warnings.append(f"{shown(self.top / path)} {what}.")

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[BinaryIO]:
        """Yield one of its files, open for reading.

        Raises:
            CacheError: It is gone, is no regular file any more, or may not be read.
        """
        with opened(self.top / path if path else self.top, follow=not path) as stream:
            yield stream

    def read(self, path: str, most: int) -> bytes:
        """Return the bytes of one of its files, at most `most` and one more.

        Raises:
            CacheError: It is gone or may not be read.
        """
        with self.opened(path) as stream:
            return stream.read(most + 1)


def join(folder: str, name: str) -> str:
    """Return the path of a name in a folder, "" being the top."""
    return f"{folder}/{name}" if folder else name


@contextlib.contextmanager
def opened(path: Path, *, follow: bool = False) -> Iterator[BinaryIO]:
    """Yield a regular file, open for reading, without touching its access time where that may be.

    Args:
        path: The file.
        follow: Whether it may be a link.

    Raises:
        CacheError: It is missing, is no regular file, or may not be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        try:
            descriptor = os.open(path, flags | getattr(os, "O_NOATIME", 0))
        except PermissionError:  # only a file's owner may leave its access time alone
            descriptor = os.open(path, flags)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CacheError("it is no regular file", path=path)
            yield stream
    except OSError as error:
        raise CacheError(f"it could not be read: {error.strerror or error}", path=path) from error


def size_of(files: Iterable[File]) -> int:
    """Return what files take, one of several names once."""
    return sum({file.identity: file.size_bytes for file in files}.values())


def created_of(files: Iterable[File]) -> str | None:
    """Return when the oldest file was written, in UTC as ISO 8601; None of none."""
    return _iso(min((file.written for file in files), default=None))


def used_of(files: Iterable[File]) -> str | None:
    """Return when a file was read last after it was written, in UTC as ISO 8601; None if none was."""
    return _iso(max((file.read for file in files if file.read > file.written + _SECS_AFTER_WRITING), default=None))


def _iso(secs: float | None) -> str | None:
    if secs is None:
        return None
    try:
        return datetime.fromtimestamp(secs, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):  # a year that no calendar has
        return None
