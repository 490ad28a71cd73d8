"""One worker process as its pool sees it: start it, give it a folder, wait for the answer, end it. No torch here."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cgtool.build.workers.endings import ended_words, log_tail
from cgtool.build.workers.keeper import GRACE_SECS
from cgtool.build.workers.unit import LOG_FILE
from cgtool.build.workers.worker import READY
from cgtool.errors import WorkerError

#: How long a worker may take to import torch and Inductor, on a machine that is busy.
_START_SECS = 600.0
#: How long a worker's end may lag behind the end of its pipe.
_EXIT_SECS = 5.0
#: A worker finds modules where its parent does; cgtool itself may be one of them.
_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from cgtool.build.workers.worker import main; "
    "raise SystemExit(main(**json.loads(sys.argv[2])))"
)


class WorkerProcess:
    """A worker and everything that it starts: one process group.

    Args:
        log: Where it writes until its first unit, and between units; its folder is all workers' of one pool.
        threads: How many processes Inductor may use for one unit.
        inductor: Whether it imports Inductor before its first unit.
        native: Whether it will write C++ code for the CPU.

    Raises:
        WorkerError: It could not be started.
    """

    def __init__(self, log: Path, *, threads: int, inductor: bool, native: bool) -> None:
        self._log = log
        self._is_ready = False
        self._is_ended = False
        self._ending = threading.Lock()
        path = json.dumps([str(entry) for entry in sys.path])
        options = {"threads": threads, "inductor": inductor, "native": native, "shared": str(log.parent)}
        command = [sys.executable, "-c", _PROGRAM, path, json.dumps(options)]
        try:
            with log.open("ab") as file:
                self._process = subprocess.Popen(  # noqa: S603 - this very Python
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    start_new_session=True,
                )
        except OSError as error:
            raise WorkerError(
                f"A compile worker could not be started: {error}. Try --jobs 0.", actual=str(error)
            ) from error

    @property
    def pid(self) -> int:
        """The process id of the keeper, which is the id of the group."""
        return self._process.pid

    def do(self, folder: Path, *, timeout_secs: float | None) -> None:
        """Have the unit in `folder` done; returns when its result is written.

        Args:
            folder: It holds `unit.json`.
            timeout_secs: How long it may take; None is for ever.

        Raises:
            WorkerError: The worker ended, or the time is over; the worker is gone then.
        """
        if not self._is_ready:
            self._expect(READY, self._log, _START_SECS)
            self._is_ready = True
        self._say(f"{folder}\n", folder / LOG_FILE)
        self._expect(str(folder), folder / LOG_FILE, timeout_secs)

    def stop(self) -> None:
        """Ask the worker and all that it started to end, and do not wait."""
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGTERM)

    def end(self) -> None:
        """End the worker and all that it started, whatever they are doing; any thread may."""
        with self._ending:
            if self._is_ended:
                return
            self._is_ended = True
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECS)
            with contextlib.suppress(OSError):  # who is deaf to SIGTERM; the keeper's number stays the group's
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """End it and let go of its pipes; only where no thread waits for an answer."""
        self.end()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _say(self, line: str, log: Path) -> None:
        if self._process.stdin is None:
            raise WorkerError("A compile worker has no stdin. Please report this.")
        try:
            os.write(self._process.stdin.fileno(), line.encode())
        except OSError:
            raise self._gone(log) from None

    def _expect(self, line: str, log: Path, timeout_secs: float | None) -> None:
        """Wait until the worker says `line`."""
        if self._process.stdout is None:
            raise WorkerError("A compile worker has no stdout. Please report this.")
        descriptor = self._process.stdout.fileno()
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        said = b""
        while not said.endswith(b"\n"):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                self.end()
                raise WorkerError(
                    f"it took longer than {timeout_secs:g} s (--compile-timeout) and was ended. Give it more time, or "
                    f"look where it hung{_shown(log)}",
                    path=log,
                )
            more = os.read(descriptor, 65536)
            if not more:
                raise self._gone(log)
            said += more
        if said != f"{line}\n".encode():
            self.end()
            raise WorkerError(f"its worker said {said[:200]!r} and not {line!r}. Please report this", path=log)

    def _gone(self, log: Path) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECS)
        self.end()
        return WorkerError(f"{ended_words(self._process.returncode)}{_shown(log)}", path=log)


def _shown(log: Path) -> str:
    tail = log_tail(log)
    return f". Its log ends with:{tail}" if tail else "; its log is empty"
