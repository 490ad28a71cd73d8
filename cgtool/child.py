"""The child's half of `cgtool.processes`: what it and its parent say to each other, and what leaves nothing running.

A child serves one program, a function that takes a `Channel`: one end of a pair of sockets. A request, a note and an
answer are each a record with bytes beside it::

    1 byte      what it is: "r" ready, "q" request, "n" note, "a" answer, "l" last answer: the child ends
    8, 8 bytes  length of the record and of the bytes, big endian
    record      JSON; nothing for "r"
    bytes       an artifact, or nothing

Above each child stands a keeper, a small process that leads a session: the child is forked off it before torch is
imported. It ends the child and all that came from it, in whatever session, when the parent ends or lets go of its
socket, and when the child ends; then it ends in the same way as the child, so that the parent, which waits for the
keeper, learns of the signal. Processes are asked to end (SIGTERM) before they are killed: a compiler that is cut short
in writing a precompiled header would spoil every later compile on this machine.

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
#: How long a process that was asked to end has before it is killed.
GRACE_SECS = 1.0
#: How often a keeper checks whether it was orphaned, in case its socket does not tell, in milliseconds.
_LOOK_MS = 1000
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
        """Say that the child is ready, and yield each request with the bytes beside it until the parent lets go."""
        self.send(READY)
        while True:
            try:
                _, record, data = self.receive()
            except (EOFError, OSError):
                return
            yield decode(record, kind), data

    def note(self, record: Record) -> None:
        """Say something before the answer."""
        self.send(NOTE, record)

    def answer(self, record: Record, data: bytes = b"", *, last: bool = False) -> None:
        """Answer a request; the program ends after its last answer."""
        self.send(LAST if last else ANSWER, record, data)

    # both sides

    def send(
        self, kind: bytes, record: Record | None = None, data: bytes = b"", *, deadline: float | None = None
    ) -> None:
        """Send one message; `kind` is one of the head of this module, and no deadline waits for ever.

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
        """Return what the next message is, its record and the bytes beside it.

        Raises:
            TimeoutError: The deadline passed.
            EOFError: The other end is gone.
            OSError: The other end is gone.
        """
        kind, record_bytes, data_bytes = _HEAD.unpack(self._exactly(_HEAD.size, deadline))
        return kind, self._exactly(record_bytes, deadline), self._exactly(data_bytes, deadline)

    def hang_up(self) -> None:
        """Let the other end know that nothing more is said or heard; any thread may."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _exactly(self, num_bytes: int, deadline: float | None) -> bytes:
        found = bytearray()
        while len(found) < num_bytes:
            self._sock.settimeout(_remaining(deadline))
            part = self._sock.recv(min(num_bytes - len(found), _CHUNK_BYTES))
            if not part:
                raise EOFError
            found += part
        return bytes(found)


def _remaining(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def serve(descriptor: int, program: str) -> None:
    """Be a child, with one end of a pair of sockets: what the command line of one calls."""
    _split_off(descriptor)
    faulthandler.enable()
    module, _, function = program.partition(":")
    with socket.socket(fileno=descriptor) as sock:
        getattr(importlib.import_module(module), function)(Channel(sock))


def _split_off(lifeline: int) -> None:
    """Fork: the child returns, the parent stays as its keeper and never returns."""
    import resource  # not on every system

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer here, and its core gigabytes
    above, keeper = os.getppid(), os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ended, alive = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ended)  # the other end stays open in the child until it ends, and tells the keeper of that
        end_with(keeper)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # that the keeper is gone means that all are
    os.close(alive)
    _keep(child, ended=ended, lifeline=lifeline, above=above)


def end_with(parent: int) -> None:
    """Have this process killed when the thread that forked it ends, or end it now where that happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _keep(child: int, *, ended: int, lifeline: int, above: int) -> NoReturn:
    watch = select.poll()
    watch.register(lifeline, 0)  # POLLHUP alone: what is said there is the child's
    watch.register(ended, 0)
    while True:
        happened = {descriptor for descriptor, _ in watch.poll(_LOOK_MS)}
        found, status = os.waitpid(child, 0 if ended in happened else os.WNOHANG)
        if found:
            _end_descendants()
            _end_as(os.waitstatus_to_exitcode(status))
        if lifeline in happened or os.getppid() != above:
            _end_descendants()
            os._exit(1)


def _end_descendants() -> None:
    """Ask all descendants to end, kill those that do not, and reap them: this process adopts orphans."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
        deadline = time.monotonic() + GRACE_SECS
        with contextlib.suppress(ChildProcessError):  # nobody is left
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
    """Return the processes that a process started, directly or not; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # pid (name, which may hold anything) state parent ...
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    seen = [pid]
    while seen:
        born = children.get(seen.pop(), [])
        found += born
        seen += born
    return found


def _prctl(option: int, value: int) -> None:
    """Set one attribute of this process; where libc has no prctl, only the keeper's own checks remain."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)
