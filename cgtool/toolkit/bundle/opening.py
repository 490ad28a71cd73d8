"""The two forms of a bundle, archive and folder, read the same way. Must not import torch.

Nothing here writes. A folder is walked by descriptors that follow no links, so that what is read lies within it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from cgtool.errors import CacheError
from cgtool.store.bundle_index import (
    INDEX_FILE,
    MAX_SIGNATURE_BYTES,
    SIGNATURE_FILE,
    Index,
    Limits,
    Member,
    place_of,
    refused,
)
from cgtool.store.files import RECORD_MODE, cache_error
from cgtool.store.layout import CACHE_FOLDER, SIGNATURES, is_hash
from cgtool.toolkit.bundle.frames import Unpacker
from cgtool.toolkit.bundle.tar import CHUNK_BYTES, Header, TarReader

_NOT_A_BUNDLE = "Name a file or a folder that cgtool export wrote."
_NO_FILE = "Name a file or a folder that cgtool export wrote, or - to read a pipe as standard input."
_READ = os.O_RDONLY | os.O_CLOEXEC
#: The slashes in the longest names that the grammar of `cgtool.store.bundle_index` knows: those are files.
_DEEPEST = 4
#: What lies beside the members in a folder that served as a cache: it is left alone.
_OF_A_CACHE = frozenset({"units", "lookup", "state"})


class OpenBundle(Protocol):
    """A bundle that is being read, forwards.

    Attributes:
        index_bytes: The text of bundle.json.
        signature_bytes: The text of bundle.sig; None where there is none.
    """

    index_bytes: bytes
    signature_bytes: bytes | None

    def members(self, index: Index) -> Iterator[tuple[Member, Iterator[bytes]]]:
        """Yield every member of `index` in order with its bytes, which must be read before the next is asked for.

        Raises:
            RefusedError: The bundle holds something else than the index says.
        """


@contextlib.contextmanager
def opened(source: Path | IO[bytes], limits: Limits) -> Iterator[OpenBundle]:
    """Yield a bundle with its index and signatures read, and nothing else.

    Args:
        source: A file, a folder, or a stream that is read forwards.
        limits: How much is read of it.

    Raises:
        RefusedError: It is no bundle, or not whole.
        CacheError: It cannot be read.
    """
    if not isinstance(source, Path):
        yield Archive(source, limits)
        return
    try:
        if source.is_dir():
            with _folder(source) as descriptor:
                yield Folder(descriptor, limits)
        else:
            # Without waiting for a writer of what is a pipe.
            with open(source, "rb", opener=lambda path, _: os.open(path, _READ | os.O_NONBLOCK)) as stream:
                if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                    raise refused("not_a_bundle", "is neither a file nor a folder", advice=_NO_FILE)
                yield Archive(stream, limits)
    except OSError as error:
        raise cache_error(error, source, doing="read") from error


class Archive:
    """A bundle as one file.

    Args:
        source: Its bytes.
        limits: How much is read of it.
    """

    def __init__(self, source: IO[bytes], limits: Limits) -> None:
        self._unpacker = Unpacker(source, limits)
        self._tar = TarReader(self._unpacker)
        header = self._tar.next()
        if header is None or header.name != INDEX_FILE:
            name = None if header is None else header.name[:100]
            raise refused("not_a_bundle", f"does not begin with {INDEX_FILE}", actual=name, advice=_NOT_A_BUNDLE)
        self.index_bytes = self._text(header, limits.max_index_bytes)
        self.signature_bytes: bytes | None = None
        self._pending = self._tar.next()
        if self._pending is not None and self._pending.name == SIGNATURE_FILE:
            self.signature_bytes = self._text(self._pending, MAX_SIGNATURE_BYTES)
            self._pending = self._tar.next()

    def _text(self, header: Header, most: int) -> bytes:
        if header.size_bytes > most:
            raise refused("too_large", f"promises {header.size_bytes} bytes", member=header.name, expected=most)
        self._tar.check(header, RECORD_MODE)
        return b"".join(self._tar.body())

    def members(self, index: Index) -> Iterator[tuple[Member, Iterator[bytes]]]:
        """Yield every member with its bytes; see `OpenBundle`."""
        header = self._pending
        for member in index.members:
            if header is None:
                raise refused("missing_member", "is named by the index and is missing", member=member.path)
            if header.name != member.path:
                raise _stray(header.name, member.path, index)
            if header.size_bytes != member.size_bytes:
                raise refused(
                    "size_mismatch",
                    "has another size than the index says",
                    member=member.path,
                    expected=member.size_bytes,
                    actual=header.size_bytes,
                )
            self._tar.check(header, member.mode)
            yield member, self._tar.body()
            header = self._tar.next()
        if header is not None:
            raise _stray(header.name, None, index)
        self._unpacker.check_end()


def _stray(name: str, expected: str | None, index: Index) -> Exception:
    """Return the refusal of a member that the index does not have at this place."""
    if name in (INDEX_FILE, SIGNATURE_FILE):
        return refused("duplicate_member", "is there twice, or at the wrong place", member=name)
    place_of(name)
    names = [member.path for member in index.members]
    if name not in names:
        return refused("unlisted_member", "is not in the index", member=name, expected=expected)
    if expected is None or name < expected:
        return refused("duplicate_member", "is there twice", member=name, expected=expected)
    return refused("missing_member", "is named by the index and is not at its place", member=expected, actual=name)


class Folder:
    """A bundle as a folder.

    Args:
        descriptor: The open folder.
        limits: How much is read of it.
    """

    def __init__(self, descriptor: int, limits: Limits) -> None:
        self._descriptor = descriptor
        self.index_bytes = self._text(INDEX_FILE, limits.max_index_bytes)
        self.signature_bytes = None
        if SIGNATURE_FILE in os.listdir(descriptor):
            self.signature_bytes = self._text(SIGNATURE_FILE, MAX_SIGNATURE_BYTES)

    def _text(self, name: str, most: int) -> bytes:
        try:
            with _file(self._descriptor, name) as (file, size):
                if size > most:
                    raise refused("too_large", f"has {size} bytes", member=name, expected=most, actual=size)
                return b"".join(_chunks(file, size, name))
        except FileNotFoundError as error:
            raise refused("not_a_bundle", f"has no {name}", advice=_NOT_A_BUNDLE) from error

    def members(self, index: Index) -> Iterator[tuple[Member, Iterator[bytes]]]:
        """Yield every member with its bytes; see `OpenBundle`."""
        named = {member.path for member in index.members}
        for name in _walk(self._descriptor):
            if name not in named:
                place_of(name)
                raise refused("unlisted_member", "is not in the index", member=name)
        for member in index.members:
            try:
                with _file(self._descriptor, member.path) as (file, size):
                    if size != member.size_bytes:
                        raise refused(
                            "size_mismatch",
                            "has another size than the index says",
                            member=member.path,
                            expected=member.size_bytes,
                            actual=size,
                        )
                    yield member, _chunks(file, size, member.path)
            except FileNotFoundError as error:
                raise refused("missing_member", "is named by the index and is missing", member=member.path) from error


def _chunks(file: int, size: int, name: str) -> Iterator[bytes]:
    left = size
    while left:
        chunk = os.read(file, min(left, CHUNK_BYTES))
        if not chunk:
            raise refused("truncated", "ends too early", member=name)
        left -= len(chunk)
        yield chunk


@contextlib.contextmanager
def _folder(path: Path | str, *, above: int | None = None) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(path, flags if above is None else flags | os.O_NOFOLLOW, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _file(top: int, name: str) -> Iterator[tuple[int, int]]:
    """Yield a regular file below an open folder, and its size; no link is followed on the way."""
    with contextlib.ExitStack() as stack:
        *folders, own = name.split("/")
        above = top
        try:
            for folder in folders:
                above = stack.enter_context(_folder(folder, above=above))
            file = os.open(own, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=above)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise refused("link", "is a link or no file, or lies below one", member=name) from error
            if isinstance(error, FileNotFoundError):
                raise
            raise CacheError(f"{name} cannot be read: {error.strerror}. Check its permissions.", path=name) from error
        stack.callback(os.close, file)
        status = os.fstat(file)
        _check_type(status.st_mode, name)
        yield file, status.st_size


def _check_type(mode: int, name: str) -> None:
    if stat.S_ISLNK(mode):
        raise refused("link", "is a link", member=name)
    if stat.S_ISFIFO(mode):
        raise refused("fifo", "is a named pipe", member=name)
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise refused("device", "is a device", member=name)
    if not stat.S_ISREG(mode):
        raise refused("strange_type", "is no file", member=name)


def _walk(top: int) -> Iterator[str]:
    """Yield the name of everything in a folder that is no folder and that its index must name."""
    for entry in _listed(top, ""):
        if entry.name in (INDEX_FILE, SIGNATURE_FILE, "CACHEDIR.TAG") and entry.is_file(follow_symlinks=False):
            continue
        if entry.name != CACHE_FOLDER or not entry.is_dir(follow_symlinks=False):
            raise refused("outside_layout", "is nothing that a bundle holds", member=entry.name)
    try:
        with _folder(CACHE_FOLDER, above=top) as base:
            for entry in _listed(base, CACHE_FOLDER):
                name = f"{CACHE_FOLDER}/{entry.name}"
                if entry.name in _OF_A_CACHE and entry.is_dir(follow_symlinks=False):
                    continue
                if not is_hash(entry.name):
                    place_of(name)
                yield from _below(base, entry, name)
    except FileNotFoundError:
        return


def _below(above: int, entry: os.DirEntry[str], name: str) -> Iterator[str]:
    if not entry.is_dir(follow_symlinks=False):
        _check_type(entry.stat(follow_symlinks=False).st_mode, name)
        yield name
        return
    if name.count("/") == 2 and entry.name == SIGNATURES:  # noqa: PLR2004 - in the entry's own folder
        return  # what load checks: import writes its own
    if name.count("/") >= _DEEPEST:
        raise refused("outside_layout", "is a folder where a bundle has none", member=name)
    with _folder(entry.name, above=above) as descriptor:
        for child in _listed(descriptor, name):
            yield from _below(descriptor, child, f"{name}/{child.name}")


def _listed(descriptor: int, name: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(descriptor) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        where = name or "The bundle"
        raise CacheError(f"{where} cannot be listed: {error.strerror}. Check its permissions.", path=where) from error
