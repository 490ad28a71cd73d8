"""The exceptions that cgtool raises.

Imports no other module of cgtool, so that every module can raise them. A message tells the user what is wrong and what
to do; `path`, `expected` and `actual` hold the same facts for programs. `exit_code` is the exit code of the command.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class CgtoolError(Exception):
    """Base class of all errors that cgtool raises.

    Args:
        message: What is wrong, and what the user can do about it.
        path: The file, folder or attribute path that the error is about.
        expected: The expected value.
        actual: The actual value.
    """

    exit_code = 1

    def __init__(self, message: str, *, path: Any = None, expected: Any = None, actual: Any = None) -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.actual = actual


class UsageError(CgtoolError, ValueError):
    """The request is invalid: a wrong option, an unknown name or a malformed value."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration field is unknown, of the wrong type or out of range."""


class ModelError(CgtoolError):
    """The model could not be found, built or called, or cgtool cannot compile it."""


class TraceError(CgtoolError):
    """Dynamo could not trace the model into one graph, or the trace cannot be stored as data."""


class GraphBreakError(TraceError):
    """The model contains code that Dynamo cannot put into a graph."""


class SplitError(CgtoolError):
    """The graph could not be split, or a piece cannot be stored as data."""


class UnmatchedSplittingOpError(SplitError, UsageError):
    """The graph does not contain a splitting op that was named explicitly."""

    exit_code = 2


class CompileError(CgtoolError):
    """A piece could not be compiled."""


class ProofMismatchError(CompileError):
    """An artifact cannot be opened, fails, or returns other results than its piece run eagerly."""


class CallMismatchError(CgtoolError):
    """The stitched program returns other results than the model itself.

    Not a `CompileError`: no single piece is at fault, so another compiler would not help.
    """


class ProofCrashError(CgtoolError):
    """The process that proves artifacts died or timed out.

    Attributes:
        signal_name: The signal that ended it, such as "SIGSEGV", or None.
    """

    def __init__(self, message: str, *, signal_name: str | None = None, actual: Any = None) -> None:
        super().__init__(message, actual=actual)
        self.signal_name = signal_name


class WorkerError(CompileError):
    """A worker crashed, hung, or ran out of memory or disk while compiling a piece; the piece itself may be fine."""


class ExecutorError(CgtoolError):
    """The compile cluster does not answer, went away or has no workers; no piece is at fault."""


class UnitsFailedError(CompileError):
    """Some pieces could not be compiled; the finished ones are stored.

    Attributes:
        reasons: A sentence for each failed unit.
    """

    def __init__(self, message: str, *, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class CacheError(CgtoolError):
    """The cache folder could not be read or written."""


class CacheCorruptError(CacheError):
    """A file of the cache does not match its digest, or is truncated."""


class CacheSchemaError(CacheError):
    """The cache was written by a version of cgtool with a different schema."""


class RemoteError(CacheError):
    """A remote store could not be reached, or a request to it failed.

    Attributes:
        is_passing: True if the same request may succeed later: the store is down, busy or too slow.
    """

    def __init__(
        self, message: str, *, path: Any = None, expected: Any = None, actual: Any = None, is_passing: bool = False
    ) -> None:
        super().__init__(message, path=path, expected=expected, actual=actual)
        self.is_passing = is_passing


class CacheMissError(CgtoolError):
    """No entry of the cache matches the model as it is now.

    Attributes:
        reasons: Sentences, most relevant first.
        nearest: The hash of the entry that the reasons refer to, or None.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, reasons: tuple[str, ...] = (), path: Any = None, nearest: str | None = None
    ) -> None:
        super().__init__(message, path=path)
        self.reasons = reasons
        self.nearest = nearest


class GuardError(CgtoolError):
    """A guard on the model fails, or the guards of every variant reject a call."""


class GraphError(CgtoolError):
    """A CUDA graph cannot be captured, or cannot be replayed for this call."""


class ArtifactError(CgtoolError):
    """An artifact could not be opened, or its outputs do not match the piece."""


class NoRoomError(ArtifactError):
    """This machine cannot open any artifact: it lacks a folder, a file descriptor or permission to run code."""


class RefusedError(CgtoolError):
    """An entry or bundle is untrusted, incomplete or unfit for this machine; none of it was used.

    Attributes:
        reason: A stable identifier for programs, such as "digest_mismatch".
    """

    exit_code = 3

    def __init__(
        self, message: str, *, reason: str, path: Any = None, expected: Any = None, actual: Any = None
    ) -> None:
        super().__init__(message, path=path, expected=expected, actual=actual)
        self.reason = reason


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; "" if it has none."""
    return (str(error).strip().splitlines() or [""])[0]


def brief(error: BaseException) -> str:
    """Return an error's class and the first line of its message: "ValueError: too long"."""
    return f"{type(error).__name__}: {first_line(error)}"


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and, in turn, the causes or contexts that led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
