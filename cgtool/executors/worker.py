"""What a worker of an executor runs for a unit, and the two messages that go between it and who asked.

`compile_unit` is all that an executor is given to call. It compares cgtool itself, hands the unit to a child of this
worker, which compiles and proves it, waits no longer than the unit's deadline, and says how that ended: a compiler
that crashes or hangs ends a child and never the worker. Children stay for the next unit and end when none comes, and
with their worker.

A message is a line of JSON, the record, and then bytes: the request that the child reads; the artifact that it made.

Must not import torch: a worker's own process has no need of it.
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
from cgtool.processes import ChildEndedError, Children, log_words
from cgtool.store.key import difference_between, sentences

#: How long children stay without work, in seconds: each holds torch and Inductor.
_IDLE_SECS = 300.0
_MOST_CHILDREN = 64

_Message = TypeVar("_Message", bound=Record)


class Handed(Record, frozen=True, kw_only=True):
    """What a worker is handed; the request goes beside it."""

    #: `cgtool_code` of who asks.
    cgtool: dict[str, str]
    #: How long the unit may take; None is for ever.
    timeout_secs: float | None
    #: Whether children import Inductor before their first unit, which then counts for no unit's time.
    inductor: bool


class Returned(Record, frozen=True, kw_only=True):
    """What a worker returns; the artifact goes beside it, where there is one."""

    #: Who it is, by the executor's own name for it or by host and process.
    worker: str
    #: "answered": the child did, see its report; "refused": the unit is not for this worker; "died": the child did, or
    #: took too long.
    status: Literal["answered", "refused", "died"]
    #: Why it did not answer.
    reason: str = ""
    #: What the child said.
    report: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))


class UnitSetup(Record, frozen=True, kw_only=True):
    """What a child is told as it starts."""

    #: A folder of all children of this worker: what one of them finds out of the machine, the others take.
    shared: str
    inductor: bool


def message(record: Record, data: bytes = b"") -> bytes:
    """Return a record and the bytes beside it as one message."""
    return encode(record) + b"\n" + data


def read_message(data: bytes, kind: type[_Message]) -> tuple[_Message, bytes]:
    """Return the record of a message and the bytes beside it; a ValueError where it is not such a message."""
    line, _, rest = data.partition(b"\n")
    return decode(line, kind), rest


def compile_unit(handed: bytes, worker: str = "") -> bytes:
    """Compile a unit in a child of this process; an executor calls this on a worker, by its name for it.

    Takes a message of `Handed`, and returns one of `Returned`.
    """
    name = worker or f"{socket.gethostname()}:{os.getpid()}"
    try:
        return _compile(handed, name)
    except Exception as error:  # noqa: BLE001  a message of another cgtool, or this one's files are gone
        return message(Returned(worker=name, status="refused", reason=f"{type(error).__name__}: {error}"))


def _compile(handed: bytes, name: str) -> bytes:
    # Another cgtool may spell all else in another way.
    theirs, ours = decode(handed.partition(b"\n")[0], dict).get("cgtool"), cgtool_code()
    if theirs != ours:
        differences = sentences(difference_between("cgtool", theirs, ours))
        return message(Returned(worker=name, status="refused", reason="; ".join(differences)))
    unit, request = read_message(handed, Handed)
    try:
        with _kept.at_work(inductor=unit.inductor) as children:
            answer = children.ask(unit, request, answer=msgspec.Raw, timeout_secs=unit.timeout_secs)
    except ChildEndedError as error:
        reason = f"its process there {error.ending.how}.{log_words(error.ending.log)}"
        return message(Returned(worker=name, status="died", reason=reason))
    except (CgtoolError, OSError) as error:
        return message(Returned(worker=name, status="died", reason=f"no process could be started there: {error}"))
    return message(Returned(worker=name, status="answered", report=answer.record), answer.data)


def prepare(inductor: bool, worker: str) -> None:  # noqa: ARG001  every call is told who does it
    """Start a child, which imports what compiles, and do not wait for it."""
    with contextlib.suppress(CgtoolError, OSError), _kept.at_work(inductor=inductor) as children:
        children.start()


def end_children() -> None:
    """End what `compile_unit` left running in this process."""
    _kept.end()


@lru_cache(maxsize=1)
def cgtool_code() -> Mapping[str, str]:
    """Return cgtool's version, and a digest of each of its folders and files: an edited one compiles something else."""
    package = Path(__file__).parents[1]
    digests: dict[str, hashlib._Hash] = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        digest = digests.setdefault(name.parts[0], hashlib.sha256())
        data = path.read_bytes()
        digest.update(f"{name.as_posix()} {len(data)}\n".encode() + data)
    return {"version": __version__, **{name: digest.hexdigest() for name, digest in digests.items()}}


class _Kept:
    """The children of this process. They end once nothing was asked of them for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: dict[bool, Children] = {}
        self._folder = ""
        self._num_asked = 0
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def at_work(self, *, inductor: bool) -> Iterator[Children]:
        with self._lock:
            self._num_asked += 1
            if self._timer is not None:
                self._timer.cancel()
            if not self._folder:
                self._folder = tempfile.mkdtemp(prefix="cgtool-work-")
            if inductor not in self._children:
                setup = UnitSetup(shared=self._folder, inductor=inductor)
                # the executor says how many units a worker takes at a time
                started = Children("cgtool.compiler.worker:serve_units", limit=_MOST_CHILDREN, setup=setup)
                self._children[inductor] = started
            children = self._children[inductor]
        try:
            yield children
        finally:
            with self._lock:
                self._num_asked -= 1
                if self._num_asked == 0:
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
        if self._num_asked == 0:
            self.end()


_kept = _Kept()
atexit.register(end_children)
