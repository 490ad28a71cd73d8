"""Runs the installed command quickly, in forks of processes that have already imported what it needs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPO = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "cgtool")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The result of a run."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> Any:
        """The JSON on stdout, which must not contain anything else."""
        return json.loads(self.out)


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with cgtool from this checkout, 80 columns, and `changes`."""
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "80", **changes}


#: The values of PYTHONPATH for which there is a server process.
_kept: set[str] = set()


def keep(env: dict[str, str]) -> dict[str, str]:
    """Run commands with this environment in forks of a server with its PYTHONPATH; return the environment."""
    _kept.add(env["PYTHONPATH"])
    return env


def needs_fresh_process(env: Mapping[str, str] | None) -> bool:
    """Return whether a variable affects the start of Python or torch, and there is no server that started with it."""
    decide = {name: value for name, value in (env or {}).items() if name.startswith(("PYTHON", "TORCH", "TRITON"))}
    return not (decide.keys() <= {"PYTHONPATH"} and decide.get("PYTHONPATH") in {None, *_kept})


def run(*arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, forks: bool = False) -> Ran:
    """Run `cgtool` to its end in its own process: a fork of one that has imported the slow modules.

    A variable that Python or torch reads at start-up needs a fresh process. With `forks`, its children are forks, too.
    """
    words = [str(argument) for argument in arguments]
    if needs_fresh_process(env):
        done = subprocess.run(
            [*COMMAND, *words],
            cwd=cwd,
            env=environment(**(env or {})),
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )
        return Ran(code=done.returncode, out=done.stdout, err=done.stderr)
    server = _server_for(words, env)
    return server.run(
        "cgtool", cwd or Path.cwd(), environment(**(env or {})), words, *[server.requests.fileno()] * forks
    )


def forked(
    source: str,
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    compiles: bool = False,
) -> Ran:
    """Run a Python program to its end in a fork of a process that has imported torch.

    Args:
        source: The program.
        arguments: `sys.argv` from 1 on.
        cwd: Its working directory.
        env: Its complete environment, without effect on the start of Python and torch; None means that of this process.
        compiles: Whether the forked process has imported Dynamo, too.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(source)
        program.flush()
        words = [str(argument) for argument in arguments]
        forks = server(None, with_torch=True) if compiles else torch_server()
        return forks.run(program.name, cwd or Path.cwd(), environment() if env is None else env, words)


@functools.cache
def torch_server() -> Server:
    """Return the server that runs programs in forks of a process with torch and the runtime, without the compiler."""
    return Server("torch", "cgtool.models", "cgtool.api", "cgtool.runtime.find", "cgtool.runtime.generate")


def start(*arguments: object, env: Mapping[str, str] | None = None) -> Running:
    """Start `cgtool` in a new session, for tests that send signals; forked as by `run`."""
    words = [str(argument) for argument in arguments]
    return _server_for(words, env).start("cgtool", Path.cwd(), environment(**(env or {})), words)


def _server_for(words: list[str], env: Mapping[str, str] | None) -> Server:
    path = (env or {}).get("PYTHONPATH")
    traces = words[:1] in (["warm"], ["why"], ["check"], ["bench"]) and "--help" not in words
    return server(path, with_torch=traces or path is not None)


_LIGHT = ("cgtool.cli.main", "rich.console", "rich.table", "rich.text", "cgtool.cli.inspect", "cgtool.toolkit.listing")
#: The imports of a command that traces, and those of Dynamo's first trace: 500 modules.
HEAVY = (
    *("cgtool.cli.main", "torch", "torch._dynamo", "cgtool.models", "cgtool.compiler.pipeline"),
    *("cgtool.cli.warm", "cgtool.toolkit.warm", "cgtool.compiler.stitch", "cgtool.compiler.tracers", "rich.text"),
    *("torch._dynamo.backends.inductor", "torch._dynamo.backends.debugging", "torch._dynamo.backends.distributed"),
    *("torch._dynamo.backends.tvm", "torch._dynamo.testing", "torch._dynamo.repro.after_dynamo", "sympy.tensor.tensor"),
    *("torch._functorch.partitioners", "torch.distributed.tensor.experimental", "torch.export._trace"),
    *("torch._inductor.codecache", "torch._inductor.sizevars", "torch.nn.attention.flex_attention"),
)

_SERVE = """
import contextlib, gc, importlib, json, os, runpy, select, socket, sys, tempfile, threading
sys.path.insert(0, sys.argv[1])
import cli_harness
del sys.path[0]
for name in sys.argv[2:]:
    with contextlib.suppress(ImportError):  # missing in some versions of torch
        importlib.import_module(name)
gc.freeze()
gc.disable()  # forks are short-lived
os.fsync = lambda descriptor: None  # as in conftest.py

def begin(program, cwd, variables, arguments, out, err, alone, descriptors):
    child = os.fork()
    if child:
        return child
    streams = [os.open(os.devnull, os.O_RDONLY), *(os.open(path, os.O_WRONLY) for path in (out, err) if path)]
    if program == "child":
        streams += descriptors[1], descriptors[1]
    elif program != "cgtool" and descriptors:
        streams[:2] = descriptors * 2
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
    if alone:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # set by a variable
    added = [one for one in variables.get("PYTHONPATH", "").split(os.pathsep) if one not in {"", *sys.path}]
    sys.path[1:1] = added
    for descriptor in descriptors[:1] if program == "cgtool" else descriptors[2:3]:
        cli_harness.fork_children(socket.socket(fileno=descriptor))
    if program == "cgtool":
        from cgtool.cli.main import main
        sys.argv[:] = ["cgtool", *arguments]
        code = main()
    elif program == "child":
        from cgtool.child import serve
        sys.path[:] = json.loads(arguments[0])
        serve(descriptors[0], arguments[1])
        code = 0
    else:
        sys.argv[:] = [program, *arguments]
        sys.path[0] = os.path.dirname(program)
        try:
            runpy.run_path(program, run_name="__main__")
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
    threading._shutdown()  # wait for threads, as at the end of a process
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # tearing down torch's modules would touch all of their pages

requests, asked, running = socket.socket(fileno=os.dup(0)), select.poll(), {}
asked.register(0, select.POLLIN)
while True:
    for descriptor, _ in asked.poll():
        if descriptor in running:
            child, answers = running.pop(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                os.write(answers, f"{child} {code}\\n".encode())
            if answers != 1:
                os.close(answers)
            asked.unregister(descriptor)
            os.close(descriptor)
            continue
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not request:
            sys.exit()
        child = begin(*json.loads(request), descriptors)
        answers = descriptors.pop() if len(descriptors) == 4 else 1
        for descriptor in descriptors:
            os.close(descriptor)
        os.write(answers, f"{child} began\\n".encode())
        descriptor = os.pidfd_open(child)
        running[descriptor] = child, answers
        asked.register(descriptor, select.POLLIN)
"""


class Running:
    """A process that a server forked.

    Attributes:
        pid: Its process id, and that of its session if it has a new one.
    """

    def __init__(self, server: Server, request: list[Any], *descriptors: int, alone: bool) -> None:
        self._out, self._err = tempfile.NamedTemporaryFile(), tempfile.NamedTemporaryFile()  # noqa: SIM115  they live as long as this object
        self._server = server
        self.pid = server.begin([*request, self._out.name, self._err.name, alone], *descriptors)

    @property
    def err(self) -> str:
        """The output on stderr so far."""
        return Path(self._err.name).read_text()

    def is_over(self) -> bool:
        """Return whether it has ended."""
        return self._server.code_of(self.pid, secs=0.0) is not None

    def says(self, line: str) -> None:
        """Wait for a line on stderr with this prefix."""
        while not any(said.startswith(line) for said in self.err.splitlines(keepends=True) if said.endswith("\n")):
            assert self._server.code_of(self.pid, secs=0.02) is None, f"it ended without {line!r}: {self.err}"

    def end(self, secs: float | None = None) -> Ran:
        """Wait for its end; kill it and fail on timeout."""
        code = self._server.code_of(self.pid, secs=secs)
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"it goes on for more than {secs} s: {self.err}")
        with self._out, self._err:
            return Ran(code=code, out=Path(self._out.name).read_text(), err=self.err)


class Server:
    """A process that runs programs in forks of itself; it ends with this one.

    A program is the path of a script, or `cgtool`, the command.

    Args:
        modules: The modules that it imports first.
        env: Changes to its environment.
    """

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None) -> None:
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(Path(__file__).parent), *modules],
                stdin=theirs,
                stdout=subprocess.PIPE,
                env=environment(**(env or {})),
            )
        self._said, self._over = b"", dict[int, int]()
        self._lock = threading.Lock()
        atexit.register(self._end)

    def run(
        self, program: str, cwd: Path, variables: Mapping[str, str], arguments: list[str], *descriptors: int
    ) -> Ran:
        """Run a program to its end with these open files."""
        return Running(self, [program, str(cwd), variables, arguments], *descriptors, alone=False).end()

    def start(
        self, program: str, cwd: Path, variables: Mapping[str, str], arguments: list[str], *talks: int
    ) -> Running:
        """Start a program in a new session; a script may get one end of a socket pair."""
        return Running(self, [program, str(cwd), variables, arguments], *talks, alone=True)

    def _end(self) -> None:
        self.requests.close()
        self._process.communicate()

    def begin(self, request: list[Any], *descriptors: int) -> int:
        """Fork a process with these open files and return its id."""
        with self._lock:  # so that no other thread reads the reply
            socket.send_fds(self.requests, [json.dumps(request).encode()], descriptors)
            while (said := self._hear(None))[1] != "began":
                pass
            return int(said[0])

    def code_of(self, pid: int, *, secs: float | None) -> int | None:
        """Wait for the end of a process; return its exit code, or None on timeout."""
        until = None if secs is None else time.monotonic() + secs
        while True:
            with self._lock:
                if pid in self._over:
                    return self._over[pid]
                turn = time.monotonic() + 0.05  # then give other threads a chance
                heard = self._hear(turn if until is None else min(turn, until))
            if heard is None and until is not None and time.monotonic() >= until:
                return None

    def _hear(self, until: float | None) -> list[str] | None:
        """Return the words of the server's next line, or None on timeout."""
        while b"\n" not in self._said:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                return None
            said = os.read(self._process.stdout.fileno(), 1 << 16)
            assert said, f"the server ended: {self._process.wait()}"
            self._said += said
        line, _, self._said = self._said.partition(b"\n")
        pid, word = line.decode().split()
        if word == "began":
            self._over.pop(int(pid), None)  # of an earlier process with this id
        else:
            self._over[int(pid)] = int(word)
        return [pid, word]


class ForkedChild:
    """Replaces `subprocess.Popen` in `cgtool.processes`: a server forks the child."""

    def __init__(self, requests: socket.socket, command: list[str], **how: Any) -> None:
        paths, _, program = command[-3:]
        variables = dict(os.environ if how["env"] is None else how["env"])
        request = ["child", str(Path.cwd()), variables, [paths, program], "", "", True]
        self._answers, theirs = os.pipe()
        descriptors = [*how["pass_fds"], how["stdout"].fileno(), requests.fileno(), theirs]
        socket.send_fds(requests, [json.dumps(request).encode()], descriptors)
        os.close(theirs)
        self._said, self._lock = b"", threading.Lock()
        self.pid = int(self._hear(None)[0])
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        with self._lock:
            if self.returncode is None:
                self.returncode = int(self._hear(timeout)[1])
                os.close(self._answers)
        return self.returncode

    def _hear(self, timeout: float | None) -> list[str]:
        """Return the words of the server's next line."""
        if b"\n" not in self._said:  # one read can contain both the start and the end of the child
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("child", timeout)
            self._said += os.read(self._answers, 1 << 10)
            if not self._said:
                raise OSError("the server ended")
        line, _, self._said = self._said.partition(b"\n")
        return line.decode().split()


def fork_children(requests: socket.socket) -> None:
    """Make a server fork the children of this process."""
    from cgtool import processes

    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    processes.subprocess = SimpleNamespace(Popen=functools.partial(ForkedChild, requests), **names)


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Fork children from a process that has imported torch and Dynamo, for tests that do not test their start."""
    from cgtool import processes

    started = processes.subprocess
    fork_children(server(None, with_torch=True).requests)
    yield
    processes.subprocess = started


@functools.cache
def server(path: str | None, *, with_torch: bool) -> Server:
    """Return the server for commands, with PYTHONPATH if there is one for its value."""
    return Server(*(HEAVY if with_torch else _LIGHT), env=None if path is None else {"PYTHONPATH": path})
