"""One process of a bench: build the model, start it, time its steps, compare its outputs.

The timed phases, in order: *import* (from the start of the process until torch and the model builders are imported;
importing this module imports both), *build* (the model's own modules and its factory), *ready* (from the built model
to its first output, synchronized on CUDA), and the steps. Modules that only one way needs are imported by its function,
within 'ready'. cgtool modules that the model's own file imports count as build, in every way.
"""

from __future__ import annotations

import random
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cgtool.child import Channel
from cgtool.errors import CgtoolError
from cgtool.model import ModelSpec
from cgtool.models import resolve_model  # noqa: F401 - belongs to the import phase, not to build
from cgtool.toolkit.bench.calls import (
    compare,
    dimension_of,
    dynamic_tensors,
    read_outputs,
    resized,
    weights_digest,
    write_outputs,
)
from cgtool.toolkit.bench.ways import Request, Start, Step

#: Steps are repeated as often as configured or for this long, whichever ends first, but at least `_MIN_REPEATS` times.
_MAX_STEP_SECS = 3.0
_MIN_REPEATS = 3
#: Calls of a size before its steps are timed.
_WARM_UP_CALLS = 3
#: Maximum length of an error in one line; the log shows the rest.
_MAX_ERROR_CHARS = 400
#: Compiler modules; the report states which of them 'ready' imported.
_COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "sympy", "triton")

_Function = Callable[..., Any]


def main(channel: Channel) -> None:
    """Serve one request; the answer holds whatever was measured before an error."""
    for request, _ in channel.requests(Request):
        import_secs = time.monotonic() - request.spawned
        channel.answer(_Measurement(request, import_secs).run(), last=True)
        return


class _Measurement:
    """The measurements of one process (`_found`: fields of `Start`), and its current phase."""

    def __init__(self, request: Request, import_secs: float) -> None:
        self._request = request
        self._settings = request.settings
        self._phase = "build"
        self._found: dict[str, Any] = {"import_secs": import_secs}

    def run(self) -> Start:
        try:
            with self._timed("build_secs"):
                random.seed(self._settings.seed)
                torch.manual_seed(self._settings.seed)
                spec = self._settings.model.build(weights=None if self._request.action == "warm" else "real")
            if self._request.action == "start":
                outputs = self._start(spec)
                self._phase = "compare"
                self._compare(spec, outputs)
            else:
                self._phase = "work"
                with self._timed("work_secs"):
                    self._found |= (_warm if self._request.action == "warm" else _precompile)(spec, self._request)
            self._phase = "report"
            self._found["torch"] = _torch_facts()
        except BaseException as error:  # noqa: BLE001 - the report shows any error that ends a start
            traceback.print_exc()
            self._found |= {"error": one_line(error), "failed_in": self._phase}
            if isinstance(error, CgtoolError):
                self._found["sentence"] = str(error)  # with advice for the user
        return Start(**self._found)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        _synchronize()
        self._found[name] = time.perf_counter() - began

    def _start(self, spec: ModelSpec) -> dict[str, Any]:
        """Start the model and time its steps; return its outputs for the example and each size."""
        self._phase = "ready"
        before = set(sys.modules)
        args, kwargs = tuple(spec.calls[0].args), dict(spec.calls[0].kwargs)
        with torch.inference_mode(), self._timed("ready_secs"):
            run = _STARTERS[self._request.way.kind](spec, self._request)
            first = run(*args, **kwargs)
        self._found["ready_imported"] = tuple(
            name for name in _COMPILER_MODULES if name in sys.modules and name not in before
        )
        self._phase = "steps"
        outputs = {"example": first, **self._steps(run, spec)}
        self._found["rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._found["device_bytes"] = torch.cuda.max_memory_allocated() if _uses_cuda() else None
        if self._request.save_artifacts:
            with self._timed("save_secs"):
                saved = torch.compiler.save_cache_artifacts()
                if saved is not None:
                    Path(self._request.artifact).write_bytes(saved[0])
        return outputs

    def _compare(self, spec: ModelSpec, outputs: dict[str, Any]) -> None:
        self._found["weights"] = weights_digest(spec.module)
        reference = Path(self._request.reference)
        if self._request.write_reference:
            write_outputs(reference, outputs)
        eager = read_outputs(reference)
        self._found["outputs"] = {
            name: compare(eager[name], output) if name in eager else None for name, output in outputs.items()
        }

    def _steps(self, run: _Function, spec: ModelSpec) -> dict[str, Any]:
        """Time steps of each size; return the output of the first call of each size.

        The first calls of all sizes are made before any is repeated.
        """
        dimension = dimension_of(spec, self._settings.dimension)
        steps: dict[str, Step] = {}
        outputs: dict[str, Any] = {}
        calls = []
        for size in self._settings.tokens if dimension is not None else ():
            try:
                args, kwargs = resized(spec, str(dimension), size)
                with torch.inference_mode():
                    began = time.perf_counter()
                    outputs[str(size)] = run(*args, **kwargs)
                    _synchronize()
                calls.append((str(size), args, kwargs, time.perf_counter() - began))
            except Exception as error:  # noqa: BLE001 - the report shows the sizes that a way refuses
                traceback.print_exc()
                steps[str(size)] = Step(error=one_line(error))
        for name, args, kwargs, first_secs in calls:
            secs = _time_repeats(run, args, kwargs, self._settings.repeats)
            steps[name] = Step(
                first_secs=first_secs,
                median_secs=median(secs),
                min_secs=min(secs),
                max_secs=max(secs),
                count=len(secs),
            )
        self._found |= {"dimension": dimension, "steps": steps}
        return outputs


def _time_repeats(run: _Function, args: tuple[Any, ...], kwargs: dict[str, Any], repeats: int) -> list[float]:
    secs: list[float] = []
    with torch.inference_mode():
        for _ in range(_WARM_UP_CALLS):
            run(*args, **kwargs)
        _synchronize()
        deadline = time.perf_counter() + _MAX_STEP_SECS
        while len(secs) < repeats and (len(secs) < _MIN_REPEATS or time.perf_counter() < deadline):
            began = time.perf_counter()
            run(*args, **kwargs)
            _synchronize()
            secs.append(time.perf_counter() - began)
    return secs


def _warm(spec: ModelSpec, request: Request) -> dict[str, Any]:
    from cgtool.compiler.pipeline import warm
    from cgtool.config import CompilationConfig

    adaptor = request.way.adaptor
    overrides = {"adaptor": adaptor, "use_inductor": adaptor != "eager", "cache_dir": "", "disable_cache": False}
    config = CompilationConfig.from_mapping({**request.settings.config, **overrides})
    result = warm(spec, config=config, cache_dir=request.cache)
    return {name: getattr(result, name) for name in ("trace_secs", "compile_secs", "compiled", "notes")}


def _precompile(spec: ModelSpec, request: Request) -> dict[str, Any]:
    from cgtool.toolkit.bench._torch import mark_dynamic, precompile

    mark_dynamic(dynamic_tensors(spec))
    args, kwargs = tuple(spec.calls[0].args), dict(spec.calls[0].kwargs)
    with torch.inference_mode():
        notes = precompile(getattr(spec.module, spec.method), args, kwargs, Path(request.artifact))
    return {"notes": notes}


def _eager(spec: ModelSpec, request: Request) -> _Function:  # noqa: ARG001 - a starter's signature
    # Call the module, not its `forward`, so that its hooks run.
    method: _Function = spec.module if spec.method == "forward" else getattr(spec.module, spec.method)
    return method


def _compile(spec: ModelSpec, request: Request) -> _Function:
    from cgtool.toolkit.bench._torch import mark_dynamic

    mark_dynamic(dynamic_tensors(spec))
    return torch.compile(_eager(spec, request))


def _mega(spec: ModelSpec, request: Request) -> _Function:
    if torch.compiler.load_cache_artifacts(Path(request.artifact).read_bytes()) is None:
        message = "torch loaded nothing from its mega-cache. Leave mega-cache out of --ways."
        raise CgtoolError(message, path=request.artifact)
    return _compile(spec, request)


def _precompiled(spec: ModelSpec, request: Request) -> _Function:
    from cgtool.toolkit.bench._torch import load_precompiled

    loaded = load_precompiled(Path(request.artifact))
    return lambda *args, **kwargs: loaded(spec.module, *args, **kwargs)


def _cgtool(spec: ModelSpec, request: Request) -> _Function:
    from cgtool.api import load

    return load(spec.module, cache_dir=request.cache, prefix=spec.prefix)


#: Turns a built model into a callable. Everything a starter does, including imports, counts as 'ready'.
_STARTERS: Mapping[str, Callable[[ModelSpec, Request], _Function]] = {
    "eager": _eager,
    "compile": _compile,
    "mega": _mega,
    "precompile": _precompiled,
    "cgtool": _cgtool,
}


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _synchronize() -> None:
    if _uses_cuda():
        torch.cuda.synchronize()


def _torch_facts() -> dict[str, Any]:
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {
        "torch": str(torch.__version__),
        "triton": triton,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if _uses_cuda() else None,
        "threads": torch.get_num_threads(),
    }


def one_line(error: BaseException) -> str:
    """Format an error as one line: its type, the start of its message, and its first reason."""
    parts: list[str] = []
    for line in filter(None, map(str.strip, str(error).splitlines())):
        parts.append(line)
        if not line.endswith((":", "(", ",")):
            break
    parts += [reason for reason in getattr(error, "reasons", ())[:1] if reason not in parts]
    message = " ".join(parts)
    message = message if len(message) <= _MAX_ERROR_CHARS else message[: _MAX_ERROR_CHARS - 2] + " …"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
