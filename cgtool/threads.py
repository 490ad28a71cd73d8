"""Waiting for threads so that Ctrl-C and SIGTERM end the wait at once. The standard library alone.

A `ThreadPool` has daemon threads; those of a `concurrent.futures` executor are joined as Python ends, however long a
network keeps them.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import TypeVar

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")

#: Whether other threads call the model that this one warms, so that warming must not change it.
beside_calls: ContextVar[bool] = ContextVar("beside_calls", default=False)

#: A signal that comes as a wait begins is heard when the wait ends.
_HEARING_SECS = 0.2


def outcome(result: AsyncResult[_Found], secs: float = math.inf) -> _Found:
    """Wait for a call's result and return it, or raise what the call raised; TimeoutError after so many seconds."""
    until = time.monotonic() + secs
    while not result.ready():
        if time.monotonic() > until:
            raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
        result.wait(_HEARING_SECS)
    return result.get()


def in_parallel(pool: ThreadPool, run: Callable[[_Given], _Found], values: Iterable[_Given]) -> Iterator[_Found]:
    """Call a function with each value, several at a time; yield what it returns, in order."""
    for result in [pool.apply_async(run, (value,)) for value in values]:
        yield outcome(result)
