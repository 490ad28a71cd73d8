"""The least speed of an answer: a server that sends a byte a second is as good as down. Must not import torch.

Limits of a socket are limits of silence, which each byte ends. So what comes is added up, as curl's `--speed-limit` and
`--speed-time` do, and only while it is waited for: a slow disk on this side does not count.
"""

from __future__ import annotations

import errno
import functools
import io
import time
from http.client import HTTPResponse
from typing import Any

from cgtool.remote.stores import SILENCE_SECS

#: What an answer brings in `WINDOW_SECS` of waiting is at least so much, or it is given up.
LEAST_BYTES_A_SEC = 1000
WINDOW_SECS = SILENCE_SECS
#: Status and headers are there after so long, however many of them come ("100 Continue" may do so without end).
HEAD_SECS = 2 * SILENCE_SECS


class Pace:
    """Adds up the bytes of one body and the seconds that were waited for them."""

    def __init__(self) -> None:
        self._num_bytes, self._secs = 0, 0.0

    def heard(self, num_bytes: int, secs: float) -> None:
        """Take note of bytes that came after so many seconds.

        Raises:
            TimeoutError: Too few came since the last look.
        """
        self._num_bytes += num_bytes
        self._secs += secs
        if self._secs < WINDOW_SECS:
            return
        if self._num_bytes < LEAST_BYTES_A_SEC * self._secs:
            raise too_slow(f"{self._num_bytes} bytes of its answer came in {self._secs:.0f} s")
        self._num_bytes, self._secs = 0, 0.0


def too_slow(what: str) -> TimeoutError:
    """Return the error of a server that sends, and too little."""
    return TimeoutError(errno.ETIMEDOUT, f"it is too slow: {what}")


class _PacedFile(io.RawIOBase):
    """What a socket receives, as long as it comes quickly enough."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._pace = Pace()
        self._head_until: float | None = time.monotonic() + HEAD_SECS

    def readable(self) -> bool:
        return True

    def body_begins(self) -> None:
        self._head_until = None

    def readinto(self, buffer: Any) -> int | None:
        began = time.monotonic()
        if self._head_until is not None and began > self._head_until:
            raise too_slow(f"the headers of its answer have no end after {HEAD_SECS:.0f} s")
        num_bytes: int | None = self._raw.readinto(buffer)
        if self._head_until is None:
            self._pace.heard(num_bytes or 0, time.monotonic() - began)
        return num_bytes

    def close(self) -> None:
        self._raw.close()
        super().close()


class _PacedAnswer(HTTPResponse):
    """An answer of which head and body come quickly enough, whatever the transfer coding and with TLS or without."""

    def __init__(self, sock: Any, *known: Any, **more: Any) -> None:
        super().__init__(sock, *known, **more)
        self._paced = _PacedFile(self.fp.detach())
        self.fp = io.BufferedReader(self._paced)

    def begin(self) -> None:
        super().begin()
        self._paced.body_begins()


@functools.cache
def paced(connection: type) -> type:
    """Return a class of connections, those to proxies too, whose answers come quickly enough or end with a timeout."""
    return type(f"Paced{connection.__name__}", (connection,), {"response_class": _PacedAnswer})
