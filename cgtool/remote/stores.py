"""The interface of stores, and stores in folders. Must not import torch, and imports HTTP clients lazily.

A store maps names to bytes behind a URL. Names are relative paths with slashes; `cgtool.remote` defines the layout.
Clients retry transient errors with backoff and jitter, and raise `RemoteError` if they persist. URLs are shown without
credentials.
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
#: Attempts per request. The pause between two attempts starts at about `BACKOFF_SECS` and doubles each time.
ATTEMPTS = 4
BACKOFF_SECS = 0.2
CONNECT_SECS = 5.0
#: A server that sends nothing for this long is considered down.
SILENCE_SECS = 30.0


class Item(NamedTuple):
    """A file in a listing: its name, size, and modification time in seconds since the epoch."""

    path: str
    size_bytes: int
    modified: float


class Store(Protocol):
    """A mapping of names to bytes.

    Attributes:
        url: Its URL, without credentials.
        caveat: A warning for those who push to it, which completes a sentence that begins with its URL; "" if none.

    Raises:
        RemoteError: From every method: the store cannot be reached, or reports an error.
    """

    url: str
    caveat: str

    def get(self, path: str, start: int = 0) -> Iterator[bytes] | None:
        """Return the bytes of a file from offset `start`, or None if there is no such file."""

    def put(self, path: str, body: bytes | Path, *, if_absent: bool = False) -> bool:
        """Write a file atomically; with `if_absent`, return False without writing if it exists already."""

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if there is no such file."""

    def list(self, folder: str) -> Iterator[Item]:
        """Yield every file in a folder and its subfolders, in arbitrary order."""

    def delete(self, path: str) -> None:
        """Remove a file if it exists."""


def redacted(url: str) -> str:
    """Return a URL without user and password, and without a query, which may contain a token."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


def is_remote(text: str) -> bool:
    """Return whether a text is the URL of a store rather than a local path."""
    return "://" in text


def open_store(url: str) -> Store:
    """Return the store at a URL, without connecting to it.

    Raises:
        UsageError: The URL is not that of a store, or the client that it needs is not installed.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{url!r} is not the URL of a store: {error}.", actual=url) from error
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
        message = (
            f"{redacted(url)} needs {error.name}, which is not installed. Install it: pip install 'cgtool[remote]'"
        )
        raise UsageError(message, path=redacted(url)) from error
    message = (
        f"{redacted(url)!r} is not the URL of a store. Use file:///FOLDER, https://HOST/FOLDER, s3://BUCKET/FOLDER, "
        "gs://BUCKET/FOLDER, az://CONTAINER/FOLDER or oci://HOST/REPOSITORY:TAG."
    )
    raise UsageError(message, path=redacted(url))


def _pause(attempt: int) -> None:
    """Wait before a retry, longer each time, with jitter so that clients do not retry simultaneously."""
    time.sleep(BACKOFF_SECS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311 - not cryptographic


def stream(store: Store, path: str, size_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of an existing file of known size; resume after a broken connection.

    Raises:
        RemoteError: The file is missing or too short, or the store keeps failing.
        RefusedError: The file has more than `size_bytes` bytes.
    """
    done, last_error, chunks = 0, None, None
    for attempt in range(ATTEMPTS):
        if attempt:
            _pause(attempt)
        chunks = store.get(path, done)
        if chunks is None:
            break
        try:
            for chunk in chunks:
                done += len(chunk)
                if done > size_bytes:
                    raise refused("size_mismatch", "has more bytes than in the index", member=path)
                yield chunk
        except RemoteError as error:
            last_error = error
        if done == size_bytes:
            return
    problem = "is missing" if chunks is None else f"ends after {done} of {size_bytes} bytes"
    message = f"{path} of {store.url} {problem}, but an entry there names it. Push the entry again."
    raise last_error or RemoteError(message, path=store.url, expected=size_bytes, actual=done)


def download(store: Store, path: str, *, most: int) -> Iterator[bytes]:
    """Yield the bytes of an existing file of unknown size; resume after a broken connection.

    The size is not requested, because a server may report a wrong one and a URL signed for reading allows only GET.

    Raises:
        RemoteError: The file is missing, or the store keeps failing.
        RefusedError: The file has more than `most` bytes.
    """
    done = 0
    for attempt in range(ATTEMPTS):
        if attempt:
            _pause(attempt)
        chunks = store.get(path, done)
        if chunks is None:
            raise RemoteError(f"There is no {path} in {store.url}. Check the name of the file.", path=store.url)
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
    """Return the bytes of a small file, or None if there is no such file.

    Raises:
        RemoteError: The store keeps failing.
        RefusedError: The file has more than `most` bytes.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            _pause(attempt)
        chunks = store.get(path)
        if chunks is None:
            return None
        data = bytearray()
        try:
            for chunk in chunks:
                data += chunk
                if len(data) > most:
                    raise refused("too_large", f"has more than {most} bytes", member=path)
        except RemoteError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return bytes(data)
    return None


@contextlib.contextmanager
def _os_errors_as_remote_errors(path: Path) -> Iterator[None]:
    """Convert `OSError` to `RemoteError`, because a failing store is not fatal."""
    try:
        with os_errors_as_cache_errors(path):
            yield
    except CacheError as error:
        raise RemoteError(str(error), path=path) from error


class FolderStore:
    """A local or mounted folder."""

    caveat = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = folder.as_uri()

    def get(self, path: str, start: int = 0) -> Iterator[bytes] | None:
        """See `Store`."""
        source = self._folder / path
        with _os_errors_as_remote_errors(source):
            try:
                file = source.open("rb") if source.is_file() else None  # opening a FIFO would wait for a writer
            except (FileNotFoundError, NotADirectoryError):
                file = None
        if file is None:
            return None

        def chunks() -> Iterator[bytes]:
            with _os_errors_as_remote_errors(source), file:
                file.seek(start)
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk

        return chunks()

    def put(self, path: str, body: bytes | Path, *, if_absent: bool = False) -> bool:
        """See `Store`."""
        target = self._folder / path
        data = body if isinstance(body, bytes) else body.read_bytes()
        if not if_absent:
            write_atomic(target, data)
            return True
        ensure_folder(target.parent)
        with temporary_file(target, data) as temporary:
            try:
                target.hardlink_to(temporary)
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
