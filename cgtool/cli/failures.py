"""What ends a command: signals become exceptions, and one table turns exceptions into exit codes and words.

Must not import torch. Ctrl-C is Python's KeyboardInterrupt; SIGTERM and SIGHUP become `Terminated`, so that every
`finally` and `with` on the way out runs. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a check said no,
130 Ctrl-C, 143 SIGTERM, 141 the reader of the output went away.
"""

from __future__ import annotations

import contextlib
import errno
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
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

_KEPT = "What was finished is kept and nothing is half done: run the same command again."
_REPORT = "This is a fault of cgtool or of a library under it: run it again with --traceback and report what it shows."


class Terminated(BaseException):
    """The process was asked to end. A BaseException, so that no `except Exception` on the way swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def _raise_terminated(signum: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - the signature is signal's
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
    """What an exception means to the user; its fields are those of the document that `--json` prints."""

    type: str
    message: str
    exit_code: int
    path: str | None = None
    reason: str | None = None
    expected: Any = None
    actual: Any = None
    reasons: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the document that `--json` prints: {"schema": 1, "error": {...}}."""
        return {"schema": SCHEMA, "error": vars(self)}


def is_help(error: BaseException) -> bool:
    """Return whether `error` only carries a group's help, which click raises where a command is missing."""
    return type(error).__name__ == "NoArgsIsHelpError"  # by name: click has it from 8.2 on


def failure_of(error: BaseException) -> Failure:
    """Return what `error` means."""
    if isinstance(error, CgtoolError):
        return Failure(
            type=type(error).__name__,
            message=str(error),
            exit_code=error.exit_code,
            path=None if error.path is None else str(error.path),
            reason=getattr(error, "reason", None),
            expected=_simple(error.expected),
            actual=_simple(error.actual),
            reasons=tuple(getattr(error, "reasons", ())),
        )
    if isinstance(error, click.UsageError):
        message = error.format_message().rstrip()
        if error.ctx is not None and not is_help(error):
            message += f"\nTry '{error.ctx.command_path} --help'."
        return Failure(type="UsageError", message=message, exit_code=USAGE)
    name, message, code, path = type(error).__name__, "", FAILED, None
    match error:
        case click.Abort() | KeyboardInterrupt():
            name, message, code = "Interrupted", f"Interrupted. {_KEPT}", INTERRUPTED
        case Terminated():
            name, message, code = "Terminated", f"Ended by {error}. {_KEPT}", 128 + error.signum
        case BrokenPipeError():
            code = READER_GONE
        case ModuleNotFoundError():
            missing = error.name or "a module"
            message = f"{missing} is not installed here ({error}). Install it into this Python and try again."
        case OSError():
            path = None if error.filename is None else str(error.filename)
            message = f"{path}: " if path else ""
            message += f"{error.strerror or error}. {_os_advice(error)}"
        case MemoryError():
            said = " ".join(map(str, error.args)) or "none is left"
            message = f"There was not enough memory: {said}. Free some, or warm a smaller model."
        case SystemExit():
            message = (
                f"The model's code ended the process with sys.exit({error.code!r}). Let it raise or return instead."
            )
        case _:
            message = f"{name}: {error}\n{_REPORT}" if str(error) else f"{name}\n{_REPORT}"
    return Failure(type=name, message=message, exit_code=code, path=path)


def _os_advice(error: OSError) -> str:
    """Return what to do; cgtool's own writes name a path, so that a full disk without one is where output goes."""
    if error.filename is not None:
        return "Check the path and its permissions and try again."
    if error.errno == errno.ENOSPC:
        return "Send the output elsewhere, or free some."
    try:
        Path.cwd()
    except FileNotFoundError:
        return "The working directory is gone: change to one that is there."
    return "Run it again with --traceback to see where."


def _simple(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_simple(item) for item in value]
    return str(value)
