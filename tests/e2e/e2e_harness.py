"""Runs cgtool in other processes, as its users do, and compares loaded models with eager."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cli_harness
from cli_harness import REPO, needs_fresh_process

FIXTURES = REPO / "fixtures"
COMPARE = Path(__file__).with_name("e2e_compare.py")
SERVED = Path(__file__).with_name("served.py")
LLAMA = f"{FIXTURES / 'tiny_llama.py'}:build"
#: The sizes that the fixtures are compiled for, beside the general shape.
SIZES = {"tiny_llama": "1", "tiny_moe": "1,8", "tiny_encoder": "batch=4:seq=16", "tiny_vision": "1,4"}


class Ran(cli_harness.Ran):
    """The result of a run; only a successful one has a report."""

    @property
    def report(self) -> Any:
        """The JSON on stdout, which must not contain anything else."""
        assert self.code == 0, f"exit code {self.code}\n{self.out[-2000:]}\n{self.err[-4000:]}"
        return super().report


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, with cgtool from this checkout, and `changes`."""
    return cli_harness.environment(**(changes or {}))


def python(*arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Ran:
    """Run a fresh Python process to its end."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(env),
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    return Ran(code=done.returncode, out=done.stdout, err=done.stderr)


def torchrun(env: Mapping[str, str] | None, log: Path, *arguments: object, ranks: int = 2) -> list[Any]:
    """Run a program as several ranks; return the JSON that each printed."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    ran = python(*launcher, "--log-dir", log, "--redirects", "3", *arguments, env=env)
    errors = "".join(path.read_text()[-2000:] for path in sorted(log.rglob("stderr.log")))
    assert ran.code == 0, ran.err + errors
    return [json.loads(path.read_text()) for path in sorted(log.rglob("stdout.log"))]


def forked_ranks(env: Mapping[str, str] | None, program: Path, *arguments: object, ranks: int = 2) -> list[Any]:
    """Do the same in forks of a process that has imported torch and Dynamo."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1"}
    server = cli_harness.server((env or {}).get("PYTHONPATH"), with_torch=True)
    words = [str(argument) for argument in arguments]
    started = [
        server.start(str(program), Path.cwd(), environment({**place, **agent, "RANK": str(rank), **(env or {})}), words)
        for rank in range(ranks)
    ]
    ended = [running.end(secs=300) for running in started]
    assert {ran.code for ran in ended} == {0}, "".join(ran.err[-2000:] for ran in ended)
    return [ran.report for ran in ended]


def two_ranks(model: str, root: Path, *options: object) -> list[cli_harness.Ran]:
    """Run `cgtool warm` as two ranks without an agent, which would end one with the other; return both results."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only rank 0 listens there
        held.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(held.getsockname()[1]), "WORLD_SIZE": "2"}
        arguments = ("warm", model, "--cache-dir", root, "--jobs", "0", "--adaptor", "eager", *options)
        ranks = [cli_harness.start(*arguments, env={**place, "RANK": str(rank)}) for rank in (0, 1)]
        return [rank.end(secs=300) for rank in ranks]


def cgtool(*arguments: object, **how: Any) -> Ran:
    """Run the command to its end, as `cli_harness.run` does."""
    ran = cli_harness.run(*arguments, **how)
    return Ran(code=ran.code, out=ran.out, err=ran.err)


def warm(model: str, root: Path, *arguments: object, **options: Any) -> Any:
    """Warm a model; return the report."""
    return cgtool("warm", model, "--cache-dir", root, "--json", "--quiet", *arguments, **options).report


def inspect(root: Path) -> Any:
    """Return the only entry of a cache, which must be complete."""
    report = cgtool("inspect", "cache", root, "--json").report
    assert report["warnings"] == []
    (entry,) = report["entries"]
    return entry


def compare(model: str, root: Path, calls: list[dict[str, int]], **options: Any) -> Any:
    """Load a model in another process and compare it with eager at sizes of its dynamic dimensions.

    Args:
        model: As MODEL of the command line.
        root: The root of the cache.
        calls: For each call, the size of each dynamic dimension by name.
        options: `arguments` of the factory, `config` of `load`; `env` and `cwd` of the process.

    Returns:
        The report of tests/e2e/e2e_compare.py.
    """
    env, cwd = options.pop("env", None), options.pop("cwd", None)
    request = {"model": model, "root": str(root), "calls": calls, **options}
    if needs_fresh_process(env):
        return python(COMPARE, json.dumps(request), env=env, cwd=cwd).report
    path = (env or {}).get("PYTHONPATH")  # of an adaptor's distribution, whose commands need more than torch
    server = cli_harness.torch_server() if path is None else cli_harness.server(path, with_torch=True)
    ran = server.run(str(COMPARE), cwd or Path.cwd(), environment(env), [json.dumps(request)])
    return Ran(code=ran.code, out=ran.out, err=ran.err).report


def units(root: Path) -> int:
    """Count the complete units."""
    return len(list((root / "torch_compile_cache" / "units").glob("*/*/unit.json")))


def counts(report: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the numbers of pieces, splitting pieces, unique pieces and artifacts."""
    return report["pieces"], report["splitting_pieces"], report["unique_pieces"], len(report["artifacts"])
