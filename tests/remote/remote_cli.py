"""Runs `cgtool` in forks of a process that has imported the clients of stores, with short pauses between retries."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import cli_harness
from cli_harness import REPO, Ran, Running, Server, environment, needs_fresh_process

_MODULES = (
    *("cgtool.cli.main", "cgtool.cli.push", "cgtool.cli.pull", "cgtool.cli.export", "cgtool.cli.import_"),
    *("cgtool.toolkit.remote", "cgtool.toolkit.bundle.export", "cgtool.toolkit.bundle.import_", "zstandard"),
    *("cryptography.hazmat.primitives.asymmetric.ed25519", "rich.console", "rich.table", "rich.text", "quick_retries"),
)


@functools.cache
def remote_server() -> Server:
    """Return the server whose forks run commands and programs that use stores."""
    path = os.pathsep.join([str(REPO), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return Server(*_MODULES, env={"PYTHONPATH": path})


def run(*arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Ran:
    """Run `cgtool` to its end; a warm, which needs torch, as `cli_harness.run` does."""
    if arguments[0] == "warm" or needs_fresh_process(env):
        return cli_harness.run(*arguments, cwd=cwd, env=env)
    words = [str(argument) for argument in arguments]
    return remote_server().run("cgtool", cwd or Path.cwd(), environment(**(env or {})), words)


def start(*arguments: object, env: Mapping[str, str] | None = None) -> Running:
    """Start `cgtool` in a session of its own, to be sent signals."""
    words = [str(argument) for argument in arguments]
    return remote_server().start("cgtool", Path.cwd(), environment(**(env or {})), words)
