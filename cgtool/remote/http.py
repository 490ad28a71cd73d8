"""Stores on HTTP servers: plain GET, and WebDAV for the rest (PUT, PROPFIND, DELETE, MKCOL). Must not import torch.

Credentials are taken from the URL, or else found by requests itself (~/.netrc). For a server without PROPFIND, folders
are listed by the links on their index pages, as nginx and Apache generate them.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import re
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit
from xml.etree import ElementTree as ET

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from cgtool.errors import RemoteError
from cgtool.remote.pace import paced
from cgtool.remote.stores import ATTEMPTS, BACKOFF_SECS, CHUNK_BYTES, CONNECT_SECS, SILENCE_SECS, Item, redacted

#: Status codes after which the same request may succeed.
_PASSING = (408, 429, 500, 502, 503, 504)
_OK, _PARTIAL, _MULTI = 200, 206, 207
_FORBIDDEN, _MISSING, _NO_METHOD, _CONFLICT, _EXISTS, _NO_RANGE = (401, 403), (404, 410), (405, 501), 409, 412, 416
_PROPFIND = (
    '<?xml version="1.0"?><propfind xmlns="DAV:"><prop><resourcetype/><getcontentlength/><getlastmodified/></prop>'
    "</propfind>"
)
_LINK = re.compile(r'<a\s[^<>]*?href="([^"?#]+)"', re.IGNORECASE)
_QUERY = re.compile(r"\?\S+")
#: Maximum size of a response held in memory: a listing of hundreds of thousands of files.
_MAX_RESPONSE_BYTES = 64 * 2**20
#: Maximum depth of folders; those of a store are nested less deeply.
_MAX_DEPTH = 4
#: Longer numbers are not file sizes.
_MAX_DIGITS = 18


class _WithoutQueries(logging.Filter):
    """Removes the queries of URLs, which may contain tokens, from the log messages of urllib3."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_QUERY.sub("?…", arg) if isinstance(arg, str) else arg for arg in record.args)
        return True


logging.getLogger("urllib3.connectionpool").addFilter(_WithoutQueries())


class _Retry(Retry):  # type: ignore[misc]  # Any: extras are not type-checked
    """Retries over a new connection, because the rest of a failed response may be endless."""

    def increment(self, *args: Any, response: Any = None, **kwargs: Any) -> Any:
        """Close a failed response before urllib3 would read it to its end."""
        remaining = super().increment(*args, response=response, **kwargs)
        if response is not None:
            response.close()
        return remaining

    def get_retry_after(self, response: Any) -> float | None:
        """Return the seconds in a Retry-After header; None if it is missing or invalid."""
        try:
            seconds: float | None = super().get_retry_after(response)
        except (HTTPError, ValueError, OverflowError):  # words, 5,000 digits, a date in the year 99999
            return None
        return seconds


class _Adapter(HTTPAdapter):  # type: ignore[misc]  # as above
    """Limits the time and the memory that a response may take."""

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        """Return a pool of connections with a minimum transfer rate."""
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        if "ConnectionCls" not in vars(pool):
            pool.ConnectionCls = paced(pool.ConnectionCls)
        return pool

    def send(self, request: Any, stream: bool = False, **kwargs: Any) -> Any:
        """Send a request with limits on time and memory, even if the caller sets none.

        The connect timeout also limits sending, and a body passed as bytes must be sent within it. So bodies are sent
        in chunks.

        Raises:
            requests.RequestException: The server fails, or its response is too large for memory.
        """
        if isinstance(request.body, bytes):
            request.body = io.BytesIO(request.body)
        connect_secs = CONNECT_SECS if request.body is None else SILENCE_SECS
        kwargs["timeout"] = kwargs.get("timeout") or (connect_secs, SILENCE_SECS)
        try:
            response = super().send(request, stream=True, **kwargs)
        except HTTPError as error:  # an invalid host name, which requests does not catch
            raise requests.exceptions.InvalidURL(error, request=request) from error
        if response.is_redirect:
            response.close()  # its body is not needed
        elif not stream:
            body = bytearray()
            with contextlib.closing(response):
                for chunk in response.iter_content(CHUNK_BYTES):
                    body += chunk
                    if len(body) > _MAX_RESPONSE_BYTES:
                        why = f"its response has more than {_MAX_RESPONSE_BYTES} bytes"
                        raise requests.RequestException(errno.EMSGSIZE, why, request=request)
            response._content = bytes(body)  # noqa: SLF001 - where requests keeps the body
        return response


def with_retries(session: requests.Session) -> requests.Session:
    """Make a session retry transient errors, with backoff and jitter."""
    retry = _Retry(
        total=ATTEMPTS - 1,
        backoff_factor=BACKOFF_SECS,
        backoff_jitter=BACKOFF_SECS,
        status_forcelist=_PASSING,
        allowed_methods=None,  # all requests are idempotent
        raise_on_status=False,
        retry_after_max=int(SILENCE_SECS),
    )
    for scheme in ("http://", "https://"):
        session.mount(scheme, _Adapter(max_retries=retry, pool_maxsize=16))
    return session


def _inner(error: BaseException) -> BaseException | None:
    """Return the error that an HTTP client's error wraps, as its cause or argument.

    Its context may be an unrelated exception that the program was handling at the time.
    """
    candidates = (error.__cause__, *error.args)
    return next((inner for inner in candidates if isinstance(inner, (OSError, HTTPError, HTTPException))), None)


class HttpStore:
    """A folder on a server; see `Store`. Its URL may contain user and password, or a token in the query."""

    caveat = ""
    _login_advice = "Check the user and password (in the URL, or in ~/.netrc) and their permissions."
    _method_advice = "It does not accept files. Use a server with WebDAV, or a bucket (s3://, gs://, az://)."

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = redacted(url)
        self._host = self.url[: len(self.url) - len(urlsplit(self.url).path)]
        self._query = parts.query and f"?{parts.query}"
        self._session = with_retries(requests.Session())
        self._session.headers["Accept-Encoding"] = "identity"
        if parts.username is not None:
            self._session.auth = unquote(parts.username), unquote(parts.password or "")

    def get(self, path: str, start: int = 0) -> Iterator[bytes] | None:
        """See `Store`."""
        response = self._send("GET", path, headers={"Range": f"bytes={start}-"} if start else {}, stream=True)
        if response.status_code not in (_OK, _PARTIAL):
            with contextlib.closing(response):  # its body was not read
                if response.status_code in _MISSING:
                    return None
                if response.status_code == _NO_RANGE:
                    return iter(())
                raise self._status_error(response, f"read {path}")
        to_skip = start if response.status_code == _OK else 0  # the server may not support ranges
        return self._chunks(response, path, to_skip)

    def _chunks(self, response: requests.Response, path: str, to_skip: int) -> Iterator[bytes]:
        try:
            for chunk in response.iter_content(CHUNK_BYTES):
                if to_skip < len(chunk):
                    yield chunk[to_skip:]
                to_skip = max(0, to_skip - len(chunk))
        except requests.RequestException as error:
            raise self._connection_error(error, f"read {path}") from error
        finally:
            response.close()

    def put(self, path: str, body: bytes | Path, *, if_absent: bool = False) -> bool:
        """See `Store`."""
        headers = {"If-None-Match": "*"} if if_absent else {}
        response = self._put(path, body, headers)
        if response.status_code in (_CONFLICT, *_MISSING):  # WebDAV requires the folders to exist
            top, *names = self._file_url(path).removeprefix(self._host).split("/")[:-1]
            for depth in range(len(names)):
                self._request("MKCOL", self._host + "/".join([top, *names[: depth + 1], ""]) + self._query)
            response = self._put(path, body, headers)
        if if_absent and response.status_code == _EXISTS:
            return False
        if not response.ok:
            raise self._status_error(response, f"write {path}")
        return True

    def _put(self, path: str, body: bytes | Path, headers: dict[str, str]) -> requests.Response:
        if isinstance(body, bytes):
            return self._send("PUT", path, data=body, headers=headers)
        with body.open("rb") as file:
            return self._send("PUT", path, data=file, headers=headers)

    def size(self, path: str) -> int | None:
        """See `Store`."""
        response = self._send("HEAD", path)
        if response.status_code in _MISSING:
            return None
        if not response.ok:
            raise self._status_error(response, f"look for {path}")
        return _parse_size(response.headers.get("Content-Length"))

    def delete(self, path: str) -> None:
        """See `Store`."""
        response = self._send("DELETE", path)
        if not response.ok and response.status_code not in _MISSING:
            raise self._status_error(response, f"remove {path}")

    def list(self, folder: str) -> Iterator[Item]:
        """See `Store`."""
        response = self._send("PROPFIND", f"{folder}/", data=_PROPFIND, headers={"Depth": "1"})
        if response.status_code in _MISSING:
            return
        if response.status_code == _MULTI:
            children = list(self._parse_propfind(response, folder))
        elif response.status_code in (*_NO_METHOD, 400):
            children = list(self._list_links(folder))
        else:
            raise self._status_error(response, f"list {folder}")
        for item, is_folder in children:
            if not is_folder:
                yield item
            elif item.path.count("/") < _MAX_DEPTH:
                yield from self.list(item.path)

    def _parse_propfind(self, response: requests.Response, folder: str) -> Iterator[tuple[Item, bool]]:
        """Yield each child of a folder, and whether it is a folder itself."""
        try:
            root = ET.fromstring(response.content)  # noqa: S314 - expat limits the expansion of entities
        except (ET.ParseError, ValueError, LookupError) as error:  # the latter two for encodings
            message = f"{self.url} could not list {folder}: its response is not XML ({error}). Contact its operator."
            raise RemoteError(message, path=self.url, actual=str(error)) from error
        for element in root.iterfind("{DAV:}response"):
            href = _url_path(element.findtext("{DAV:}href", "")).rstrip("/")
            name = href.rpartition("/")[2]
            if not href.endswith(f"/{folder}/{name}"):
                continue  # the folder itself
            size = _parse_size(element.findtext(".//{DAV:}getcontentlength"))
            is_folder = element.find(".//{DAV:}collection") is not None
            modified = _parse_time(element.findtext(".//{DAV:}getlastmodified"))
            yield Item(f"{folder}/{name}", size, modified), is_folder

    def _list_links(self, folder: str) -> Iterator[tuple[Item, bool]]:
        """Yield each child linked on a folder's index page, without size and time, and whether it is a folder."""
        response = self._send("GET", f"{folder}/")
        if response.status_code in _MISSING:
            return
        if not response.ok or "html" not in response.headers.get("Content-Type", ""):
            message = (
                f"{self.url} cannot be listed: it supports neither PROPFIND nor index pages. Name entries by their "
                "whole hash, or enable WebDAV or index pages on the server."
            )
            raise RemoteError(message, path=self.url, actual=response.status_code)
        base = self._file_url(f"{folder}/")
        for link in _LINK.findall(response.content.decode("utf-8", "replace")):
            try:
                target = unquote(urljoin(base, link))
            except ValueError:
                continue  # not a URL
            name = target.removeprefix(unquote(base))
            if target.startswith(unquote(base)) and name.rstrip("/") and "/" not in name.rstrip("/"):
                yield Item(f"{folder}/{name.rstrip('/')}", 0, 0.0), name.endswith("/")

    def _file_url(self, path: str) -> str:
        return f"{self.url}/{quote(path)}"

    def _request_url(self, path: str) -> str:
        return self._file_url(path) + self._query

    def _send(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        return self._request(method, self._request_url(path), **kwargs)

    def _request(self, method: str, url: str, **kwargs: Any) -> requests.Response:
        try:
            return self._session.request(method, url, allow_redirects=method in {"GET", "HEAD"}, **kwargs)
        except (requests.RequestException, ValueError) as error:  # the latter for invalid redirects
            raise self._connection_error(error, f"answer {method}") from error

    def _connection_error(self, error: Exception, action: str) -> RemoteError:
        cause: BaseException = error
        while (inner := _inner(cause)) is not None:
            cause = inner
        fallback = "no answer in time" if isinstance(cause, TimeoutError) else type(cause).__name__
        why = getattr(cause, "strerror", None) or fallback
        message = f"{self.url} could not {action}: {why}. Check the URL, the network and the server, and try again."
        return RemoteError(message, path=self.url, actual=why, is_passing=True)

    def _status_error(self, response: requests.Response, action: str) -> RemoteError:
        status = response.status_code
        if status in _FORBIDDEN:
            advice = self._login_advice
        elif status in _NO_METHOD:
            advice = self._method_advice
        else:
            advice = "Try again later, or contact its operator."
        message = f"{self.url} could not {action}: it returned {status} {response.reason}. {advice}"
        return RemoteError(message, path=self.url, actual=status, is_passing=status in _PASSING)


def _parse_size(text: str | None) -> int:
    """Return the size in a response; 0 if it is missing or invalid."""
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    return int(text or 0) if is_number else 0


def _url_path(url: str) -> str:
    """Return the path of a URL; "" if it is invalid."""
    try:
        return unquote(urlsplit(url).path)
    except ValueError:
        return ""


def _parse_time(text: str | None) -> float:
    try:
        return parsedate_to_datetime(text or "").timestamp()
    except ValueError:
        return 0.0
