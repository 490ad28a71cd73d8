"""A store in a bucket: S3, Google Cloud Storage or Azure, by obstore. Must not import torch.

Credentials, regions and endpoints are what obstore finds by itself: variables of the cloud's own tools, files that they
name, and the role of the machine. Profiles of AWS (`~/.aws/credentials`) are read by boto3.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import from_url

from cgtool.errors import RemoteError, UsageError
from cgtool.host import variables_now
from cgtool.remote.stores import ATTEMPTS, BACKOFF_SECS, CHUNK_BYTES, CONNECT_SECS, SILENCE_SECS, Item, shown
from cgtool.threads import outcome

_MOST_SAID = 300
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
        try:
            found = _heard(obstore.get, self._store, path, options=options)
        except FileNotFoundError:
            return None
        except (exceptions.BaseError, OSError) as error:
            self._fail(error, f"read {path}")
        return self._chunks(found, path)

    def _chunks(self, found: Any, path: str) -> Iterator[bytes]:
        try:
            chunks = found.stream(min_chunk_size=CHUNK_BYTES)
            while (chunk := _heard(next, chunks, None)) is not None:
                yield bytes(chunk)
        except (exceptions.BaseError, OSError) as error:
            self._fail(error, f"read {path}")

    def put(self, path: str, body: bytes | Path, *, if_absent: bool = False) -> bool:
        """See `Store`."""
        try:
            if if_absent:
                with contextlib.suppress(exceptions.NotSupportedError, NotImplementedError):
                    _heard(obstore.put, self._store, path, body, mode="create", use_multipart=False)
                    return True
            _heard(obstore.put, self._store, path, body)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileExistsError):
            return False
        except (exceptions.BaseError, OSError) as error:
            self._fail(error, f"write {path}")
        return True

    def size(self, path: str) -> int | None:
        """See `Store`."""
        try:
            return int(_heard(obstore.head, self._store, path)["size"])
        except FileNotFoundError:
            return None
        except (exceptions.BaseError, OSError) as error:
            self._fail(error, f"look for {path}")

    def list(self, folder: str) -> Iterator[Item]:
        """See `Store`."""
        try:
            found = obstore.list(self._store, folder)
            while (some := _heard(next, found, None)) is not None:
                for one in some:
                    yield Item(one["path"], one["size"], one["last_modified"].timestamp())
        except (exceptions.BaseError, OSError) as error:
            self._fail(error, f"list {folder}")

    def delete(self, path: str) -> None:
        """See `Store`."""
        try:
            _heard(obstore.delete, self._store, path)
        except FileNotFoundError:
            pass
        except (exceptions.BaseError, OSError) as error:
            self._fail(error, f"remove {path}")

    def _fail(self, error: Exception, doing: str) -> NoReturn:
        denied = isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError))
        denied = denied or _DENIED.search(str(error)) is not None
        if _SKEWED.search(str(error)):
            advice = "This machine's clock differs too much from the store's: set it, and try again."
        elif denied:
            advice = "Check the credentials that the cloud's tools use, their rights, and this machine's clock."
        else:
            advice = "Check the URL, the region, the network and the credentials, and try again."
        message = f"{self.url} could not {doing}: {_said(error)}. {advice}"
        raise RemoteError(message, path=self.url, is_passing=not denied) from error


def _profile(url: str) -> dict[str, Any]:
    """What opens a bucket with a profile of AWS' own files, which boto3 reads and obstore does not."""
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


def _heard(ask: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Ask in a way that Ctrl-C ends: Rust hears no signal, and the main thread does while another one asks."""
    if threading.current_thread() is not threading.main_thread():
        return ask(*arguments, **options)
    with ThreadPool(1) as pool:
        return outcome(pool.apply_async(ask, arguments, options))


def _said(error: Exception) -> str:
    """The first line of an error, or what the store itself says, without the queries of URLs, which may be signed."""
    text = str(error).partition("\n\nDebug source")[0].strip() or type(error).__name__
    if (answered := _ANSWERED.search(text)) is not None:
        text = ": ".join(answered.groups())
    return re.sub(r"\?\S+", "?…", text.splitlines()[0])[:_MOST_SAID].rstrip(". ")
