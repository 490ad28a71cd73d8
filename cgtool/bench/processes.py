"""Runs one process of a bench to its end, with a time limit, and leaves none of its kin behind.

Must not import torch. Linux: descendants are found in /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: The process looks for modules where this one does, and nowhere else.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cgtool.commands.bench_start import main; sys.exit(main(sys.argv[2:]))"
)
#: How much of a log's end is read to find its last line.
_TAIL_BYTES = 65_536


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended.

    Args:
        code: Its exit code; below 0 the signal that ended it.
        secs: How long it ran.
        timed_out: Whether it was ended because it took too long.
        log: What it printed last.
    """

    code: int
    secs: float
    timed_out: bool
    log: str

    def describe(self, limit_secs: float) -> str:
        """Return why there is no answer, in one line."""
        if self.timed_out:
            return f"it took longer than {limit_secs:g} s and was ended (--timeout gives it more)"
        last = next((line.strip() for line in reversed(self.log.splitlines()) if line.strip()), "")
        how = f"ended by {_signal_name(-self.code)}" if self.code < 0 else f"exit code {self.code}"
        return f"{how}: {last}" if last else how


def run_process(request: Path, *, variables: Mapping[str, str], log: Path, limit_secs: float) -> Ended:
    """Run the program of a request to its end.

    Args:
        request: The request's file.
        variables: The process's whole environment.
        log: Where what it prints goes.
        limit_secs: When it is ended.

    Raises:
        OSError: It cannot be started.
    """
    paths = json.dumps([path or str(Path.cwd()) for path in sys.path])
    with log.open("wb") as sink:
        began = time.monotonic()
        process = subprocess.Popen(  # noqa: S603  this very Python and our own program
            [sys.executable, "-c", _PROGRAM, paths, str(request), repr(began)],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            # Ctrl-C on the terminal reaches the bench alone, which then ends what it started.
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout=limit_secs)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            secs = time.monotonic() - began
            end_family(process)
    return Ended(code=process.returncode, secs=secs, timed_out=timed_out, log=tail_of(log))


def end_family(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and all that came from it; of one that is over, what is left of its session."""
    if process.poll() is None:
        kin = descendants(process.pid)
        process.kill()
        for pid in kin:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # it led a group of its own


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, directly or not; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # pid (name, which may hold anything) state parent ...
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    open_pids = [pid]
    while open_pids:
        born = children.get(open_pids.pop(), [])
        found += born
        open_pids += born
    return found


def tail_of(log: Path) -> str:
    """Return the end of a log as text; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
