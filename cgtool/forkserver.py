"""A fork server: a process that has imported what children need, and forks them off itself, each in no time.

A dozen processes that import torch and Inductor beside each other take half a minute of a large machine's start; one
takes seconds, and its copies share their memory. multiprocessing has such a server, too; its children run the user's
main script once more, and nothing of what they start ends with them.

Both halves are here: `ForkServer` is the parent's, `main` the program of the process. Must not import torch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn, Self

from cgtool.child import Channel, serve
from cgtool.host import change_variables, changed_variables, child_variables
from cgtool.plan.grammar import Record
from cgtool.processes import Child

#: What libraries set as they are imported, and read again whenever they need it.
_SET_BY_LIBRARIES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"})

#: How long the process may take to fork, which it does once its imports are done.
_FORK_SECS = 60.0
#: What the children of a warm import: they trace variants and compile pieces.
OF_A_WARM = ("cgtool.compiler.tracers", "cgtool.compiler.worker", "torch._inductor.compile_fx")


class Modules(Record, frozen=True, kw_only=True):
    """What the process is to import before it forks."""

    names: tuple[str, ...]


class ForkRequest(Record, frozen=True, kw_only=True):
    """A child to fork; three open files follow: its end of a connection, its log, and where its keeper reports."""

    program: str
    paths: tuple[str, ...]
    #: Variables of the environment that were set since the server began, or removed: those are None.
    variables: dict[str, str | None]


class Forked:
    """A keeper that a fork server forked, asked as a `subprocess.Popen` is.

    It is no child of this process, so it writes its process id, and then its exit code, into a pipe.
    """

    def __init__(self, reports: int) -> None:
        self.returncode: int | None = None
        self._reports = reports
        self._said = b""
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Its process id.

        Raises:
            ProcessLookupError: It was not forked, in a minute or at all.
        """
        with self._lock:
            while b"\n" not in self._said and self.returncode is None and self._hear(_FORK_SECS):
                pass
            first, line_end, _ = self._said.partition(b"\n")
        if not line_end:
            raise ProcessLookupError("the child was not forked")
        return int(first)

    def poll(self) -> int | None:
        """Return its exit code where it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, for so many seconds at most, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: It goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self.returncode is None:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._hear(left):
                    raise subprocess.TimeoutExpired("a forked child", timeout or 0.0)
            return self.returncode

    def _hear(self, timeout: float | None) -> bool:
        """Read what the keeper says next, if it says anything in time."""
        watch = select.poll()
        watch.register(self._reports, select.POLLIN)
        if not watch.poll(None if timeout is None else timeout * 1000):
            return False
        said = os.read(self._reports, 64)
        self._said += said
        if not said:  # of a keeper that was killed there is no code
            _, _, code = self._said.partition(b"\n")
            self.returncode = int(code) if code else -signal.SIGKILL
            os.close(self._reports)
        return True


class ForkServer:
    """Forks children off one process that has imported modules. Any thread may ask; leaving its `with` block ends it.

    Args:
        modules: What is imported; one that is missing is left to the child that wants it.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._variables: dict[str, str] = {}
        self._folder = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Have the process begin with its imports, if it did not.

        Raises:
            OSError: It cannot be started.
        """
        with self._lock:
            self._started()

    def fork(self, program: str, *, connection: int, log: int) -> Forked | None:
        """Have a child forked that serves a program, with these open files; return at once.

        None means that a fork would not be what a fresh process is: something changed of what this one would hand on.

        Raises:
            OSError: The process cannot be started.
        """
        with self._lock:
            server, changed = self._started(), self._changed()
            if changed is None or not server.is_alive:
                return None
            paths = tuple(str(entry) or self._folder for entry in sys.path)
            request = ForkRequest(program=program, paths=paths, variables=changed)
            reports, theirs = os.pipe()
            try:
                server.hand(request, (connection, log, theirs))
            except (ConnectionError, UnicodeError):  # it ended just now; a path is not UTF-8
                os.close(reports)
                return None
            finally:
                os.close(theirs)
            return Forked(reports)

    def close(self) -> None:
        """End the process, and every child that it forked and nobody ended."""
        with self._lock:
            if self._child is not None:
                self._child.close()
                self._child = None

    def _started(self) -> Child:
        if self._child is None:
            self._variables, self._folder = child_variables({}), _folder()
            self._child = Child("cgtool.forkserver:main", setup=Modules(names=self._modules))
        return self._child

    def _changed(self) -> dict[str, str | None] | None:
        """Return what of the environment changed since the process began; None where it may matter to imports."""
        changed = changed_variables(self._variables)
        are_read_late = all(name in _SET_BY_LIBRARIES or name.startswith("CGTOOL_") for name in changed)
        return changed if are_read_late and _folder() == self._folder else None


def _folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # it was removed
        return ""


def main(channel: Channel) -> None:
    """Import, then fork children until the parent lets go."""
    for name in channel.setup(Modules).names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page that it looks at
    for request, _ in channel.requests(ForkRequest):
        files = channel.files()
        with contextlib.suppress(ChildProcessError):  # there is none yet
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass  # keepers tell how they ended by themselves
        if os.fork() == 0:
            _be_child(channel, request, *files)
        for descriptor in files:
            os.close(descriptor)


def _be_child(channel: Channel, request: ForkRequest, connection: int, log: int, reports: int) -> NoReturn:
    code = 1
    try:
        channel.leave()
        os.setsid()  # as a child that is started leads a session
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        change_variables(request.variables)
        sys.path[:] = request.paths
        serve(connection, request.program, reports)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing of the server's may run here once more
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
