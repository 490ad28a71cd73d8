"""A store in a bucket: S3, Google Cloud Storage or Azure, by obstore. Must not import torch.

Credentials, regions and endpoints are what obstore finds by itself: variables of the cloud's own tools, files that they
name, and the role of the machine. Profiles of AWS (`~/.aws/credentials`) are read by boto3.
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
from cgtool.remote.stores import ATTEMPTS, BACKOFF_SECS, CHUNK_BYTES, CONNECT_SECS, SILENCE_SECS, Item, shown
from cgtool.threads import outcome

_MOST_SAID = 300
#: What comes of a body in so long is handed on, so that a wait for it is a wait for one packet.
_GATHERED_SECS = 1.0
_DENIALS = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)
#: A listing that is denied is any error to obstore.
_DENIED = re.compile(r"status code: 40[13]\b")
#: As S3 says it, and Azure.
_SKEWED = re.compile("RequestTimeTooSkewed|RequestExpired|[Dd]ate header too old")
_ANSWERED = re.compile(r"<Code>([^<]+)</Code>.*?<Message>([^<]+)", re.DOTALL)


class BucketStore:
    """See `cgtool.remote.stores.Store`; the account of az://CONTAINER is what AZURE_STORAGE_ACCOUNT_NAME names."""

    caveat = ""

    def __init__(self, url: str) -> None:
        self.url = shown(url)
        if "@" in urlsplit(url).netloc:
            message = f"{self.url} takes no user and password in its URL. Set the variables of the cloud's own tools."
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
                    "allow_http": True,  # of an endpoint that the user's own variables name; else all are https
                    "connect_timeout": timedelta(seconds=CONNECT_SECS),
                    "timeout": timedelta(minutes=10),  # of a whole file
                },
            )
        except exceptions.BaseError as error:
            message = f"{self.url} cannot be opened: {_said(error)}. Check the URL and the variables that configure it."
            raise UsageError(message, path=self.url) from error

    def get(self, path: str, start: int = 0) -> Iterator[bytes] | None:
        """See `Store`."""
        options = {"range": {"offset": start}} if start else None
        with self._asked_to(f"read {path}"):
            try:
                found = _heard(obstore.get, self._store, path, options=options, secs=SILENCE_SECS)
            except FileNotFoundError:
                return None
        return self._chunks(found, path)

    def _chunks(self, found: Any, path: str) -> Iterator[bytes]:
        with self._asked_to(f"read {path}"):
            packets, pace = found.stream(min_chunk_size=1), Pace()
            while chunk := _heard(_chunk, packets, pace, secs=SILENCE_SECS):
                yield chunk

    def put(self, path: str, body: bytes | Path, *, if_absent: bool = False) -> bool:
        """See `Store`."""
        with self._asked_to(f"write {path}"):
            try:
                if if_absent:
                    # a store that does not know whether there is one replaces it
                    with contextlib.suppress(exceptions.NotSupportedError, NotImplementedError):
                        _heard(obstore.put, self._store, path, body, mode="create", use_multipart=False)
                        return True
                _heard(obstore.put, self._store, path, body)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileExistsError):
                return False
        return True

    def size(self, path: str) -> int | None:
        """See `Store`."""
        with self._asked_to(f"look for {path}"):
            try:
                return int(_heard(obstore.head, self._store, path, secs=SILENCE_SECS)["size"])
            except FileNotFoundError:
                return None

    def list(self, folder: str) -> Iterator[Item]:
        """See `Store`."""
        with self._asked_to(f"list {folder}"):
            found = obstore.list(self._store, folder)
            while (some := _heard(next, found, None, secs=SILENCE_SECS)) is not None:
                for one in some:
                    yield Item(one["path"], one["size"], one["last_modified"].timestamp())

    def delete(self, path: str) -> None:
        """See `Store`."""
        with self._asked_to(f"remove {path}"), contextlib.suppress(FileNotFoundError):
            _heard(obstore.delete, self._store, path, secs=SILENCE_SECS)

    @contextlib.contextmanager
    def _asked_to(self, do: str) -> Iterator[None]:
        """Raise a RemoteError where the store cannot do what the block asks of it."""
        try:
            yield
        except (exceptions.BaseError, OSError) as error:
            denied = isinstance(error, _DENIALS) or _DENIED.search(str(error)) is not None
            if _SKEWED.search(str(error)):
                advice = "This machine's clock differs too much from the store's: set it, and try again."
            elif denied:
                advice = "Check the credentials that the cloud's tools use, their rights, and this machine's clock."
            else:
                advice = "Check the URL, the region, the network and the credentials, and try again."
            message = f"{self.url} could not {do}: {_said(error)}. {advice}"
            raise RemoteError(message, path=self.url, is_passing=not denied) from error


def _profile(url: str) -> dict[str, Any]:
    """Return the options that open a bucket with a profile of AWS: boto3 reads its files, obstore does not."""
    said = variables_now(("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE"))
    if not url.startswith("s3:") or said["AWS_ACCESS_KEY_ID"]:
        return {}
    with contextlib.suppress(RuntimeError):  # a user without a home
        file = Path(said["AWS_SHARED_CREDENTIALS_FILE"] or "~/.aws/credentials").expanduser()
        if not said["AWS_PROFILE"] and not file.is_file():
            return {}
    try:
        from boto3.exceptions import Boto3Error  # an extra that only profiles need
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError as error:
        message = f"A profile of AWS opens {url}, and {error.name} is not installed. Install it: pip install boto3"
        raise UsageError(message, path=url) from error
    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except (Boto3Error, BotoCoreError, ValueError) as error:
        message = f"{url} cannot be opened: {error}. Check AWS_PROFILE and the files in ~/.aws."
        raise UsageError(message, path=url) from error


def _heard(ask: Callable[..., Any], *arguments: Any, secs: float = math.inf, **options: Any) -> Any:
    """Ask from a thread, so that Ctrl-C and a limit of time end the wait: Rust hears no signal, and waits on."""
    if math.isinf(secs) and threading.current_thread() is not threading.main_thread():
        return ask(*arguments, **options)
    with ThreadPool(1) as pool:
        return outcome(pool.apply_async(ask, arguments, options), secs)


def _chunk(packets: Iterator[Any], pace: Pace) -> bytes:
    """Return what comes next of a body, in a second or up to `CHUNK_BYTES`; nothing at its end."""
    found = bytearray()
    now = began = time.monotonic()
    while len(found) < CHUNK_BYTES and now < began + _GATHERED_SECS:
        packet = next(packets, None)
        if packet is None:
            break
        found += packet
        before, now = now, time.monotonic()
        pace.heard(len(packet), now - before)
    return bytes(found)


def _said(error: Exception) -> str:
    """Return the store's own words, else an error's first line; queries of URLs, which may be signed, are cut off."""
    if isinstance(error, TimeoutError):
        return str(error.strerror)
    text = str(error).partition("\n\nDebug source")[0].strip() or type(error).__name__
    if (answered := _ANSWERED.search(text)) is not None:
        text = ": ".join(answered.groups())
    return re.sub(r"\?\S+", "?…", text.splitlines()[0])[:_MOST_SAID].rstrip(". ")
