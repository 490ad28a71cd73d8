"""A store: bytes under names, behind a URL; folders are one. Must not import torch, nor a client that is not asked for.

Names are relative, with slashes, of the grammar in `cgtool.remote`. Clients retry what may pass, with backoff and
jitter; what still fails is a `RemoteError`. URLs are shown without the user and password that they may hold.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from cgtool.errors import CacheError, RemoteError, UsageError
from cgtool.store.bundle_index import refused
from cgtool.store.files import (
    ensure_folder,
    is_temporary,
    os_errors_as_cache_errors,
    remove,
    temporary_file,
    write_atomic,
)

CHUNK_BYTES = 2**20
#: How often one file is asked for; between two attempts lie a part of `BACKOFF_SECS`, then of twice that, ...
ATTEMPTS = 4
BACKOFF_SECS = 0.2
CONNECT_SECS = 5.0
#: A server that says nothing for so long is taken to be down.
SILENCE_SECS = 30.0


class Item(NamedTuple):
    """What a listing says of one file: its name, size, and time of last change in seconds since the epoch."""

    path: str
    size_bytes: int
    modified: float


class Store(Protocol):
    """Bytes under names.

    Attributes:
        url: Where it is, as it may be shown.
        caveat: A warning for those who push there, as the rest of a sentence that begins with its URL; "" without.

    Raises:
        RemoteError: From every method: it cannot be reached, or does not do what it is asked.
    """

    url: str
    caveat: str

    def get(self, path: str, start: int = 0) -> Iterator[bytes] | None:
        """Return the bytes of a file from `start` on; None where there is no such file."""

    def put(self, path: str, body: bytes | Path, *, if_absent: bool = False) -> bool:
        """Write a file whole; with `if_absent`, return False and write nothing where there is one already."""

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None where there is none."""

    def list(self, folder: str) -> Iterator[Item]:
        """Yield every file in a folder and below it, in no order."""

    def delete(self, path: str) -> None:
        """Remove a file; one that is gone already is fine."""


def shown(url: str) -> str:
    """Return a URL without user and password, and without a query, which may hold a token."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


def is_remote(text: str) -> bool:
    """Return whether a text names a store, and no path of this machine."""
    return "://" in text


def open_store(url: str) -> Store:
    """Return the store at a URL; nothing is asked of it yet.

    Raises:
        UsageError: The URL names none, or the client that it needs is not installed.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{url!r} is no URL of a store: {error}.", actual=url) from error
    try:
        match parts.scheme:
            case "file" if parts.netloc in {"", "localhost"} and parts.path not in {"", "/"}:
                return FolderStore(Path(unquote(parts.path)))
            case "http" | "https" if parts.hostname:
                from cgtool.remote.http import HttpStore  # requests, an extra

                return HttpStore(url)
            case "oci" if parts.hostname and parts.path.strip("/"):
                from cgtool.remote.oci import OciStore  # oras, an extra

                return OciStore(url)
            case "s3" | "gs" | "az" if parts.netloc:
                from cgtool.remote.buckets import BucketStore  # obstore, an extra

                return BucketStore(url)
    except ModuleNotFoundError as error:
        message = f"{shown(url)} needs {error.name}, which is not installed. Install it: pip install 'cgtool[remote]'"
        raise UsageError(message, path=shown(url)) from error
    message = (
        f"{shown(url)!r} is no URL of a store. Write file:///FOLDER, https://HOST/FOLDER, s3://BUCKET/FOLDER, "
        "gs://BUCKET/FOLDER, az://CONTAINER/FOLDER or oci://HOST/REPOSITORY:TAG."
    )
    raise UsageError(message, path=shown(url))


def pause(attempt: int) -> None:
    """Wait before an attempt: longer each time, by a random part, so that clients do not come back together."""
    time.sleep(BACKOFF_SECS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311 - no secret


def stream(store: Store, path: str, size_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of a file that must be there; where a connection breaks, the next goes on from there.

    Raises:
        RemoteError: It is missing or ends too early, or the store fails each time.
        RefusedError: It has more bytes than `size_bytes`.
    """
    done, failed, chunks = 0, None, None
    for attempt in range(ATTEMPTS):
        if attempt:
            pause(attempt)
        chunks = store.get(path, done)
        if chunks is None:
            break
        try:
            for chunk in chunks:
                done += len(chunk)
                if done > size_bytes:
                    raise refused("size_mismatch", "has more bytes than the index says", member=path)
                yield chunk
        except RemoteError as error:
            failed = error
        if done == size_bytes:
            return
    wrong = "is missing" if chunks is None else f"ends after {done} of {size_bytes} bytes"
    message = f"{path} of {store.url} {wrong}, and an entry there names it. Push the entry again."
    raise failed or RemoteError(message, path=store.url, expected=size_bytes, actual=done)


def whole(store: Store, path: str, *, most: int) -> Iterator[bytes]:
    """Yield the bytes of a file that must be there, up to where an answer ends well.

    Its size is not asked for: a server may say any, and a URL that was signed for reading allows nothing else.

    Raises:
        RemoteError: It is missing, or the store fails each time.
        RefusedError: It has more than `most` bytes.
    """
    done = 0
    for attempt in range(ATTEMPTS):
        if attempt:
            pause(attempt)
        chunks = store.get(path, done)
        if chunks is None:
            raise RemoteError(f"There is no {path} in {store.url}. Name a file that is there.", path=store.url)
        try:
            for chunk in chunks:
                done += len(chunk)
                if done > most:
                    raise refused("too_large", f"has more than {most} bytes", expected=most)
                yield chunk
        except RemoteError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return


def read(store: Store, path: str, *, most: int) -> bytes | None:
    """Return the bytes of a file that may be there.

    Raises:
        RemoteError: The store fails each time.
        RefusedError: It has more than `most` bytes.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            pause(attempt)
        chunks = store.get(path)
        if chunks is None:
            return None
        found = bytearray()
        try:
            for chunk in chunks:
                found += chunk
                if len(found) > most:
                    raise refused("too_large", f"has more than {most} bytes", member=path)
        except RemoteError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return bytes(found)
    return None


@contextlib.contextmanager
def _os_errors_as_remote_errors(path: Path) -> Iterator[None]:
    """Turn errors of a folder's file system into those of a store, which a process can do without."""
    try:
        with os_errors_as_cache_errors(path):
            yield
    except CacheError as error:
        raise RemoteError(str(error), path=path) from error


class FolderStore:
    """A folder, of this machine or mounted."""

    caveat = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = folder.as_uri()

    def get(self, path: str, start: int = 0) -> Iterator[bytes] | None:
        """See `Store`."""
        place = self._folder / path
        with _os_errors_as_remote_errors(place):
            try:
                file = place.open("rb") if place.is_file() else None  # of a pipe, that would wait for a writer
            except (FileNotFoundError, NotADirectoryError):
                file = None
        if file is None:
            return None

        def chunks() -> Iterator[bytes]:
            with _os_errors_as_remote_errors(place), file:
                file.seek(start)
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk

        return chunks()

    def put(self, path: str, body: bytes | Path, *, if_absent: bool = False) -> bool:
        """See `Store`."""
        place = self._folder / path
        data = body if isinstance(body, bytes) else body.read_bytes()
        if not if_absent:
            write_atomic(place, data)
            return True
        ensure_folder(place.parent)
        with temporary_file(place, data) as temporary:
            try:
                place.hardlink_to(temporary)
            except FileExistsError:
                return False
        return True

    def size(self, path: str) -> int | None:
        """See `Store`."""
        with _os_errors_as_remote_errors(self._folder / path):
            try:
                return (self._folder / path).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def list(self, folder: str) -> Iterator[Item]:
        """See `Store`."""
        with _os_errors_as_remote_errors(self._folder / folder):
            for path in (self._folder / folder).rglob("*"):
                if path.is_file() and not is_temporary(path.name):
                    status = path.stat()
                    yield Item(path.relative_to(self._folder).as_posix(), status.st_size, status.st_mtime)

    def delete(self, path: str) -> None:
        """See `Store`."""
        remove(self._folder / path)
