"""Locks that a fork and a signal leave right, and waits for threads that Ctrl-C and SIGTERM end at once.

The standard library alone, and little of it: a process that only loads imports this. A `ThreadPool` has daemon threads;
those of a `concurrent.futures` executor are joined as Python ends, however long a network keeps them.
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

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")

#: Whether other threads call the model that this one warms, so that warming must not change it.
beside_calls: ContextVar[bool] = ContextVar("beside_calls", default=False)

#: A signal that comes as a wait begins is heard when the wait ends.
_HEARING_SECS = 0.2


class ForkedLock(RLock):  # type: ignore[misc]  # it is final to its stub, not to Python
    """A lock that one thread may take again, and that a child of `fork` finds free: who held it is not there.

    Nothing of `with` is written in Python here, so that no signal's handler runs between the taking of the lock and the
    beginning of the block: if it raised there, the lock would never be given back.
    """

    def __init__(self) -> None:
        _locks.add(self)

    def __reduce__(self) -> tuple[type[ForkedLock], tuple[()]]:
        return ForkedLock, ()  # a copy is free


_locks: weakref.WeakSet[ForkedLock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in _locks:
        if not lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - as `threading.Condition` asks
            lock._at_fork_reinit()  # type: ignore[attr-defined]  # noqa: SLF001 - as `threading` does with its own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


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
