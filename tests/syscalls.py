"""Real system calls of a real process: counted, failed, and died at, one after the other, by strace.

The process is a fork of this one, so what it needs is imported already. It waits until strace is attached to it, and
strace counts the calls of each name in each thread from there on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

#: Calls that change what lies on a disk.
CHANGES = (
    "write,pwrite64,writev,sendfile,copy_file_range,ftruncate,fallocate,fsync,fdatasync,rename,renameat,renameat2,"
    "link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir,mkdir,mkdirat,chmod,fchmod,fchmodat,utimensat"
)
#: Calls that also look at it.
ALL = f"{CHANGES},openat,read,pread64,newfstatat,statx,getdents64,mmap"

_LINE = re.compile(r"^(?P<pid>\d+) +(?P<name>\w+)\((?P<arguments>.*)$")
_PR_SET_PTRACER = 0x59616D61
_ATTACH_SECS = 20.0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One system call: the `nth` of its name in its thread, from 1 on."""

    name: str
    nth: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended: its exit code, or minus the signal that ended it, and what it wrote to standard error."""

    code: int
    said: str

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.code == -signal.SIGKILL


def calls_of(action: Callable[[], object], *, names: str = CHANGES, under: Path | None = None) -> list[Call]:
    """Run an action in a fork and return the system calls that it makes, each once, in their order.

    Args:
        action: What is run; it must come to its end.
        names: The calls that count, as strace names them.
        under: Only those that name a file below this folder; None takes all.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ended = _run(action, ["-y", "-s", "4096", "-o", str(log), "-e", f"trace={names}"])
        if ended.code != 0:
            raise AssertionError(f"ended with {ended.code}: {ended.said}")
        text = log.read_text(errors="replace")
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[Call, None] = {}
    for match in filter(None, map(_LINE.match, text.splitlines())):
        seen[match["pid"], match["name"]] += 1
        if under is None or str(under) in match["arguments"]:
            found[Call(name=match["name"], nth=seen[match["pid"], match["name"]])] = None
    return list(found)


def killed_at(call: Call, action: Callable[[], object]) -> bool:
    """Run an action in a fork that gets SIGKILL instead of making a call.

    Returns:
        Whether it was killed; False where it came to its end without making the call.
    """
    ended = _run(action, ["-o", "/dev/null", *_inject(call, "signal=KILL", call.nth)])
    if ended.code not in (0, -signal.SIGKILL):
        raise AssertionError(f"{call}: ended with {ended.code}: {ended.said}")
    return ended.was_killed


def failed_at(call: Call, error: str, action: Callable[[], object], *, lasting: bool = False) -> Ended:
    """Run an action in a fork in which a call fails.

    Args:
        call: The call.
        error: How, such as "EIO".
        action: What is run; an exception that it raises ends the fork with 1 and is printed.
        lasting: Whether all later calls of that name fail too.
    """
    when = f"{call.nth}+" if lasting else call.nth
    return _run(action, ["-o", "/dev/null", *_inject(call, f"error={error}", when)])


def _inject(call: Call, what: str, when: object) -> list[str]:
    return ["-e", f"trace={call.name}", "-e", f"inject={call.name}:{what}:when={when}"]


def _run(action: Callable[[], object], options: list[str]) -> Ended:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("there is no strace")
    with tempfile.TemporaryFile() as words:
        child, go = _forked(action, words.fileno())
        tracer = subprocess.Popen(
            [strace, "-f", "-q", *options, "-p", str(child)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            if not _is_attached(child, tracer):
                tracer.kill()
                pytest.skip(f"nothing may be traced here: {_said(tracer)}")
            os.write(go, b"!")
            _, status = os.waitpid(child, 0)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        finally:
            os.close(go)
            _said(tracer)
        words.seek(0)
        return Ended(code=os.waitstatus_to_exitcode(status), said=words.read().decode(errors="replace"))


def _said(tracer: subprocess.Popen[bytes]) -> str:
    """Wait for the end of strace and return what it complained of, the first time."""
    tracer.wait()
    stream = tracer.stderr
    if stream is None or stream.closed:
        return ""
    with stream:
        return stream.read().decode(errors="replace").strip()


def _forked(action: Callable[[], object], words: int) -> tuple[int, int]:
    """Return a fork that runs `action` as soon as a byte comes, and where to write the byte."""
    wait, go = os.pipe()
    child = os.fork()
    if child:
        os.close(wait)
        return child, go
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
        os.close(go)
        os.dup2(words, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        os.read(wait, 1)
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
    """Wait until strace has the process, and all its threads."""
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
