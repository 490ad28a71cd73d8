"""Real system calls of a process, counted, failed or killed at one by one with strace.

The process is a fork of this one, which has imported everything already. It waits until strace is attached, which then
counts the calls of each name per thread. A fault for a call of the first thread applies to that thread only; one for a
call of another thread applies to the call of that number in every thread and process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import posix
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

#: Calls that change files.
CHANGES = (
    "write,pwrite64,writev,sendfile,copy_file_range,ftruncate,fallocate,fsync,fdatasync,rename,renameat,renameat2,"
    "link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir,mkdir,mkdirat,chmod,fchmod,fchmodat,utimensat"
)
#: Calls that also read files.
ALL = f"{CHANGES},openat,read,pread64,newfstatat,statx,getdents64,mmap"

_FLUSHES = ("fsync", "fdatasync")
#: A failed call, or a file that is opened without being created.
_IDLE = re.compile(r"= -1 E[A-Z]+ \([^)]*\)$|^AT_FDCWD(?!.*\bO_CREAT\b).*\bO_(RDONLY|RDWR|WRONLY)\b")
_LINE = re.compile(r"^(?P<pid>\d+) +(?P<name>\w+)\((?P<arguments>.*)$")
_PR_SET_PTRACER = 0x59616D61
_ATTACH_SECS = 20.0
#: SIGALRM ends hanging actions.
_MOST_SECS = 600
#: strace sometimes fails to attach without giving a reason.
_ATTEMPTS = 2


@dataclass(frozen=True, kw_only=True)
class Call:
    """One system call: the `nth` of its name in its thread, from 1 on, and what strace wrote of it."""

    name: str
    nth: int
    is_first_thread: bool = True
    text: str = field(default="", compare=False)

    @property
    def changed(self) -> bool:
        """Whether it changed files that others see."""
        return self.name not in _FLUSHES and not _IDLE.search(self.text)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended: its exit code, or minus the signal that ended it, and what it wrote to standard error."""

    pid: int
    code: int
    said: str

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.code == -signal.SIGKILL


def ended_of(action: Callable[[], object]) -> Ended:
    """Run an action in a fork."""
    with tempfile.TemporaryFile() as words:
        child, go = _forked(action, words.fileno())
        os.write(go, b"!")
        os.close(go)
        _, status = os.waitpid(child, 0)
        words.seek(0)
        code = os.waitstatus_to_exitcode(status)
        return Ended(pid=child, code=code, said=words.read().decode(errors="replace"))


def calls_of(action: Callable[[], object], *, names: str = CHANGES, under: Path | None = None) -> list[Call]:
    """Run an action in a fork and return its system calls in order, without duplicates.

    Args:
        action: The action, which must complete.
        names: The calls to count, by strace's names.
        under: Count only calls that name a file below this folder; None counts all.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ended = _run(action, ["-f", "-y", "-s", "4096", "-o", str(log), "-e", f"trace={names}"])
        if ended.code != 0:
            raise AssertionError(f"ended with {ended.code}: {ended.said}")
        text = log.read_text(errors="replace")
    seen: Counter[tuple[int, str]] = Counter()
    found: dict[Call, None] = {}
    for match in filter(None, map(_LINE.match, text.splitlines())):
        pid, name, text = int(match["pid"]), match["name"], match["arguments"]
        seen[pid, name] += 1
        if under is None or str(under) in text:
            found[Call(name=name, nth=seen[pid, name], is_first_thread=pid == ended.pid, text=text)] = None
    return list(found)


def killed_at(call: Call, action: Callable[[], object]) -> bool:
    """Run an action in a fork that is killed instead of making a call.

    Returns:
        Whether it was killed; False if it completed without making the call.
    """
    ended = _run(action, _inject(call, "signal=KILL"))
    if ended.code not in (0, -signal.SIGKILL):
        raise AssertionError(f"{call}: ended with {ended.code}: {ended.said}")
    return ended.was_killed


def each_kill(start: Path, work: Path, action: Callable[[], object], *, stride: int = 1) -> Iterator[Call]:
    """Kill an action at each system call by which it changes a folder, and yield the call.

    Of several calls without a change between them (the later one failed, or flushed), only the first is used.

    Args:
        start: The folder before the action; it may be missing.
        work: The copy of it that the action works on.
        action: The action.
        stride: 1 yields every call, 7 every seventh.
    """
    copy_anew(start, work)
    calls = calls_of(action, names=f"{CHANGES},openat", under=work)
    after_change = [
        call for before, call in zip([None, *calls], calls, strict=False) if before is None or before.changed
    ]
    for call in after_change[::stride]:
        copy_anew(start, work)
        if not killed_at(call, action):
            raise AssertionError(f"{call} was not made again")
        yield call


def copy_anew(start: Path, work: Path) -> None:
    """Replace a folder by a copy with the links between its files; the source may be missing."""
    shutil.rmtree(work, ignore_errors=True)
    if start.exists():
        subprocess.run(["cp", "-a", start, work], check=True)


def failed_at(call: Call, error: str, action: Callable[[], object]) -> Ended:
    """Run an action in a fork in which a call fails.

    Args:
        call: The call.
        error: The error, such as "EIO".
        action: The action; an exception is printed and ends the fork with 1.
    """
    with tempfile.NamedTemporaryFile("r") as log:
        ended = _run(action, _inject(call, f"error={error}", log=log.name))
        if "(INJECTED)" not in log.read():
            raise AssertionError(f"{call} was not made again")
    return ended


def _inject(call: Call, what: str, *, log: str = "/dev/null") -> list[str]:
    inject = ["-o", log, "-e", f"trace={call.name}", "-e", f"inject={call.name}:{what}:when={call.nth}"]
    return inject if call.is_first_thread else ["-f", *inject]


def _run(action: Callable[[], object], options: list[str]) -> Ended:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("there is no strace")
    said = ""
    for _ in range(_ATTEMPTS):
        with tempfile.TemporaryFile() as words:
            child, code, said = _traced(action, [strace, "-q", *options], words.fileno())
            if code is not None:
                words.seek(0)
                return Ended(pid=child, code=code, said=words.read().decode(errors="replace"))
    if "not permitted" in said:
        pytest.skip(f"nothing may be traced here: {said}")
    raise AssertionError(f"strace could not be attached: {said}")


def _traced(action: Callable[[], object], tracer: list[str], words: int) -> tuple[int, int | None, str]:
    """Run an action under strace; return its process, how it ended or None, and why strace could not be attached."""
    child, go = _forked(action, words)
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*tracer, "-p", str(child)], stdin=quiet, stdout=quiet, stderr=subprocess.PIPE)
    status = None
    try:
        if _is_attached(child, process):
            os.write(go, b"!")
            _, status = os.waitpid(child, 0)
    finally:
        os.close(go)
        if status is None:
            os.kill(child, signal.SIGKILL)
            process.kill()
            os.waitpid(child, 0)
        _, said = process.communicate()
    code = None if status is None else os.waitstatus_to_exitcode(status)
    return child, code, said.decode(errors="replace").strip()


def _forked(action: Callable[[], object], words: int) -> tuple[int, int]:
    """Return a fork that is about to wait for a byte to run `action` at, and where to write the byte."""
    wait, go = os.pipe()
    ready, say = os.pipe()
    child = os.fork()
    if child:
        os.close(wait)
        os.close(say)
        os.read(ready, 1)
        os.close(ready)
        return child, go
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_MOST_SECS)
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
        os.close(go)
        os.dup2(words, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        os.fsync = posix.fsync  # conftest.py disables it
        # From here on calls are counted; the one in which strace finds it is so at times, and nobody asks for it.
        os.close(say)
        select.select([wait], [], [])
        action()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001 - nothing may run on as the parent's twin
        code = 1
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def _is_attached(child: int, tracer: subprocess.Popen[bytes]) -> bool:
    """Wait until strace has attached to the process and all its threads."""
    end = time.monotonic() + _ATTACH_SECS
    while time.monotonic() < end and tracer.poll() is None:
        tracers = list(_tracers(child))
        if tracers and all(tracers):
            return True
        time.sleep(0.001)
    return False


def _tracers(child: int) -> Iterator[int]:
    for status in Path(f"/proc/{child}/task").glob("*/status"):
        match = re.search(r"^TracerPid:\s*(\d+)$", status.read_text(), re.MULTILINE)
        yield int(match[1]) if match else 0
