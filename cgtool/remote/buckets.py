"""Stores in buckets (S3, Google Cloud Storage, Azure), using obstore. Must not import torch.

obstore finds credentials, region and endpoint itself: from the environment variables of the cloud's own tools, the
files that they name, and the role of the machine. AWS profiles (`~/.aws/credentials`) are read by boto3.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import from_url

from cgtool.errors import RemoteError, UsageError
from cgtool.host import variables_now
from cgtool.remote.pace import Pace
from cgtool.remote.stores import ATTEMPTS, BACKOFF_SECS, CHUNK_BYTES, CONNECT_SECS, SILENCE_SECS, Item, redacted
from cgtool.threads import outcome

_MAX_ERROR_CHARACTERS = 300
#: Packets of a body are collected for this long, so that the silence limit applies to single packets.
_COLLECT_SECS = 1.0
_DENIALS = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)
#: obstore has no specific exception for a denied listing.
_DENIED = re.compile(r"status code: 40[13]\b")
#: The error codes of S3 and Azure for a wrong clock.
_SKEWED = re.compile("RequestTimeTooSkewed|RequestExpired|[Dd]ate header too old")
_ERROR_RESPONSE = re.compile(r"<Code>([^<]+)</Code>.*?<Message>([^<]+)", re.DOTALL)


class BucketStore:
    """A bucket; see `cgtool.remote.stores.Store`. For az://CONTAINER, AZURE_STORAGE_ACCOUNT_NAME names the account."""

    caveat = ""

    def __init__(self, url: str) -> None:
        self.url = redacted(url)
        if "@" in urlsplit(url).netloc:
            message = f"{self.url} cannot have credentials in its URL. Set the variables of the cloud's own tools."
            raise UsageError(message, path=self.url)
        try:
            self._store: Any = from_url(
                self.url,
                **_profile(self.url),
                retry_config={
                    "max_retries": ATTEMPTS - 1,
                    "retry_timeout": timedelta(minutes=2),
                    "backoff": {
                        "init_backoff": timedelta(seconds=BACKOFF_SECS),
                        "max_backoff": timedelta(seconds=SILENCE_SECS),
                        "base": 2,
                    },
                },
                client_options={
                    "allow_http": True,  # only for a custom endpoint from the environment; the default ones use https
                    "connect_timeout": timedelta(seconds=CONNECT_SECS),
                    "timeout": timedelta(minutes=10),  # for a whole file
                },
            )
        except exceptions.BaseError as error:
            message = f"{self.url} cannot be opened: {_describe(error)}. Check the URL and its environment variables."
            raise UsageError(message, path=self.url) from error

    def get(self, path: str, start: int = 0) -> Iterator[bytes] | None:
        """See `Store`."""
        options = {"range": {"offset": start}} if start else None
        with self._remote_errors(f"read {path}"):
            try:
                result = _interruptible(obstore.get, self._store, path, options=options, secs=SILENCE_SECS)
            except FileNotFoundError:
                return None
        return self._chunks(result, path)

    def _chunks(self, result: Any, path: str) -> Iterator[bytes]:
        with self._remote_errors(f"read {path}"):
            packets, pace = result.stream(min_chunk_size=1), Pace()
            while chunk := _interruptible(_collect, packets, pace, secs=SILENCE_SECS):
                yield chunk

    def put(self, path: str, body: bytes | Path, *, if_absent: bool = False) -> bool:
        """See `Store`."""
        with self._remote_errors(f"write {path}"):
            try:
                if if_absent:
                    # A store without conditional writes replaces an existing file.
                    with contextlib.suppress(exceptions.NotSupportedError, NotImplementedError):
                        _interruptible(obstore.put, self._store, path, body, mode="create", use_multipart=False)
                        return True
                _interruptible(obstore.put, self._store, path, body)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileExistsError):
                return False
        return True

    def size(self, path: str) -> int | None:
        """See `Store`."""
        with self._remote_errors(f"look for {path}"):
            try:
                return int(_interruptible(obstore.head, self._store, path, secs=SILENCE_SECS)["size"])
            except FileNotFoundError:
                return None

    def list(self, folder: str) -> Iterator[Item]:
        """See `Store`."""
        with self._remote_errors(f"list {folder}"):
            pages = obstore.list(self._store, folder)
            while (page := _interruptible(next, pages, None, secs=SILENCE_SECS)) is not None:
                for item in page:
                    yield Item(item["path"], item["size"], item["last_modified"].timestamp())

    def delete(self, path: str) -> None:
        """See `Store`."""
        with self._remote_errors(f"remove {path}"), contextlib.suppress(FileNotFoundError):
            _interruptible(obstore.delete, self._store, path, secs=SILENCE_SECS)

    @contextlib.contextmanager
    def _remote_errors(self, action: str) -> Iterator[None]:
        """Convert errors in the block to a RemoteError, which says that the store could not perform `action`."""
        try:
            yield
        except (exceptions.BaseError, OSError) as error:
            denied = isinstance(error, _DENIALS) or _DENIED.search(str(error)) is not None
            if _SKEWED.search(str(error)):
                advice = "This machine's clock differs too much from the store's: set it, and try again."
            elif denied:
                advice = "Check the credentials of the cloud's tools, their permissions, and this machine's clock."
            else:
                advice = "Check the URL, the region, the network and the credentials, and try again."
            message = f"{self.url} could not {action}: {_describe(error)}. {advice}"
            raise RemoteError(message, path=self.url, is_passing=not denied) from error


def _profile(url: str) -> dict[str, Any]:
    """Return the options that open a bucket with an AWS profile, which obstore does not read by itself."""
    variables = variables_now(("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE"))
    if not url.startswith("s3:") or variables["AWS_ACCESS_KEY_ID"]:
        return {}
    with contextlib.suppress(RuntimeError):  # the user has no home folder
        file = Path(variables["AWS_SHARED_CREDENTIALS_FILE"] or "~/.aws/credentials").expanduser()
        if not variables["AWS_PROFILE"] and not file.is_file():
            return {}
    try:
        from boto3.exceptions import Boto3Error  # imported lazily: an extra that only profiles need
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError as error:
        message = f"{url} needs an AWS profile, but {error.name} is not installed. Install it: pip install boto3"
        raise UsageError(message, path=url) from error
    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except (Boto3Error, BotoCoreError, ValueError) as error:
        message = f"{url} cannot be opened: {error}. Check AWS_PROFILE and the files in ~/.aws."
        raise UsageError(message, path=url) from error


def _interruptible(call: Callable[..., Any], *arguments: Any, secs: float = math.inf, **options: Any) -> Any:
    """Make a call in a thread, so that Ctrl-C and a timeout end the wait; obstore's Rust code handles neither."""
    if math.isinf(secs) and threading.current_thread() is not threading.main_thread():
        return call(*arguments, **options)
    with ThreadPool(1) as pool:
        return outcome(pool.apply_async(call, arguments, options), secs)


def _collect(packets: Iterator[Any], pace: Pace) -> bytes:
    """Return the next bytes of a body, up to `CHUNK_BYTES` or `_COLLECT_SECS`; b"" at its end."""
    data = bytearray()
    now = began = time.monotonic()
    while len(data) < CHUNK_BYTES and now < began + _COLLECT_SECS:
        packet = next(packets, None)
        if packet is None:
            break
        data += packet
        before, now = now, time.monotonic()
        pace.add(len(packet), now - before)
    return bytes(data)


def _describe(error: Exception) -> str:
    """Return the error message in a store's response, else the first line of an error, without queries of URLs."""
    if isinstance(error, TimeoutError):
        return str(error.strerror)
    text = str(error).partition("\n\nDebug source")[0].strip() or type(error).__name__
    if (response := _ERROR_RESPONSE.search(text)) is not None:
        text = ": ".join(response.groups())
    # A query may contain a signature.
    return re.sub(r"\?\S+", "?…", text.splitlines()[0])[:_MAX_ERROR_CHARACTERS].rstrip(". ")
