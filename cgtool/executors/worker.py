"""The code that executor workers run to compile a unit, and the two messages that they exchange with the client.

Executors call only `compile_unit`. It checks that client and worker have the same version of cgtool, passes the unit to
a child process that compiles and proves it, waits until the unit's deadline, and returns the outcome. A compiler that
crashes or hangs thus ends a child process and never the worker. Children are kept for the next unit, and end when they
are idle for a while or when their worker ends.

A message is a record, as a line of JSON, followed by bytes: the request for the child, or the artifact that it made.

Must not import torch, which the worker process itself does not need.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from cgtool import __version__
from cgtool.errors import CgtoolError
from cgtool.plan.grammar import Record, decode, encode
from cgtool.processes import ChildEndedError, Children, format_log
from cgtool.store.key import difference_between, sentences

#: How long idle children are kept, in seconds; each has torch and Inductor in memory.
_IDLE_SECS = 300.0
_MAX_CHILDREN = 64

_Message = TypeVar("_Message", bound=Record)


class Handed(Record, frozen=True, kw_only=True):
    """The message to a worker; the request follows it."""

    #: `cgtool_code` of the client.
    cgtool: dict[str, str]
    #: The time limit for the unit; None for no limit.
    timeout_secs: float | None
    #: Whether children import Inductor before their first unit, so that the import does not count as a unit's time.
    inductor: bool


class Returned(Record, frozen=True, kw_only=True):
    """The message from a worker; the artifact follows it, if there is one."""

    #: The executor's name for the worker, or host and process id.
    worker: str
    #: "answered": the child returned a report; "refused": the worker cannot compile the unit; "died": the child crashed
    #: or exceeded the time limit.
    status: Literal["answered", "refused", "died"]
    #: Why the unit was refused or the child died.
    reason: str = ""
    #: The child's report.
    report: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))


class UnitSetup(Record, frozen=True, kw_only=True):
    """The configuration that a child receives at start-up."""

    #: A folder shared by all children of this worker, which saves repeated detection of the machine's properties.
    shared: str
    inductor: bool


def message(record: Record, data: bytes = b"") -> bytes:
    """Return a message with a record and the bytes that follow it."""
    return encode(record) + b"\n" + data


def read_message(data: bytes, kind: type[_Message]) -> tuple[_Message, bytes]:
    """Return the record of a message and the bytes that follow it; ValueError if it is not a message of this kind."""
    line, _, rest = data.partition(b"\n")
    return decode(line, kind), rest


def compile_unit(handed: bytes, worker: str = "") -> bytes:
    """Compile a unit in a child process; executors call this on a worker.

    Args:
        handed: A message with a `Handed` record.
        worker: The executor's name for the worker; by default host and process id.

    Returns:
        A message with a `Returned` record.
    """
    name = worker or f"{socket.gethostname()}:{os.getpid()}"
    try:
        return _compile(handed, name)
    except Exception as error:  # noqa: BLE001  the client has another version of cgtool, or the worker's files are gone
        return message(Returned(worker=name, status="refused", reason=f"{type(error).__name__}: {error}"))


def _compile(handed: bytes, name: str) -> bytes:
    # Compare the versions first: another version may have a different message format.
    theirs, ours = decode(handed.partition(b"\n")[0], dict).get("cgtool"), cgtool_code()
    if theirs != ours:
        differences = sentences(difference_between("cgtool", theirs, ours))
        return message(Returned(worker=name, status="refused", reason="; ".join(differences)))
    unit, request = read_message(handed, Handed)
    try:
        with _pool.use(inductor=unit.inductor) as children:
            answer = children.ask(unit, request, answer=msgspec.Raw, timeout_secs=unit.timeout_secs)
    except ChildEndedError as error:
        reason = f"its process there {error.ending.how}.{format_log(error.ending.log)}"
        return message(Returned(worker=name, status="died", reason=reason))
    except (CgtoolError, OSError) as error:
        return message(Returned(worker=name, status="died", reason=f"no process could be started there: {error}"))
    return message(Returned(worker=name, status="answered", report=answer.record), answer.data)


def prepare(inductor: bool, worker: str) -> None:  # noqa: ARG001  the signature of calls on workers
    """Start a child process, which imports the compiler, without waiting for it."""
    with contextlib.suppress(CgtoolError, OSError), _pool.use(inductor=inductor) as children:
        children.start()


def end_children() -> None:
    """End the child processes that `compile_unit` keeps running."""
    _pool.end()


@lru_cache(maxsize=1)
def cgtool_code() -> Mapping[str, str]:
    """Return cgtool's version and the digest of each top-level folder and file: edited code may compile differently."""
    package = Path(__file__).parents[1]
    digests: dict[str, hashlib._Hash] = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        digest = digests.setdefault(name.parts[0], hashlib.sha256())
        data = path.read_bytes()
        digest.update(f"{name.as_posix()} {len(data)}\n".encode() + data)
    return {"version": __version__, **{name: digest.hexdigest() for name, digest in digests.items()}}


class _ChildPool:
    """The child processes of this worker, which end after being idle for `_IDLE_SECS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: dict[bool, Children] = {}
        self._folder = ""
        self._num_users = 0
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def use(self, *, inductor: bool) -> Iterator[Children]:
        with self._lock:
            self._num_users += 1
            if self._timer is not None:
                self._timer.cancel()
            if not self._folder:
                self._folder = tempfile.mkdtemp(prefix="cgtool-work-")
            if inductor not in self._children:
                setup = UnitSetup(shared=self._folder, inductor=inductor)
                # The executor decides how many units a worker compiles at a time.
                children = Children("cgtool.compiler.worker:serve_units", limit=_MAX_CHILDREN, setup=setup)
                self._children[inductor] = children
            children = self._children[inductor]
        try:
            yield children
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    self._timer = threading.Timer(_IDLE_SECS, self._end_idle)
                    self._timer.daemon = True
                    self._timer.start()

    def end(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            while self._children:
                self._children.popitem()[1].close()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = ""

    def _end_idle(self) -> None:
        if self._num_users == 0:
            self.end()


_pool = _ChildPool()
atexit.register(end_children)
