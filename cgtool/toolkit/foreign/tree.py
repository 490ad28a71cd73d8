"""The folders of a stranger: names, sizes, times and the beginnings of files. Must not import torch.

Links are not followed, pipes and devices are not opened, and what cannot be read is a warning. A tree that is deeper or
has more files than any cache is cut short with a warning. Reading leaves access times alone where the system lets us.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cgtool.errors import CacheError

MOST_FILES = 2_000_000
MOST_DEPTH = 24
#: Longer texts are cut in their middle: a path tells most at its end, a text at its beginning.
_MOST_SHOWN = 400
#: One number for a device and an inode on it.
_DEVICE = 1 << 64


class File(NamedTuple):
    """One regular file; two names of one file of the disk share its `identity`, times are seconds since the epoch."""

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
    """All regular files under a folder, or one file, which may itself be a link, for the user named it."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.warnings: list[str] = []
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
        return sorted(found)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[BinaryIO]:
        """Yield one of its files, open for reading."""
        with opened(self.top / path if path else self.top, follow=not path) as stream:
            yield stream

    def read(self, path: str, most: int) -> bytes:
        """Return the bytes of one of its files, at most `most` and one more."""
        with self.opened(path) as stream:
            return stream.read(most + 1)

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
            return False
        if not stat.S_ISREG(status.st_mode):
            self._warn(path, "is neither a file nor a folder and was not opened")
            return False
        if not path.isprintable():
            self._warn(path, "has a name with characters that do not print")
        identity = status.st_dev * _DEVICE + status.st_ino
        self.files[path] = File(path, status.st_size, identity, status.st_mtime, status.st_atime)
        return True

    def _warn(self, path: str, what: str) -> None:
        self.warnings.append(f"{shown(self.top / path)} {what}.")


def join(*parts: str) -> str:
    """Return the path of a name in folders, "" being the top."""
    return "/".join(filter(None, parts))


@contextlib.contextmanager
def opened(path: Path, *, follow: bool = False) -> Iterator[BinaryIO]:
    """Yield a regular file, open for reading, without touching its access time where that is allowed."""
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


def shown(text: object) -> str:
    """Return a stranger's text for a sentence: on one line, printable, and not longer than people read."""
    source = str(text)
    if len(source) > _MOST_SHOWN:
        half = _MOST_SHOWN // 2
        source = f"{source[:half]}…{source[-half:]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in source)
