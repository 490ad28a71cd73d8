"""What ends a command: signals become exceptions, and one table turns exceptions into exit codes and words.

Must not import torch. Ctrl-C is Python's KeyboardInterrupt; SIGTERM and SIGHUP become `Terminated`, so that every
`finally` and `with` on the way out runs. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a check said no,
130 Ctrl-C, 143 SIGTERM, 141 the reader of the output went away.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cgtool.errors import CgtoolError

if TYPE_CHECKING:
    from types import FrameType

SCHEMA = 1

DONE = 0
FAILED = 1
USAGE = 2
CHECK_SAID_NO = 3
INTERRUPTED = 128 + signal.SIGINT
READER_GONE = 128 + signal.SIGPIPE

_REPORT = "This is a fault of cgtool or of a library under it: run it again with --traceback and report what it shows."


class Terminated(BaseException):
    """The process was asked to end. A BaseException, so that no `except Exception` on the way swallows it.

    Attributes:
        signum: The signal's number; the exit code is 128 and it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def _raise_terminated(signum: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001  the signature is signal's
    # A second signal must not break the cleanup that the first one began.
    signal.signal(signum, signal.SIG_IGN)
    raise Terminated(signum)


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGHUP while the block runs; what the caller had ignored stays ignored."""
    before = {}
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:
            before[signum] = signal.signal(signum, _raise_terminated)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What an exception means to the user.

    Args:
        type: The exception's name, for programs.
        message: A sentence for people; empty where there is nobody to tell.
        exit_code: What the process returns.
        path: What the error is about; None where nothing is named.
        reason: A stable word for why something was refused; None for other failures.
        reasons: More sentences, the most telling first.
        expected: What should have been there.
        actual: What was there.
    """

    type: str
    message: str
    exit_code: int
    path: str | None = None
    reason: str | None = None
    reasons: tuple[str, ...] = ()
    expected: Any = None
    actual: Any = None

    def to_json(self) -> dict[str, Any]:
        """Return the document that `--json` prints: {"schema": 1, "error": {...}}."""
        error = {
            "type": self.type,
            "message": self.message,
            "exit_code": self.exit_code,
            "path": self.path,
            "reason": self.reason,
            "expected": _simple(self.expected),
            "actual": _simple(self.actual),
            "reasons": list(self.reasons),
        }
        return {"schema": SCHEMA, "error": error}


def is_help(error: BaseException) -> bool:
    """Return whether `error` only carries a group's help, which click raises where a command is missing."""
    return type(error).__name__ == "NoArgsIsHelpError"  # by name: click has it from 8.2 on


def failure_of(error: BaseException) -> Failure:
    """Return what `error` means: the first row of the table that fits, in order."""
    for kind, words in _TABLE:
        if isinstance(error, kind):
            return words(error)
    return _unexpected(error)


def _ours(error: Any) -> Failure:
    return Failure(
        type=type(error).__name__,
        message=str(error),
        exit_code=error.exit_code,
        path=None if error.path is None else str(error.path),
        reason=getattr(error, "reason", None),
        reasons=tuple(getattr(error, "reasons", ())),
        expected=error.expected,
        actual=error.actual,
    )


def _usage(error: Any) -> Failure:
    message = error.format_message().rstrip()
    if error.ctx is not None and not is_help(error):
        message += f"\nTry '{error.ctx.command_path} --help'."
    return Failure(type="UsageError", message=message, exit_code=USAGE)


def _interrupted(error: Any) -> Failure:  # noqa: ARG001  a row's signature
    return Failure(
        type="Interrupted",
        message="Interrupted. What was finished is kept and nothing is half done: run the same command again.",
        exit_code=INTERRUPTED,
    )


def _terminated(error: Any) -> Failure:
    return Failure(
        type="Terminated",
        message=f"Ended by {error}. What was finished is kept and nothing is half done: run the same command again.",
        exit_code=128 + error.signum,
    )


def _reader_gone(error: Any) -> Failure:
    return Failure(type=type(error).__name__, message="", exit_code=READER_GONE)


def _missing_module(error: Any) -> Failure:
    name = error.name or "a module"
    return Failure(
        type=type(error).__name__,
        message=f"{name} is not installed here ({error}). Install it into this Python and try again.",
        exit_code=FAILED,
    )


def _system(error: Any) -> Failure:
    path = None if error.filename is None else str(error.filename)
    where = f"{path}: " if path else ""
    return Failure(
        type=type(error).__name__,
        message=f"{where}{error.strerror or error}. Check the path and its permissions and try again.",
        exit_code=FAILED,
        path=path,
    )


def _memory(error: Any) -> Failure:
    return Failure(
        type=type(error).__name__,
        message=f"There was not enough memory: {error or 'none is left'}. Free some, or warm a smaller model.",
        exit_code=FAILED,
    )


def _ended(error: Any) -> Failure:
    return Failure(
        type=type(error).__name__,
        message=f"The model's code ended the process with sys.exit({error.code!r}). Let it raise or return instead.",
        exit_code=FAILED,
    )


def _unexpected(error: BaseException) -> Failure:
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(type=type(error).__name__, message=f"{words}\n{_REPORT}", exit_code=FAILED)


def _simple(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_simple(item) for item in value]
    return str(value)


_TABLE: tuple[tuple[type[BaseException], Callable[[Any], Failure]], ...] = (
    (CgtoolError, _ours),
    (click.UsageError, _usage),
    (click.Abort, _interrupted),
    (KeyboardInterrupt, _interrupted),
    (Terminated, _terminated),
    (BrokenPipeError, _reader_gone),
    (ModuleNotFoundError, _missing_module),
    (OSError, _system),
    (MemoryError, _memory),
    (SystemExit, _ended),
)
