"""Lists and reads untrusted folders. Must not import torch.

Links are not followed, pipes and devices are not opened, and anything that cannot be read becomes a warning. A tree
that is deeper or has more files than any cache is truncated with a warning. Reading does not change access times if the
system permits that.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cgtool.errors import CacheError

MAX_FILES = 2_000_000
MAX_DEPTH = 24
#: Longer texts are cut in the middle: the end of a path and the start of a text are the most informative.
_MAX_SHOWN_CHARS = 400
#: Combines a device and an inode into one number.
_DEVICE = 1 << 64


class File(NamedTuple):
    """A regular file; times are in seconds since the epoch."""

    path: str
    size_bytes: int
    #: Equal for hard links to the same file.
    identity: int
    written: float
    read: float

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]


class Tree:
    """All regular files under a folder, or a single file; `top` may be a link, because the user named it."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.warnings: list[str] = []
        self.files: dict[str, File] = {}
        #: Folder → the names of its subfolders and of its files.
        self._children: dict[str, tuple[list[str], list[str]]] = {}
        if top.is_dir():
            self._walk()
        else:
            with contextlib.suppress(OSError):
                self._add("", top.stat())

    def folders(self, folder: str = "") -> list[str]:
        """Return the sorted names of the direct subfolders of a folder; "" is the top."""
        return sorted(self._children.get(folder, ([], []))[0])

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names of the files directly in a folder."""
        return sorted(self._children.get(folder, ([], []))[1])

    def is_folder(self, path: str) -> bool:
        """Return whether a path is a folder of the tree."""
        return path in self._children

    def under(self, folder: str = "") -> list[File]:
        """Return all files under a folder, sorted by path."""
        files: list[File] = []
        pending = [folder]
        while pending:
            current = pending.pop()
            subfolders, names = self._children.get(current, ([], []))
            files.extend(self.files[join(current, name)] for name in names)
            pending.extend(join(current, name) for name in subfolders)
        return sorted(files)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        """Open one of the files for reading."""
        with open_regular(self.top / path if path else self.top, follow=not path) as stream:
            yield stream

    def read(self, path: str, max_bytes: int) -> bytes:
        """Read up to `max_bytes` + 1 bytes of a file; one byte more shows that it exceeds the limit."""
        with self.open(path) as stream:
            return stream.read(max_bytes + 1)

    def _walk(self) -> None:
        pending = [("", 0)]
        while pending:
            folder, depth = pending.pop()
            if depth > MAX_DEPTH:
                self._warn(folder, f"is nested more than {MAX_DEPTH} folders deep and was skipped")
                continue
            folders, names = self._children.setdefault(folder, ([], []))
            for child in self._scandir(folder):
                path = join(folder, child.name)
                if len(self.files) >= MAX_FILES:
                    self._warn("", f"has more than {MAX_FILES} files; the rest was skipped")
                    return
                with contextlib.suppress(FileNotFoundError):  # just removed
                    if child.is_dir(follow_symlinks=False):
                        folders.append(child.name)
                        pending.append((path, depth + 1))
                    elif self._add(path, child.stat(follow_symlinks=False)):
                        names.append(child.name)

    def _scandir(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.top / folder) as children:
                return sorted(children, key=lambda child: child.name, reverse=True)
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
            self._warn(path, "has a name with unprintable characters")
        identity = status.st_dev * _DEVICE + status.st_ino
        self.files[path] = File(path, status.st_size, identity, status.st_mtime, status.st_atime)
        return True

    def _warn(self, path: str, problem: str) -> None:
        self.warnings.append(f"{display_text(self.top / path)} {problem}.")


def join(*parts: str) -> str:
    """Join the parts of a path within a tree; "" is the top."""
    return "/".join(filter(None, parts))


@contextlib.contextmanager
def open_regular(path: Path, *, follow: bool = False) -> Iterator[BinaryIO]:
    """Open a regular file for reading, without changing its access time if the system permits that."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        try:
            descriptor = os.open(path, flags | getattr(os, "O_NOATIME", 0))
        except PermissionError:  # O_NOATIME is reserved for the file's owner
            descriptor = os.open(path, flags)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CacheError("it is not a regular file", path=path)
            yield stream
    except OSError as error:
        raise CacheError(f"it could not be read: {error.strerror or error}", path=path) from error


def display_text(text: object) -> str:
    """Return untrusted text for a message: on one line, printable, and truncated."""
    source = str(text)
    if len(source) > _MAX_SHOWN_CHARS:
        half = _MAX_SHOWN_CHARS // 2
        source = f"{source[:half]}…{source[-half:]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in source)
