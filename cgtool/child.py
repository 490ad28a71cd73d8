"""The child's side of `cgtool.processes`: the protocol, and the keeper that leaves no process behind.

A child runs a program: a function that takes a `Channel`, one end of a socket pair. Requests, notes and answers are
messages of one form::

    1 byte      kind: "r" ready, "q" request, "n" note, "a" answer, "l" last answer, after which the child exits
    8, 8 bytes  lengths of the record and of the data, big endian
    record      JSON; empty for "r"
    data        an artifact, or empty

Each child has a keeper, a small process that leads a session and forks the child before torch is imported. When the
child ends, and when the parent ends or closes its socket, the keeper ends the child and all its descendants, in any
session. It then exits with the child's exit code or signal, for the parent, which waits for the keeper. Processes get
SIGTERM before SIGKILL: a compiler that is killed while it writes a precompiled header would break every later compile
on this machine.

Must not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from cgtool.plan.grammar import Record, decode, encode

READY, REQUEST, NOTE, ANSWER, LAST = b"r", b"q", b"n", b"a", b"l"
#: The time between SIGTERM and SIGKILL.
GRACE_SECS = 1.0
#: How often a keeper checks whether it was orphaned, in case its socket does not report it, in milliseconds.
_POLL_MS = 1000
_HEAD = struct.Struct(">cQQ")
_CHUNK_BYTES = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_Given = TypeVar("_Given", bound=Record)


class Channel:
    """One end of the connection between a parent and its child."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    # the child's side

    def setup(self, kind: type[_Given]) -> _Given:
        """Return the setup that the parent sent."""
        return decode(self.receive()[1], kind)

    def requests(self, kind: type[_Given]) -> Iterator[tuple[_Given, bytes]]:
        """Report that the child is ready, then yield each request and its data until the parent hangs up."""
        self.send(READY)
        while True:
            try:
                _, record, data = self.receive()
            except (EOFError, OSError):
                return
            yield decode(record, kind), data

    def note(self, record: Record) -> None:
        """Send a note before the answer."""
        self.send(NOTE, record)

    def answer(self, record: Record, data: bytes = b"", *, last: bool = False) -> None:
        """Answer a request; the program exits after its last answer."""
        self.send(LAST if last else ANSWER, record, data)

    # both sides

    def send(
        self, kind: bytes, record: Record | None = None, data: bytes = b"", *, deadline: float | None = None
    ) -> None:
        """Send a message.

        Args:
            kind: READY, REQUEST, NOTE, ANSWER or LAST.
            record: The record; None sends an empty one.
            data: The data.
            deadline: A time on the clock of `time.monotonic`; None waits without limit.

        Raises:
            TimeoutError: The deadline passed.
            OSError: The other end is gone.
        """
        text = b"" if record is None else encode(record)
        self._sock.settimeout(_remaining(deadline))
        self._sock.sendall(_HEAD.pack(kind, len(text), len(data)) + text)
        if data:
            self._sock.settimeout(_remaining(deadline))
            self._sock.sendall(data)

    def receive(self, *, deadline: float | None = None) -> tuple[bytes, bytes, bytes]:
        """Return the kind, record and data of the next message.

        Raises:
            TimeoutError: The deadline passed.
            EOFError: The other end is gone.
            OSError: The other end is gone.
        """
        kind, record_bytes, data_bytes = _HEAD.unpack(self._exactly(_HEAD.size, deadline))
        return kind, self._exactly(record_bytes, deadline), self._exactly(data_bytes, deadline)

    def hang_up(self) -> None:
        """Shut the connection down in both directions. Thread-safe."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _exactly(self, num_bytes: int, deadline: float | None) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            self._sock.settimeout(_remaining(deadline))
            part = self._sock.recv(min(num_bytes - len(received), _CHUNK_BYTES))
            if not part:
                raise EOFError
            received += part
        return bytes(received)


def _remaining(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def serve(descriptor: int, program: str) -> None:
    """Run as a child, with the socket `descriptor`; the entry point of a child's command line."""
    _split_off(descriptor)
    faulthandler.enable()
    module, _, function = program.partition(":")
    with socket.socket(fileno=descriptor) as sock:
        getattr(importlib.import_module(module), function)(Channel(sock))


def _split_off(lifeline: int) -> None:
    """Fork: the child returns, and the parent becomes its keeper and never returns."""
    import resource  # missing on some systems

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected, and core dumps take gigabytes
    above, keeper = os.getppid(), os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ended, alive = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ended)  # the other end stays open until the child ends, which the keeper then notices
        end_with(keeper)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the keeper must be the last to end
    os.close(alive)
    _keep(child, ended=ended, lifeline=lifeline, above=above)


def end_with(parent: int) -> None:
    """Have this process killed when the thread that forked it ends; exit now if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _keep(child: int, *, ended: int, lifeline: int, above: int) -> NoReturn:
    watch = select.poll()
    watch.register(lifeline, 0)  # POLLHUP only: messages are for the child
    watch.register(ended, 0)
    while True:
        hung_up = {descriptor for descriptor, _ in watch.poll(_POLL_MS)}
        pid, status = os.waitpid(child, 0 if ended in hung_up else os.WNOHANG)
        if pid:
            _end_descendants()
            _end_as(os.waitstatus_to_exitcode(status))
        if lifeline in hung_up or os.getppid() != above:
            _end_descendants()
            os._exit(1)


def _end_descendants() -> None:
    """Terminate all descendants, kill those that remain, and reap them; this process adopts orphans."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
        deadline = time.monotonic() + GRACE_SECS
        with contextlib.suppress(ChildProcessError):  # none is left
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.005)


def _end_as(code: int) -> NoReturn:
    """End this process as its child ended."""
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's descendants; [] without /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # pid (name, which may contain anything) state parent ...
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    result: list[int] = []
    pending = [pid]
    while pending:
        started = children.get(pending.pop(), [])
        result += started
        pending += started
    return result


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Without prctl in libc, only the keeper's own checks remain."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)
