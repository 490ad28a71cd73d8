"""A process that has imported torch and forks a child for each request, so that a fresh start costs milliseconds.

    python soundness_zygote.py warm|serve

A line of JSON on stdin is a request (`job`, and what the function of that name reads), a line on stdout its answer. The
zygote never imports a user's module: each child imports them anew, from the request's folder.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch

import cgtool
from cgtool.errors import CgtoolError

#: The deadline of a child.
SECONDS = 120
#: Only traces: nothing is compiled.
CONFIG = cgtool.CompilationConfig(adaptor="eager", jobs=0, proof=False)


class Scale(torch.nn.Module):
    """A model that takes Dynamo through what the projects use, so that every child inherits its imports and tables."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [1, 2.0]
        self.table = {"a": 1}

    def factor(self) -> float:
        """Read a list and a dict."""
        return self.factors[0] + self.table["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale by a number that is read from the model."""
        return x * self.factor()


def warm(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the project's model into the cache, and return eager's result too."""
    serve = _project(request)
    model, args = serve.build(), serve.arguments()
    with torch.no_grad():
        answer = {"eager": eager(model, args)}
    try:
        with torch.no_grad():
            cgtool.compile(model, example_args=serve.arguments(), cache_dir=request["cache"], config=CONFIG)
    except Exception as error:  # noqa: BLE001 - what came of it is the answer
        return answer | refusal(error)
    return answer | {"outcome": "warmed"}


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Start the changed project from the cache, and return its result and eager's.

    `early` runs before the model is built, `live` after it, `late` after `load` and a first call; `looks` is what then
    checks the model again: `recheck` or the call.
    """
    _set(request["environment"])
    serve = _project(request)
    names = {"sys": sys, "torch": torch, "net": sys.modules["app.net"], "home": sys.modules[request["home"]]}
    names |= {"os": os, "nn": torch.nn, "Holder": getattr(names["home"], request["holder"])}
    exec(request["early"], names)
    model, args = serve.build(), serve.arguments()
    names |= {"model": model, "args": args, "it": eval(request["it"], names, {"model": model, "args": args})}
    exec(request["live"], names)
    answer = _served(request, model, names)
    with eval(request["context"], names):
        answer |= {"eager": eager(model, names["args"])}
    if answer["outcome"] == "crash" and answer["eager"] == f"raises {answer['kind']}":
        return answer | {"outcome": "hit", "served": answer["eager"]}
    return answer


def _served(request: dict[str, Any], model: torch.nn.Module, names: dict[str, Any]) -> dict[str, Any]:
    try:
        config = cgtool.CompilationConfig(adaptor="eager", recheck="call") if request["looks"] == "call" else None
        loaded = cgtool.load(model, cache_dir=request["cache"], config=config)
    except Exception as error:  # noqa: BLE001 - as above
        return refusal(error) | {"loaded": False}
    first = {"first": _called(loaded, request, names)} if request["looks"] else {}
    exec(request["late"], names)
    try:
        if request["looks"] == "recheck":
            loaded.recheck()
    except Exception as error:  # noqa: BLE001 - as above
        return first | refusal(error)
    return first | _called(loaded, request, names)


def _called(loaded: Any, request: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    try:
        with eval(request["context"], names):
            return {"outcome": "hit", "served": described(loaded(*names["args"]))}
    except Exception as error:  # noqa: BLE001 - as above
        return refusal(error)


def command(request: dict[str, Any]) -> dict[str, Any]:
    """Run `python -m cgtool` with the request's arguments in the project's folder."""
    _set(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["cgtool", *request["arguments"]]
    out, status = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_module("cgtool", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = int(end.code or 0)
    return {"status": status, "output": out.getvalue()}


def refusal(error: Exception) -> dict[str, Any]:
    """Return an error's first reason, and whether cgtool raised it deliberately."""
    if isinstance(error, CgtoolError) and "bug in cgtool" not in str(error):
        reasons = getattr(error, "reasons", None) or (str(error),)
        return {"outcome": "refused", "kind": type(error).__name__, "reason": str(reasons[0])}
    return {"outcome": "crash", "kind": type(error).__name__, "reason": "".join(traceback.format_exception(error)[-6:])}


def eager(model: torch.nn.Module, args: tuple[Any, ...]) -> str:
    """Return the result of the model as it is now."""
    try:
        return described(model(*args))
    except Exception as error:  # noqa: BLE001 - a program that fails is an answer, too
        return f"raises {type(error).__name__}"


def described(value: Any) -> str:
    """Return a text that is equal for indistinguishable outputs: -0.0 is not 0.0, and 1 is not True."""
    if isinstance(value, torch.Tensor):
        facts = [type(value).__name__, str(value.dtype), str(value.device), tuple(value.shape), value.stride()]
        return repr((*facts, value.requires_grad, value.detach().tolist()))
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(described, value))})"
    return f"{type(value).__name__}({value!r})"


def _set(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def _project(request: dict[str, Any]) -> Any:
    os.chdir(request["folder"])
    sys.path.insert(0, request["folder"])
    return importlib.import_module("app.serve")


def fork(job: Callable[[dict[str, Any]], dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    """Do a job in a child and return its answer."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            answer = job(request)
        except BaseException:  # noqa: BLE001 - a project that cannot start at all is shown to whoever wrote it
            answer = {"outcome": "broken", "reason": traceback.format_exc()}
        with os.fdopen(writer, "w") as stream:
            json.dump(answer, stream)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    _, status = os.waitpid(child, 0)
    return (
        json.loads(said) if said else {"outcome": "crash", "kind": "a process", "reason": f"ended with status {status}"}
    )


def main() -> None:
    """Answer requests until stdin ends; what a child prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    kind = sys.argv.pop()
    jobs = {"serve": serve} if kind == "serve" else {"warm": warm, "command": command}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():  # imports what every child of this kind needs
        if "warm" in jobs:
            importlib.import_module("torch.distributed.tensor.experimental")  # by Dynamo, for any call of a function
            cgtool.compile(Scale().eval(), example_args=(torch.ones(4),), cache_dir=folder, config=CONFIG)
            torch.compiler.reset()
            gc.collect = lambda *_: 0  # Dynamo collects after each frame, which takes 25 ms here
        else:
            with contextlib.suppress(cgtool.CacheMissError):
                cgtool.load(torch.nn.Identity().eval(), cache_dir=folder)
    os.fsync = lambda descriptor: None  # a warm calls it thirty times, and durability is not tested here
    gc.freeze()
    gc.disable()  # children are short-lived, and visiting inherited objects copies pages
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(fork(jobs[request["job"]], request)) + "\n")


if __name__ == "__main__":
    main()
