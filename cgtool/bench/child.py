"""One process of a bench: build the model, start it, time its steps, compare its outputs, answer in a file.

What the clock sees, in order: *import* (from the process's start until torch and what builds models are imported),
*build* (the model's own modules and its factory), *ready* (from the built model to its first output, synchronised on
CUDA), steps. Everything that only the bench needs comes after that, so that no start finds it imported. What
the model's own file imports of cgtool belongs to build, in every way.
"""

from __future__ import annotations

import random
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cgtool.bench.machine import uses_cuda
from cgtool.bench.request import Request, write_document
from cgtool.bench.starters import Load, starter_of
from cgtool.errors import CgtoolError
from cgtool.events import ignore
from cgtool.model import ModelSpec

#: Imports what builds models and returns the function that does.
Resolver = Callable[[], Callable[..., ModelSpec]]

#: Steps are repeated as often as asked, or for this long, whichever ends first; but three times.
_STEP_SECS = 3.0
_FEWEST_REPEATS = 3
#: Calls of a size before its steps count.
_WARM_UP = 3
#: Of an error; the log's last lines say the rest.
_MOST_CHARS = 400
#: Compilers and what they bring: which of them 'ready' imported is part of the answer.
_HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "triton")


class Child:
    """What one process measures.

    Args:
        request: What to do.
        spawned: `time.monotonic()` of the process that started this one, when it did.
        resolver: Imports what builds models and returns `cgtool.models.resolve_model`.
        load: `cgtool.load`, imported as it is called.
    """

    def __init__(self, request: Request, *, spawned: float, resolver: Resolver, load: Load) -> None:
        self._request = request
        self._spawned = spawned
        self._resolver = resolver
        self._load = load
        self._phase = "import"
        self.answer: dict[str, Any] = {}

    def run(self) -> int:
        """Do it all, write the answer, and return the exit code."""
        try:
            self._measure()
        except BaseException as error:  # noqa: BLE001  whatever ends a start is what the report says of it
            traceback.print_exc()
            self.answer["error"] = one_line(error)
            if isinstance(error, CgtoolError):
                self.answer["sentence"] = str(error)  # made for people, and says what to do
            self.answer["failed_in"] = self._phase
        write_document(Path(self._request.answer), self.answer)
        return 1 if "error" in self.answer else 0

    def _measure(self) -> None:
        import torch  # noqa: F401  the time that it takes is what is measured

        resolve = self._resolver()
        self.answer["import_secs"] = time.monotonic() - self._spawned
        self._phase = "build"
        spec = self._built(resolve)
        if self._request.action == "start":
            self._start(spec)
        else:
            self._phase = "work"
            began = time.perf_counter()
            {"warm": self._warm, "precompile": self._precompile}[self._request.action](spec)
            self.answer["work_secs"] = time.perf_counter() - began
        self._phase = "report"
        self._describe()

    def _built(self, resolve: Callable[..., ModelSpec]) -> ModelSpec:
        import torch

        random.seed(self._request.seed)
        torch.manual_seed(self._request.seed)
        model = self._request.model
        began = time.perf_counter()
        spec = resolve(
            model.text,
            factory_args=dict(model.factory_args),
            weights=model.warm_weights if self._request.action == "warm" else "real",
            device=model.device,
            dtype=model.dtype,
            pythonpath=model.pythonpath,
        )
        _synchronise()
        self.answer["build_secs"] = time.perf_counter() - began
        return spec

    def _start(self, spec: ModelSpec) -> None:
        import torch

        self._phase = "ready"
        before = set(sys.modules)
        args, kwargs = tuple(spec.calls[0].args), dict(spec.calls[0].kwargs)
        with torch.inference_mode():
            began = time.perf_counter()
            run = starter_of(self._request.kind, self._load)(spec, self._request)
            first = run(*args, **kwargs)
            _synchronise()
            self.answer["ready_secs"] = time.perf_counter() - began
        self.answer["ready_imported"] = [name for name in _HEAVY if name in sys.modules and name not in before]
        self._phase = "steps"
        outputs = {"example": first, **self._steps(run, spec)}
        self._memory()
        if self._request.save_artifacts:
            self._save_artifacts()
        self._phase = "compare"
        self._compare(spec, outputs)

    def _steps(self, run: Callable[..., Any], spec: ModelSpec) -> dict[str, Any]:
        """Time a step of each size; return each size's first output, all of which come before the first repeat."""
        import torch

        from cgtool.bench.inputs import dimension_of, resized

        dimension = dimension_of(spec, self._request.dimension)
        self.answer["dimension"] = dimension
        steps: dict[str, dict[str, Any]] = {}
        outputs: dict[str, Any] = {}
        calls = {}
        for size in self._request.tokens if dimension is not None else ():
            try:
                args, kwargs = resized(spec, dimension, size)
                with torch.inference_mode():
                    began = time.perf_counter()
                    outputs[str(size)] = run(*args, **kwargs)
                    _synchronise()
                steps[str(size)] = {"first_secs": time.perf_counter() - began}
                calls[size] = (args, kwargs)
            except Exception as error:  # noqa: BLE001  a size that a way does not serve is part of the report
                traceback.print_exc()
                steps[str(size)] = {"error": one_line(error)}
        for size, (args, kwargs) in calls.items():
            steps[str(size)].update(_timed(run, args, kwargs, self._request.repeats))
        self.answer["steps"] = steps
        return outputs

    def _memory(self) -> None:
        import torch

        self.answer["rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.answer["device_bytes"] = torch.cuda.max_memory_allocated() if uses_cuda() else None

    def _compare(self, spec: ModelSpec, outputs: dict[str, Any]) -> None:
        from cgtool.bench import outputs as kept
        from cgtool.bench.machine import weights_digest

        folder = Path(self._request.reference)
        self.answer["weights"] = weights_digest(spec.module)
        self.answer["outputs"] = {}
        for name, output in outputs.items():
            if self._request.write_reference:
                kept.save(folder, name, output)
            found = kept.compare(folder, name, output)
            self.answer["outputs"][name] = None if found is None else found.to_json()

    def _save_artifacts(self) -> None:
        import torch

        began = time.perf_counter()
        saved = torch.compiler.save_cache_artifacts()
        if saved is not None:
            Path(self._request.artifact).write_bytes(saved[0])
        self.answer["save_secs"] = time.perf_counter() - began

    def _warm(self, spec: ModelSpec) -> None:
        from cgtool.build.pipeline import warm
        from cgtool.config import CompilationConfig

        config = CompilationConfig.from_mapping(self._request.config)
        result = warm(spec, config=config, cache_dir=self._request.cache, on_event=ignore)
        self.answer["trace_secs"] = result.trace_secs
        self.answer["compile_secs"] = result.compile_secs
        self.answer["compiled"] = result.compiled
        self.answer["notes"] = list(result.notes)

    def _precompile(self, spec: ModelSpec) -> None:
        import torch

        from cgtool.bench._torch import mark_dynamic, precompile
        from cgtool.bench.inputs import dynamic_tensors, example

        mark_dynamic(dynamic_tensors(spec))
        args, kwargs = example(spec)
        with torch.inference_mode():
            notes = precompile(getattr(spec.module, spec.method), args, kwargs, Path(self._request.artifact))
        self.answer["notes"] = list(notes)

    def _describe(self) -> None:
        from cgtool.bench.machine import torch_facts

        self.answer["torch"] = torch_facts()


def _timed(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Time a step many times; the model was called at its size before."""
    from statistics import median

    import torch

    taken: list[float] = []
    with torch.inference_mode():
        for _ in range(_WARM_UP):
            run(*args, **kwargs)
        _synchronise()
        until = time.perf_counter() + _STEP_SECS
        while len(taken) < repeats and (len(taken) < _FEWEST_REPEATS or time.perf_counter() < until):
            began = time.perf_counter()
            run(*args, **kwargs)
            _synchronise()
            taken.append(time.perf_counter() - began)
    return {"median_secs": median(taken), "min_secs": min(taken), "max_secs": max(taken), "count": len(taken)}


def _synchronise() -> None:
    import torch

    if uses_cuda():
        torch.cuda.synchronize()


def one_line(error: BaseException) -> str:
    """Return an error as one line: its type, the first sentence of what it says, and its most telling reason."""
    words: list[str] = []
    for line in filter(None, map(str.strip, str(error).splitlines())):
        words.append(line)
        if not line.endswith((":", "(", ",")):
            break
    words += [reason for reason in getattr(error, "reasons", ())[:1] if reason not in words]
    said = " ".join(words)
    said = said if len(said) <= _MOST_CHARS else said[: _MOST_CHARS - 2] + " …"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
