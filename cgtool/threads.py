"""Locks that are safe with forks and signals, and waits for threads that Ctrl-C and SIGTERM interrupt at once.

Imports little, and the standard library only: every process that loads a model imports this module. It waits for a
`ThreadPool`, whose threads are daemons; Python joins those of a `concurrent.futures` executor when it exits, however
long the network keeps them.
"""

from __future__ import annotations

import errno
import math
import os
import time
import weakref
from _thread import RLock  # `threading.RLock` is a function
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from multiprocessing.pool import AsyncResult, ThreadPool

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

#: Whether other threads call the model that this thread warms, so that warming must not change it.
beside_calls: ContextVar[bool] = ContextVar("beside_calls", default=False)

#: A signal that arrives just before a wait is handled only when the wait ends.
_WAIT_SECS = 0.2


class ForkedLock(RLock):  # type: ignore[misc]  # final in its stub only
    """A reentrant lock that is free in a forked child, which does not have the thread that held it.

    `__enter__` and `__exit__` are those of C, so that no signal handler runs between taking the lock and entering the
    block. If it raised there, the lock would never be released.
    """

    def __init__(self) -> None:
        _locks.add(self)

    def __reduce__(self) -> tuple[type[ForkedLock], tuple[()]]:
        return ForkedLock, ()  # a copy is unlocked


_locks: weakref.WeakSet[ForkedLock] = weakref.WeakSet()


def _reset_locks() -> None:
    for lock in _locks:
        if not lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - as in `threading.Condition`
            lock._at_fork_reinit()  # type: ignore[attr-defined]  # noqa: SLF001 - as in `threading`


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_locks)


def outcome(result: AsyncResult[_Result], secs: float = math.inf) -> _Result:
    """Wait for a call and return its result, or raise its exception; TimeoutError after `secs` seconds."""
    until = time.monotonic() + secs
    while not result.ready():
        if time.monotonic() > until:
            raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
        result.wait(_WAIT_SECS)
    return result.get()


def in_parallel(
    pool: ThreadPool, run: Callable[[_Argument], _Result], values: Iterable[_Argument]
) -> Iterator[_Result]:
    """Call a function with each value in the pool, and yield the results in order."""
    for result in [pool.apply_async(run, (value,)) for value in values]:
        yield outcome(result)
