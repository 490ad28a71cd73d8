"""How a command fails: signals become exceptions, and exceptions become messages and exit codes.

Must not import torch. Ctrl-C raises Python's KeyboardInterrupt; SIGTERM and SIGHUP raise `Terminated`, so that every
`finally` and `with` block runs. Exit codes: 0 success, 1 failure, 2 usage error, 3 failed check, 130 Ctrl-C,
143 SIGTERM, 141 the reader of the output closed the pipe.
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
CHECK_FAILED = 3
INTERRUPTED = 128 + signal.SIGINT
READER_GONE = 128 + signal.SIGPIPE

_KEPT = "Finished work is kept and nothing is left half-written: run the same command again to continue."
_REPORT = "This is a bug in cgtool or a library it uses: run the command again with --traceback and report the output."


class Terminated(BaseException):
    """The process received SIGTERM or SIGHUP. A BaseException, so that no `except Exception` swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def _raise_terminated(signum: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - signal's signature
    # A second signal must not interrupt the cleanup that the first one started.
    signal.signal(signum, signal.SIG_IGN)
    raise Terminated(signum)


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGHUP inside the block; signals that the caller ignores stay ignored."""
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
    """An error as reported to the user; the fields are those of the document that `--json` prints."""

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
    """Return whether `error` only carries a group's help, which click raises if the command is missing."""
    return type(error).__name__ == "NoArgsIsHelpError"  # by name: new in click 8.2


def failure_of(error: BaseException) -> Failure:
    """Return the failure to report for `error`."""
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
            name, message, code = "Terminated", f"Terminated by {error}. {_KEPT}", 128 + error.signum
        case BrokenPipeError():
            code = READER_GONE
        case ModuleNotFoundError():
            missing = error.name or "a module"
            message = f"{missing} is not installed ({error}). Install it in this Python environment and try again."
        case OSError():
            path = None if error.filename is None else str(error.filename)
            message = f"{path}: " if path else ""
            message += f"{error.strerror or error}. {_os_advice(error)}"
        case MemoryError():
            detail = " ".join(map(str, error.args)) or "none is left"
            message = f"Out of memory: {detail}. Free some memory, or warm a smaller model."
        case SystemExit():
            message = f"The model's code called sys.exit({error.code!r}). Let it raise an exception or return instead."
        case _:
            message = f"{name}: {error}\n{_REPORT}" if str(error) else f"{name}\n{_REPORT}"
    return Failure(type=name, message=message, exit_code=code, path=path)


def _os_advice(error: OSError) -> str:
    """Return advice for an OSError. cgtool's own writes name a path, so ENOSPC without one concerns the output."""
    if error.filename is not None:
        return "Check the path and its permissions and try again."
    if error.errno == errno.ENOSPC:
        return "Redirect the output elsewhere, or free some space."
    try:
        Path.cwd()
    except FileNotFoundError:
        return "The working directory no longer exists: change to one that does."
    return "Run the command again with --traceback to see where it failed."


def _simple(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_simple(item) for item in value]
    return str(value)
