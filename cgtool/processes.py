"""Child processes that answer requests, and that leave no process behind however they or their parent end.

This is the parent's side: it starts a child, sends requests, enforces deadlines, ends the child and reports how it
died. `cgtool.child` is the child's side, with the protocol. The output of a child and its descendants goes to an
in-memory file, whose last lines errors show. `run_in_copy` forks this process instead, for work on a live model. Must
not import torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from cgtool.child import GRACE_SECS, LAST, NOTE, REQUEST, Channel, end_with
from cgtool.errors import CgtoolError
from cgtool.plan.grammar import Record, decode

#: The time limit for a child to get ready: importing torch and Inductor is slow on a busy machine.
_START_SECS = 600.0
#: The time limit for a keeper to end its child.
_END_SECS = 4 * GRACE_SECS
#: How often `run_in_copy` checks whether the copy has ended.
_POLL_SECS = 1.0
#: How much of the end of a log is read and shown.
_TAIL_BYTES, _TAIL_LINES, _LINE_CHARS = 16_384, 12, 200
#: The first line of a crash report. Its first lines are the most relevant: the innermost call comes first.
_CRASH = "Fatal Python error"

#: A child has its parent's `sys.path`, which may be needed to find cgtool itself.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cgtool.child import serve; serve(int(sys.argv[2]), sys.argv[3])"
)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a child ended."""

    #: The exit code; negative for a signal, None if it timed out.
    code: int | None
    #: The last lines of its output and that of its descendants.
    log: tuple[str, ...]
    limit_secs: float | None = None

    @property
    def signal_name(self) -> str | None:
        """The signal that ended it, such as "SIGSEGV", or None."""
        if self.code is None or self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:  # a real-time signal
            return f"signal {-self.code}"

    @property
    def how(self) -> str:
        """The predicate of a sentence about the child: "crashed with SIGSEGV"."""
        if self.code is None:
            return f"took longer than {self.limit_secs:g} s and was ended"
        if self.code == -signal.SIGKILL:
            return "was killed (SIGKILL), most likely by the kernel because memory ran out"
        if self.code < 0:
            return f"crashed with {self.signal_name}"
        return f"ended with exit code {self.code}"

    @property
    def key_line(self) -> str:
        """The most relevant line of the log; "" if it is empty."""
        if not self.log:
            return ""
        return (self.log[0] if self.log[0].startswith(_CRASH) else self.log[-1]).strip()


class ChildEndedError(CgtoolError):
    """A child ended, or was ended, before it answered.

    Attributes:
        ending: How it ended.
    """

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"A process {ending.how}.{format_log(ending.log)}", actual=ending.code)
        self.ending = ending


class ClosedError(CgtoolError):
    """The children were closed, because the command that started them ends."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a child."""

    record: Any
    #: The bytes sent with the record.
    data: bytes
    #: The last lines that the child printed during the request.
    log: tuple[str, ...]


def format_log(lines: tuple[str, ...]) -> str:
    """Format the last lines of a log for the end of a message; "" if there are none."""
    return "".join(["\nIts log ends with:", *(f"\n    {line}" for line in lines)]) if lines else ""


class Child:
    """A running child, which handles one request at a time.

    Args:
        program: "module:function"; the function takes a `Channel`.
        setup: The first message, sent before the child is ready; None sends none.
        variables: The complete environment; None means that of this process.

    Attributes:
        started: The time of the start on the clock of `time.monotonic`, which all processes share.

    Raises:
        OSError: The child cannot be started.
    """

    def __init__(
        self, program: str, *, setup: Record | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        paths = json.dumps([str(entry) or str(Path.cwd()) for entry in sys.path])
        self._is_ready = self._is_over = False
        self._log = io.FileIO(os.memfd_create("cgtool-log", os.MFD_CLOEXEC))
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self.started = time.monotonic()
        try:
            self._process = subprocess.Popen(  # noqa: S603  this very Python
                [sys.executable, "-P", "-u", "-c", _BOOT, paths, str(theirs.fileno()), program],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                env=None if variables is None else dict(variables),
                start_new_session=True,  # Ctrl-C on the terminal reaches the parent alone
            )
        except BaseException:
            self._log.close()
            ours.close()
            raise
        finally:
            theirs.close()
        if setup is not None:
            with contextlib.suppress(OSError):  # it is gone already; the first request will report it
                self._channel.send(REQUEST, setup)

    @property
    def is_alive(self) -> bool:
        """Whether it can take a request."""
        return not self._is_over and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the keeper, which is the session id."""
        return self._process.pid

    def ask(
        self,
        request: Record,
        data: bytes = b"",
        *,
        answer: Any,
        timeout_secs: float | None,
        note: Any = None,
        on_note: Callable[[Any], None] = lambda _: None,
    ) -> Answer:
        """Send a request and wait for its answer; any error ends the child.

        Args:
            request: The request.
            data: Bytes to send with it.
            answer: The class of the answer, or a tagged union of classes.
            timeout_secs: The time limit once the child is ready; None means no limit.
            note: The class of the notes that the child sends before its answer.
            on_note: Called with each note.

        Raises:
            ChildEndedError: The child died or timed out.
        """
        try:
            if not self._is_ready:
                self._receive(time.monotonic() + _START_SECS, _START_SECS)
                self._is_ready = True
            os.ftruncate(self._log.fileno(), 0)
            self._log.seek(0)  # the child writes where this reads
            deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
            with self._ending_errors(timeout_secs):
                self._channel.send(REQUEST, request, data, deadline=deadline)
            while True:
                kind, record, found = self._receive(deadline, timeout_secs)
                if kind != NOTE:
                    break
                on_note(decode(record, note))
            self._is_over = kind == LAST
            return Answer(record=decode(record, answer), data=found, log=self._last_lines())
        except BaseException:  # also after Ctrl-C: the answer must not be taken for that of the next request
            self.close()
            raise

    def finish(self, timeout_secs: float) -> Ending:
        """Wait until a child that gave its last answer exits, and return how it ended."""
        try:
            code: int | None = self._process.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            code = None
        return Ending(code=code, log=self._last_lines(), limit_secs=timeout_secs)

    def stop(self) -> None:
        """Start to end the child and its descendants, without waiting. Thread-safe."""
        self._channel.hang_up()

    def end(self) -> None:
        """End the child and its descendants. Thread-safe; a thread that waits for an answer gets an error."""
        self.stop()
        try:
            self._process.wait(_END_SECS)
        except subprocess.TimeoutExpired:  # the keeper does not run, for instance because it was stopped
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """End it and close its files. No other thread may wait for an answer."""
        self.end()
        self._channel.close()
        self._log.close()

    def _receive(self, deadline: float | None, limit_secs: float | None) -> tuple[bytes, bytes, bytes]:
        with self._ending_errors(limit_secs):
            return self._channel.receive(deadline=deadline)

    @contextlib.contextmanager
    def _ending_errors(self, limit_secs: float | None) -> Iterator[None]:
        """End a child that is gone or timed out, and raise a `ChildEndedError` once none of its processes run."""
        try:
            yield
        except TimeoutError:
            self.end()
            raise ChildEndedError(Ending(code=None, log=self._last_lines(), limit_secs=limit_secs)) from None
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECS)
            self.end()
            raise ChildEndedError(Ending(code=self._process.returncode, log=self._last_lines())) from None

    def _last_lines(self) -> tuple[str, ...]:
        return _last_lines(self._log.fileno())


def _last_lines(log: int) -> tuple[str, ...]:
    """Return the last lines of a log, or the first lines of the last crash report in it."""
    text = os.pread(log, _TAIL_BYTES, max(0, os.fstat(log).st_size - _TAIL_BYTES)).decode(errors="replace")
    lines = [line.rstrip()[:_LINE_CHARS] for line in text.splitlines() if line.strip()]
    crash = next((n for n in reversed(range(len(lines))) if lines[n].startswith(_CRASH)), None)
    return tuple(lines[-_TAIL_LINES:] if crash is None else lines[crash : crash + _TAIL_LINES])


class Children:
    """A thread-safe pool of children of one program. Dead ones are replaced; leaving the `with` block ends them all."""

    def __init__(
        self, program: str, *, limit: int, setup: Record | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        self._program = program
        self.limit = limit
        self._setup = setup
        self._variables = variables
        self._slots = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, count: int = 1) -> None:
        """Start children in advance, until there are `count` or the limit is reached.

        Raises:
            ClosedError: `close` was called.
            OSError: A child cannot be started.
        """
        with self._lock:
            while len(self._all) < min(count, self.limit):
                self._idle.append(self._new())

    def ask(self, request: Record, data: bytes = b"", **how: Any) -> Answer:
        """Wait for a free child and call its `Child.ask`.

        Raises:
            ClosedError: `close` was called.
            ChildEndedError: The child died or timed out.
            OSError: A child cannot be started.
        """
        with self._slots:
            child = self._take()
            try:
                return child.ask(request, data, **how)
            finally:
                self._give_back(child)

    def close(self) -> None:
        """End all children for good; waiting threads get a `ChildEndedError`."""
        with self._lock:
            self._is_closed = True  # first, so that no other thread starts a child that nobody would end
            idle, self._idle = self._idle, []
            running = list(self._all)
        for child in running:
            child.stop()
        for child in running:
            child.end()
        for child in idle:
            child.close()

    def _take(self) -> Child:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    return child
                self._all.discard(child)  # it died between two requests
                child.close()
            return self._new()

    def _give_back(self, child: Child) -> None:
        with self._lock:
            if child.is_alive and not self._is_closed:
                self._idle.append(child)
                return
            self._all.discard(child)
        child.close()

    def _new(self) -> Child:
        if self._is_closed:
            raise ClosedError("The command was ended before it was done. Run it again to continue.")
        child = Child(self._program, setup=self._setup, variables=self._variables)
        self._all.add(child)
        return child


def run_in_copy(work: Callable[[], bytes], *, timeout_secs: float | None) -> bytes:
    """Run `work` in a fork of this process, which its side effects do not reach, and return its result.

    The fork has only the calling thread, so `work` must not wait for another thread or use thread pools that ran before
    the fork.

    Raises:
        ChildEndedError: The fork crashed, raised or timed out.
    """
    parent = os.getpid()
    answer, log = (os.memfd_create(f"cgtool-{name}", os.MFD_CLOEXEC) for name in ("answer", "log"))
    ended, alive = os.pipe()
    child = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of other threads: see above
            child = os.fork()
        if child == 0:
            _run_copy(work, parent, answer, log)
        os.close(alive)
        alive = -1
        code = _wait(child, ended, timeout_secs)
        child = 0
        if code != 0:
            raise ChildEndedError(Ending(code=code, log=_last_lines(log), limit_secs=timeout_secs))
        return os.pread(answer, os.fstat(answer).st_size, 0)
    finally:
        if child:  # interrupted
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for descriptor in (answer, log, ended, alive):
            if descriptor >= 0:
                os.close(descriptor)


def _wait(child: int, ended: int, timeout_secs: float | None) -> int | None:
    """Return the exit code of a fork; kill it and return None if it timed out."""
    watch = select.poll()
    watch.register(ended, 0)  # POLLHUP: the fork holds the other end until it ends, as may other forks of its time
    deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
    while deadline is None or time.monotonic() < deadline:
        left = _POLL_SECS if deadline is None else min(_POLL_SECS, deadline - time.monotonic())
        is_over = bool(watch.poll(max(0.0, left) * 1000))
        pid, status = os.waitpid(child, 0 if is_over else os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run_copy(work: Callable[[], bytes], parent: int, answer: int, log: int) -> NoReturn:
    code = 1
    try:
        import resource  # missing on some systems

        gc.disable()  # a collection would copy every page that it visits
        end_with(parent)
        os.setsid()  # Ctrl-C on the terminal reaches the parent alone
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        faulthandler.enable(log)
        data = work()
        while data:
            data = data[os.write(answer, data) :]
        code = 0
    except BaseException:  # noqa: BLE001 - the parent's own handlers must not run here
        os.write(log, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code)
