"""A store behind HTTP: plain GET, and WebDAV for the rest (PUT, PROPFIND, DELETE, MKCOL). Must not import torch.

Credentials are those of the URL, else those that requests finds by itself (~/.netrc). A server that knows no PROPFIND
is listed by the links of the page that it shows for a folder, as nginx and Apache make one.
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
from cgtool.remote.stores import ATTEMPTS, BACKOFF_SECS, CHUNK_BYTES, CONNECT_SECS, SILENCE_SECS, Item, shown

#: Answers after which the same request may succeed.
_PASSING = (408, 429, 500, 502, 503, 504)
_OK, _PARTIAL, _MULTI = 200, 206, 207
_FORBIDDEN, _MISSING, _NO_METHOD, _CONFLICT, _EXISTS, _NO_RANGE = (401, 403), (404, 410), (405, 501), 409, 412, 416
_PROPFIND = (
    '<?xml version="1.0"?><propfind xmlns="DAV:"><prop><resourcetype/><getcontentlength/><getlastmodified/></prop>'
    "</propfind>"
)
_LINK = re.compile(r'<a\s[^<>]*?href="([^"?#]+)"', re.IGNORECASE)
_QUERY = re.compile(r"\?\S+")
#: The most that an answer may come to which is held in memory: hundreds of thousands of files in one folder.
_MOST_HELD_BYTES = 64 * 2**20
#: The folders of a store lie in one another less often.
_MOST_FOLDERS = 4
#: Larger numbers are of no file.
_MOST_DIGITS = 18


class _WithoutQueries(logging.Filter):
    """Cuts off the queries of URLs, which may hold tokens, from what urllib3 says of its attempts."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_QUERY.sub("?…", one) if isinstance(one, str) else one for one in record.args)
        return True


logging.getLogger("urllib3.connectionpool").addFilter(_WithoutQueries())


class _Retry(Retry):  # type: ignore[misc]  # Any, for extras are not looked into
    """Tries again over another connection: what an answer that failed still has to say may have no end."""

    def increment(self, *known: Any, response: Any = None, **more: Any) -> Any:
        """Return what is left of the attempts, as urllib3 asks before it reads the answer to its end."""
        left = super().increment(*known, response=response, **more)
        if response is not None:
            response.close()
        return left

    def get_retry_after(self, response: Any) -> float | None:
        """Return for how long a server asks to be left alone, as far as it says so in a form that means something."""
        try:
            wait: float | None = super().get_retry_after(response)
        except (HTTPError, ValueError, OverflowError):  # words, 5,000 digits, a date of the year 99999
            return None
        return wait


class _Adapter(HTTPAdapter):  # type: ignore[misc]  # as above
    """Waits for no answer for ever, and for a slow one long enough; holds none that has no end."""

    def get_connection_with_tls_context(self, *known: Any, **more: Any) -> Any:
        """Return a pool of connections whose answers are not endlessly slow."""
        pool = super().get_connection_with_tls_context(*known, **more)
        if "ConnectionCls" not in vars(pool):
            pool.ConnectionCls = paced(pool.ConnectionCls)
        return pool

    def send(self, request: Any, stream: bool = False, **more: Any) -> Any:
        """Send a request with limits of time and of memory, whoever made it.

        The limit for a connection is that for sending too, and a body in one piece must be gone by then: so it goes
        in many.

        Raises:
            requests.RequestException: The server fails, or says more than is held in memory.
        """
        if isinstance(request.body, bytes):
            request.body = io.BytesIO(request.body)
        more["timeout"] = more.get("timeout") or (CONNECT_SECS if request.body is None else SILENCE_SECS, SILENCE_SECS)
        try:
            answer = super().send(request, stream=True, **more)
        except HTTPError as error:  # a host of no name that can be; requests lets it pass
            raise requests.exceptions.InvalidURL(error, request=request) from error
        if answer.is_redirect:
            answer.close()  # its body says nothing
        elif not stream:
            held = bytearray()
            with contextlib.closing(answer):
                for chunk in answer.iter_content(CHUNK_BYTES):
                    held += chunk
                    if len(held) > _MOST_HELD_BYTES:
                        why = f"its answer has more than {_MOST_HELD_BYTES} bytes"
                        raise requests.RequestException(errno.EMSGSIZE, why, request=request)
            answer._content = bytes(held)  # noqa: SLF001 - where requests keeps what it has read
        return answer


def patient(session: requests.Session) -> requests.Session:
    """Let a session try again what may pass, with backoff and jitter, and give up in the end."""
    retry = _Retry(
        total=ATTEMPTS - 1,
        backoff_factor=BACKOFF_SECS,
        backoff_jitter=BACKOFF_SECS,
        status_forcelist=_PASSING,
        allowed_methods=None,  # whatever is asked twice does the same
        raise_on_status=False,
        retry_after_max=int(SILENCE_SECS),
    )
    for scheme in ("http://", "https://"):
        session.mount(scheme, _Adapter(max_retries=retry, pool_maxsize=16))
    return session


def _inner(error: BaseException) -> BaseException | None:
    """Return what an error of a client was made from; what was tried again is an argument only.

    An error of the system was made from nothing: beside it stands whatever the program was handling just then.
    """
    if isinstance(error, OSError) and not isinstance(error, requests.RequestException):
        return None
    found = (error.__cause__, error.__context__, *error.args)
    return next((one for one in found if isinstance(one, (OSError, HTTPError, HTTPException))), None)


class HttpStore:
    """See `cgtool.remote.stores.Store`; the URL of its folder may hold user and password, or a token in a query."""

    caveat = ""
    _login = "Check the user and password (in the URL, or in ~/.netrc), and what they may do there."
    _no_method = "It takes no files so: name a server with WebDAV, or a bucket (s3://, gs://, az://)."

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = shown(url)
        self._host = self.url[: len(self.url) - len(urlsplit(self.url).path)]
        self._query = parts.query and f"?{parts.query}"
        self._session = patient(requests.Session())
        self._session.headers["Accept-Encoding"] = "identity"
        if parts.username is not None:
            self._session.auth = unquote(parts.username), unquote(parts.password or "")

    def get(self, path: str, start: int = 0) -> Iterator[bytes] | None:
        """See `Store`."""
        answer = self._ask("GET", path, headers={"Range": f"bytes={start}-"} if start else {}, stream=True)
        if answer.status_code not in (_OK, _PARTIAL):
            with contextlib.closing(answer):  # it was not read
                if answer.status_code in _MISSING:
                    return None
                if answer.status_code == _NO_RANGE:
                    return iter(())
                raise self._refused(answer, f"read {path}")
        skipped = start if answer.status_code == _OK else 0  # a server may know no ranges
        return self._chunks(answer, path, skipped)

    def _chunks(self, answer: requests.Response, path: str, skipped: int) -> Iterator[bytes]:
        try:
            for chunk in answer.iter_content(CHUNK_BYTES):
                if skipped < len(chunk):
                    yield chunk[skipped:]
                skipped = max(0, skipped - len(chunk))
        except requests.RequestException as error:
            raise self._broken(error, f"read {path}") from error
        finally:
            answer.close()

    def put(self, path: str, body: bytes | Path, *, if_absent: bool = False) -> bool:
        """See `Store`."""
        headers = {"If-None-Match": "*"} if if_absent else {}
        answer = self._put(path, body, headers)
        if answer.status_code in (_CONFLICT, *_MISSING):  # WebDAV wants the folders made first
            top, *names = self._address(path).removeprefix(self._host).split("/")[:-1]
            for depth in range(len(names)):
                self._request("MKCOL", self._host + "/".join([top, *names[: depth + 1], ""]) + self._query)
            answer = self._put(path, body, headers)
        if if_absent and answer.status_code == _EXISTS:
            return False
        if not answer.ok:
            raise self._refused(answer, f"write {path}")
        return True

    def _put(self, path: str, body: bytes | Path, headers: dict[str, str]) -> requests.Response:
        if isinstance(body, bytes):
            return self._ask("PUT", path, data=body, headers=headers)
        with body.open("rb") as file:
            return self._ask("PUT", path, data=file, headers=headers)

    def size(self, path: str) -> int | None:
        """See `Store`."""
        answer = self._ask("HEAD", path)
        if answer.status_code in _MISSING:
            return None
        if not answer.ok:
            raise self._refused(answer, f"look for {path}")
        return _number(answer.headers.get("Content-Length"))

    def delete(self, path: str) -> None:
        """See `Store`."""
        answer = self._ask("DELETE", path)
        if not answer.ok and answer.status_code not in _MISSING:
            raise self._refused(answer, f"remove {path}")

    def list(self, folder: str) -> Iterator[Item]:
        """See `Store`."""
        answer = self._ask("PROPFIND", f"{folder}/", data=_PROPFIND, headers={"Depth": "1"})
        if answer.status_code in _MISSING:
            return
        if answer.status_code == _MULTI:
            children = list(self._properties(answer, folder))
        elif answer.status_code in (*_NO_METHOD, 400):
            children = list(self._links(folder))
        else:
            raise self._refused(answer, f"list {folder}")
        for item, is_folder in children:
            if not is_folder:
                yield item
            elif item.path.count("/") < _MOST_FOLDERS:
                yield from self.list(item.path)

    def _properties(self, answer: requests.Response, folder: str) -> Iterator[tuple[Item, bool]]:
        """What a server says of the files and folders in a folder."""
        try:
            found = ET.fromstring(answer.content)  # noqa: S314 - expat bounds what entities grow to
        except (ET.ParseError, ValueError, LookupError) as error:  # the latter two for encodings
            message = f"{self.url} could not list {folder}: its answer is no XML ({error}). Ask who runs it."
            raise RemoteError(message, path=self.url, actual=str(error)) from error
        for one in found.iterfind("{DAV:}response"):
            href = _path_of(one.findtext("{DAV:}href", "")).rstrip("/")
            name = href.rpartition("/")[2]
            if not href.endswith(f"/{folder}/{name}"):
                continue  # the folder itself
            size = _number(one.findtext(".//{DAV:}getcontentlength"))
            is_folder = one.find(".//{DAV:}collection") is not None
            modified = _time(one.findtext(".//{DAV:}getlastmodified"))
            yield Item(f"{folder}/{name}", size, modified), is_folder

    def _links(self, folder: str) -> Iterator[tuple[Item, bool]]:
        """The names on the page of a folder; their sizes and times are not asked for."""
        answer = self._ask("GET", f"{folder}/")
        if answer.status_code in _MISSING:
            return
        if not answer.ok or "html" not in answer.headers.get("Content-Type", ""):
            message = (
                f"{self.url} cannot be listed: it answers neither PROPFIND nor with a page of links. Name entries by "
                "their whole hash, or switch on WebDAV or an index of the folder at the server."
            )
            raise RemoteError(message, path=self.url, actual=answer.status_code)
        base = self._address(f"{folder}/")
        for link in _LINK.findall(answer.content.decode("utf-8", "replace")):
            try:
                place = unquote(urljoin(base, link))
            except ValueError:
                continue  # no URL
            name = place.removeprefix(unquote(base))
            if place.startswith(unquote(base)) and name.rstrip("/") and "/" not in name.rstrip("/"):
                yield Item(f"{folder}/{name.rstrip('/')}", 0, 0.0), name.endswith("/")

    def _address(self, path: str) -> str:
        return f"{self.url}/{quote(path)}"

    def _place(self, path: str) -> str:
        return self._address(path) + self._query

    def _ask(self, method: str, path: str, **more: Any) -> requests.Response:
        return self._request(method, self._place(path), **more)

    def _request(self, method: str, place: str, **more: Any) -> requests.Response:
        try:
            return self._session.request(
                method,
                place,
                allow_redirects=method in {"GET", "HEAD"},
                **more,
            )
        except (requests.RequestException, ValueError) as error:  # the latter for where it redirects to
            raise self._broken(error, f"answer {method}") from error

    def _broken(self, error: Exception, doing: str) -> RemoteError:
        cause: BaseException = error
        while (inner := _inner(cause)) is not None:
            cause = inner
        slow = "no answer in time" if isinstance(cause, TimeoutError) else type(cause).__name__
        why = getattr(cause, "strerror", None) or slow
        message = f"{self.url} could not {doing}: {why}. Check the URL, the network and the server, and try again."
        return RemoteError(message, path=self.url, actual=why, is_passing=True)

    def _refused(self, answer: requests.Response, doing: str) -> RemoteError:
        status, why = answer.status_code, f"it answers {answer.status_code} {answer.reason}"
        if status in _FORBIDDEN:
            advice = self._login
        elif status in _NO_METHOD:
            advice = self._no_method
        else:
            advice = "Try again later, or ask who runs it."
        message = f"{self.url} could not {doing}: {why}. {advice}"
        return RemoteError(message, path=self.url, actual=status, is_passing=status in _PASSING)


def _number(text: str | None) -> int:
    """Return a size that a server says; 0 where it is none."""
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    return int(text or 0) if is_number else 0


def _path_of(url: str) -> str:
    """Return the path of a URL; "" where it is none."""
    try:
        return unquote(urlsplit(url).path)
    except ValueError:
        return ""


def _time(text: str | None) -> float:
    try:
        return parsedate_to_datetime(text or "").timestamp()
    except ValueError:
        return 0.0
