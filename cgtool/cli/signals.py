"""Signals become exceptions, so that every `finally` and `with` on the way out runs.

Must not import torch. Ctrl-C is Python's KeyboardInterrupt; SIGTERM and SIGHUP become `Terminated`.
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class Terminated(BaseException):
    """The process was asked to end. A BaseException, so that no `except Exception` on the way swallows it.

    Attributes:
        signum: The signal's number; the exit code is 128 and it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def _raise(signum: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001  the signature is signal's
    # A second signal must not break the cleanup that the first one began.
    signal.signal(signum, signal.SIG_IGN)
    raise Terminated(signum)


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGHUP while the block runs; what the caller had ignored stays ignored."""
    before = {}
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:
            before[signum] = signal.signal(signum, _raise)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
