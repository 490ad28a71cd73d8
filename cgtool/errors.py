"""Every error that cgtool raises on purpose.

Imports nothing, so that any room may raise them. A message is a sentence for the user that ends with what to do;
`path`, `expected` and `actual` carry the same facts for programs. `exit_code` is what the command line returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class CgtoolError(Exception):
    """Base of all errors of cgtool.

    Args:
        message: A sentence that ends with what the user can do.
        path: The file, folder or attribute path that the error is about.
        expected: What should have been there.
        actual: What was there.
    """

    exit_code = 1

    def __init__(self, message: str, *, path: Any = None, expected: Any = None, actual: Any = None) -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.actual = actual


class UsageError(CgtoolError, ValueError):
    """The user asked for something that has no meaning: a wrong option, an unknown name, a malformed value."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration field is unknown, of the wrong type or out of range."""


class ModelError(CgtoolError):
    """The model could not be found, built or called."""


class TraceError(CgtoolError):
    """Dynamo could not trace the model into one graph whose meaning can be kept as data."""


class GraphBreakError(TraceError):
    """The model holds something that Dynamo cannot put into a graph."""


class SplitError(CgtoolError):
    """The graph could not be split, or a piece could not be written down as data."""


class UnmatchedSplittingOpError(SplitError, UsageError):
    """A splitting op that was named explicitly occurs nowhere in the graph."""

    exit_code = 2


class CompileError(CgtoolError):
    """A piece could not be compiled."""


class ProofMismatchError(CompileError):
    """An artifact cannot be opened, fails, or gives something else than its piece does when it runs op by op."""


class CallMismatchError(CgtoolError):
    """The whole call, put together from compiled pieces, gives something else than the model itself.

    Not a `CompileError`: no single piece is at fault, so another compiler would not help.
    """


class ProofCrashError(CgtoolError):
    """The process that proves artifacts died, or did not answer in time.

    Attributes:
        signal_name: "SIGSEGV" where a signal ended it, else None.
    """

    def __init__(self, message: str, *, signal_name: str | None = None, actual: Any = None) -> None:
        super().__init__(message, actual=actual)
        self.signal_name = signal_name


class WorkerError(CompileError):
    """A worker crashed, hung, or ran out of memory or disk while it compiled a piece; the piece itself may be fine."""


class ExecutorError(CgtoolError):
    """The cluster that should compile does not answer, went away or has no workers; no piece is at fault."""


class UnitsFailedError(CompileError):
    """Some pieces could not be compiled; what was finished is stored.

    Attributes:
        reasons: A sentence for each unit that failed.
    """

    def __init__(self, message: str, *, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class CacheError(CgtoolError):
    """The cache folder could not be read or written."""


class CacheCorruptError(CacheError):
    """The bytes of a file differ from the digest that names them, or a file is torn."""


class CacheSchemaError(CacheError):
    """The cache was written by a version of cgtool with another schema."""


class RemoteError(CacheError):
    """A remote store could not be reached, or did not do what it was asked.

    Attributes:
        is_passing: Whether the same request may succeed later: the store is down, busy or too slow.
    """

    def __init__(
        self, message: str, *, path: Any = None, expected: Any = None, actual: Any = None, is_passing: bool = False
    ) -> None:
        super().__init__(message, path=path, expected=expected, actual=actual)
        self.is_passing = is_passing


class CacheMissError(CgtoolError):
    """No entry of the cache fits the model as it is now.

    Attributes:
        reasons: Sentences, the most telling first.
        nearest: The hash of the entry that the reasons speak of; None where they speak of none.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, reasons: tuple[str, ...] = (), path: Any = None, nearest: str | None = None
    ) -> None:
        super().__init__(message, path=path)
        self.reasons = reasons
        self.nearest = nearest


class GuardError(CgtoolError):
    """A call was refused because every variant's guards refuse it."""


class GraphError(CgtoolError):
    """A CUDA graph cannot be captured, or may not be replayed for this call."""


class ArtifactError(CgtoolError):
    """An artifact could not be opened, or gave something else than its piece promises."""


class NoRoomError(ArtifactError):
    """This machine lacks what opening any artifact needs: a folder, a descriptor, leave to run code."""


class RefusedError(CgtoolError):
    """Something from outside is not trusted, not whole or not fit for this machine: nothing of it was used.

    Attributes:
        reason: A stable word for programs, such as "digest_mismatch".
    """

    exit_code = 3

    def __init__(
        self, message: str, *, reason: str, path: Any = None, expected: Any = None, actual: Any = None
    ) -> None:
        super().__init__(message, path=path, expected=expected, actual=actual)
        self.reason = reason


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; "" where it says nothing."""
    return (str(error).strip().splitlines() or [""])[0]


def brief(error: BaseException) -> str:
    """Return an error as its class and the first line of what it says: "ValueError: too long"."""
    return f"{type(error).__name__}: {first_line(error)}"


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its cause or context, then the cause of that, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
