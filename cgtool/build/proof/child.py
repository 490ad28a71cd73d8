"""The parent's handle on the process that proves: start, ask, end. Must not import torch.

The child ends with its parent, whatever the parent dies of: it holds the reading end of a pipe whose writing end only
the parent has, and the kernel sends it SIGKILL when that closes. Its words go into a file in memory.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from cgtool.build.proof.protocol import receive, send

#: Imports of torch are slow on a busy machine.
_START_SECS = 600.0
_END_SECS = 5.0
_NUM_LAST_LINES = 12
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from cgtool.build.proof.serve import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class ChildGoneError(Exception):
    """The child ended, or did not answer in time.

    Attributes:
        stage: What it was at.
        code: Its exit code, negative for a signal; None where it did not answer in time and was ended.
        lines: The last lines that it wrote.
    """

    def __init__(self, *, stage: str, code: int | None, lines: tuple[str, ...]) -> None:
        super().__init__(stage)
        self.stage = stage
        self.code = code
        self.lines = lines

    @property
    def signal_name(self) -> str | None:
        """The signal that ended it, as "SIGSEGV"."""
        if self.code is None or self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


class Child:
    """A running child; one request at a time. It is not waited for until the first request."""

    def __init__(self) -> None:
        self._words = os.memfd_create("cgtool-proof", os.MFD_CLOEXEC)
        self._sock, theirs = socket.socketpair()
        life, self._life = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this very Python
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno()), str(life)],
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                pass_fds=(theirs.fileno(), life),
                # Ctrl-C is the parent's to handle
                start_new_session=True,
            )
        except BaseException:
            self._sock.close()
            os.close(self._life)
            os.close(self._words)
            raise
        finally:
            theirs.close()
            os.close(life)
        self._ready = False

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, head: dict[str, Any], body: bytes, *, timeout_secs: float | None) -> dict[str, Any]:
        """Send a request and return its answer.

        Args:
            head: The request.
            body: The artifact.
            timeout_secs: How long it may take once the child is ready; None is no limit.

        Raises:
            ChildGoneError: The child died or did not answer; it is no more.
        """
        stage = "start"
        try:
            if not self._ready:
                receive(self._sock, deadline=time.monotonic() + _START_SECS)
                self._ready = True
            stage = "open"
            os.ftruncate(self._words, 0)
            os.lseek(self._words, 0, os.SEEK_SET)
            deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
            send(self._sock, head, body, deadline=deadline)
            while True:
                reply, _ = receive(self._sock, deadline=deadline)
                if "stage" not in reply:
                    return reply
                stage = reply["stage"]
        except TimeoutError:
            self.end()
            raise ChildGoneError(stage=stage, code=None, lines=self._last_lines()) from None
        except (EOFError, OSError):
            code = self._wait()
            raise ChildGoneError(stage=stage, code=code, lines=self._last_lines()) from None

    def end(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it and let go of what it held."""
        self.end()
        self._sock.close()
        os.close(self._life)
        os.close(self._words)

    def _wait(self) -> int:
        try:
            return self._process.wait(_END_SECS)
        except subprocess.TimeoutExpired:  # it closed its end and lives
            self.end()
            return self._process.returncode

    def _last_lines(self) -> tuple[str, ...]:
        size = os.fstat(self._words).st_size
        text = os.pread(self._words, 1 << 14, max(0, size - (1 << 14))).decode(errors="replace")
        return tuple(line for line in text.splitlines() if line.strip())[-_NUM_LAST_LINES:]
