"""Runs the installed command as a user does, quickly: in forks of processes that imported what it needs."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "cgtool")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of a run."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> Any:
        """The JSON on stdout, which must be all that is there."""
        return json.loads(self.out)


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with cgtool from this checkout, 80 columns, and `changes`."""
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "80", **changes}


def needs_fresh_process(env: Mapping[str, str] | None) -> bool:
    """Return whether a variable decides how Python or torch start."""
    return any(name.startswith(("PYTHON", "TORCH", "TRITON")) for name in env or {})


def run(*arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Ran:
    """Run `cgtool` to its end, as a process of its own: in a fork of one that has imported what is slow to import.

    What Python or torch reads of the environment as it starts needs a fresh process.
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
    with_torch = words[:1] in (["warm"], ["why"], ["check"]) and "--help" not in words
    return _server(with_torch=with_torch).run(cwd or Path.cwd(), environment(**(env or {})), words)


def run_many(runs: list[tuple[Path, Mapping[str, str], list[str]]]) -> list[Ran]:
    """Run `cgtool` to its end once for each (working directory, changes of the environment, arguments)."""
    return [run(*arguments, cwd=cwd, env=changes) for cwd, changes, arguments in runs]


_LIGHT = ("cgtool.cli.main", "rich.console", "rich.table", "rich.text", "cgtool.cli.inspect", "cgtool.toolkit.listing")
#: What a command that traces imports.
HEAVY = ("cgtool.cli.main", "torch", "torch._dynamo", "cgtool.models", "cgtool.compiler.pipeline")

_SERVE = """
import gc, importlib, json, os, runpy, sys
*modules, program = sys.argv[1:]
for name in modules:
    importlib.import_module(name)
gc.freeze()
gc.disable()  # a fork lives for a moment
os.fsync = lambda descriptor: None  # as in conftest.py
for line in iter(sys.stdin.readline, ""):
    cwd, variables, arguments, out, err = json.loads(line)
    child = os.fork()
    if child == 0:
        for stream, (path, flags) in enumerate(((os.devnull, os.O_RDONLY), (out, os.O_WRONLY), (err, os.O_WRONLY))):
            os.dup2(os.open(path, flags), stream)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(variables)
        if program == "cgtool":
            from cgtool.cli.main import main
            sys.argv[:] = ["cgtool", *arguments]
            code = main()
        else:
            sys.argv[:] = [program, *arguments]
            sys.path[0] = os.path.dirname(program)
            try:
                runpy.run_path(program, run_name="__main__")
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
                code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # taking torch's modules apart touches every page of them
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(1, f"{code}\\n".encode())
"""


class Server:
    """A process that runs a program in forks of itself, one at a time; it ends with this one.

    Args:
        modules: What it has imported before.
        program: The path of a script; `cgtool` is the command.
        env: Changes of the environment that it starts in.
    """

    def __init__(self, *modules: str, program: str = "cgtool", env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, *modules, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(**(env or {})),
            text=True,
        )
        atexit.register(self._process.communicate)

    def run(self, cwd: Path, variables: Mapping[str, str], arguments: list[str]) -> Ran:
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            print(
                json.dumps([str(cwd), variables, arguments, out.name, err.name]), file=self._process.stdin, flush=True
            )
            answer = self._process.stdout.readline()
            return Ran(code=int(answer), out=out.read().decode(), err=err.read().decode())


@functools.cache
def _server(*, with_torch: bool) -> Server:
    return Server(*(HEAVY if with_torch else _LIGHT))
