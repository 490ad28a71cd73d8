"""Minimum transfer rate of responses, since a server that sends a byte per second is useless. Must not import torch.

Socket timeouts limit silence, so a single byte resets them. This measures throughput instead, like curl's
`--speed-limit` and `--speed-time`, and counts only time spent waiting for the server, not for a slow local disk.
"""

from __future__ import annotations

import errno
import functools
import io
import time
from http.client import HTTPResponse
from typing import Any

from cgtool.remote.stores import SILENCE_SECS

#: A response is aborted if it is slower than this, averaged over `WINDOW_SECS` of waiting.
MIN_BYTES_PER_SEC = 1000
WINDOW_SECS = SILENCE_SECS
#: Limit for receiving status and headers, which could otherwise continue forever (repeated "100 Continue").
HEAD_SECS = 2 * SILENCE_SECS


class Pace:
    """Measures the throughput of one response body."""

    def __init__(self) -> None:
        self._num_bytes, self._secs = 0, 0.0

    def add(self, num_bytes: int, secs: float) -> None:
        """Record bytes that were received after waiting for `secs`.

        Raises:
            TimeoutError: The throughput of the last window is too low.
        """
        self._num_bytes += num_bytes
        self._secs += secs
        if self._secs < WINDOW_SECS:
            return
        if self._num_bytes < MIN_BYTES_PER_SEC * self._secs:
            raise _too_slow(f"received {self._num_bytes} bytes in {self._secs:.0f} s")
        self._num_bytes, self._secs = 0, 0.0


def _too_slow(details: str) -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, f"it is too slow: {details}")


class _PacedFile(io.RawIOBase):
    """Reads from a socket, and raises TimeoutError if the server is too slow."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._pace = Pace()
        self._head_deadline: float | None = time.monotonic() + HEAD_SECS

    def readable(self) -> bool:
        return True

    def begin_body(self) -> None:
        self._head_deadline = None

    def readinto(self, buffer: Any) -> int | None:
        began = time.monotonic()
        if self._head_deadline is not None and began > self._head_deadline:
            raise _too_slow(f"headers incomplete after {HEAD_SECS:.0f} s")
        num_bytes: int | None = self._raw.readinto(buffer)
        if self._head_deadline is None:
            self._pace.add(num_bytes or 0, time.monotonic() - began)
        return num_bytes

    def close(self) -> None:
        self._raw.close()
        super().close()


class _PacedResponse(HTTPResponse):
    """A response with a minimum transfer rate, for any transfer encoding, with or without TLS."""

    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._paced = _PacedFile(self.fp.detach())
        self.fp = io.BufferedReader(self._paced)

    def begin(self) -> None:
        super().begin()
        self._paced.begin_body()


@functools.cache
def paced(connection: type) -> type:
    """Return a subclass of a connection class, including those for proxies, whose responses time out if too slow."""
    return type(f"Paced{connection.__name__}", (connection,), {"response_class": _PacedResponse})
