"""Requests to compile a piece in another process, and the state that the other process needs first.

That state is the modules that register a piece's custom ops, imported by name or from their file, and the changed parts
of torch's global state. Most of that state also enters the compiler hash, so a worker that cannot apply a setting
refuses the piece. A piece that needs `__main__`, or a module without a file, stays in this process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from cgtool.errors import CgtoolError, ModelError
from cgtool.graph.values import dtype_of
from cgtool.guards import _torch as guards_private
from cgtool.guards._torch import changed_inductor_settings
from cgtool.guards.code import op_digest
from cgtool.guards.files import find_spec
from cgtool.guards.state import current
from cgtool.plan.grammar import Count, Digest, Record
from cgtool.plan.pieces import Json, PieceGraph
from cgtool.runtime.custom_ops import provider_of
from cgtool.runtime.factors import environment_factors
from cgtool.store.artifacts import Origin
from cgtool.store.key import difference_between, sentences
from cgtool.store.records import Artifact

#: The proof gap of a piece with collectives; the whole call, which all ranks run together, proves these.
NEEDS_RANKS = "not proved alone: its collectives need other processes"
#: Packages that every worker has.
_PREINSTALLED = ("torch", "cgtool")


class StaysHereError(CgtoolError):
    """Workers cannot compile a piece, but this process may be able to."""


class WorkerSetup(Record, frozen=True, kw_only=True):
    """The settings of all workers of a pool."""

    #: How many processes Inductor may use for one piece.
    threads: Count
    #: Whether to import Inductor at start.
    inductor: bool
    #: Whether the worker will compile C++ code for the CPU.
    native: bool
    #: A folder in which workers share the results of probing this machine.
    shared: str


class Provider(Record, frozen=True, kw_only=True):
    """A module that registers custom ops or an adaptor."""

    module: str
    #: The module's file, if an import statement does not find it, such as a script that the user named by its path.
    file: str | None = None


class Settings(Record, frozen=True, kw_only=True):
    """The global state that decides what torch's ops and compilers compute."""

    torch: dict[str, Any]
    #: Options of Inductor that were changed; those from environment variables are the worker's own.
    inductor: dict[str, Any] = msgspec.field(default_factory=dict)


class CompileRequest(Record, frozen=True, kw_only=True):
    """One piece to compile, specialized to its shape."""

    graph: PieceGraph
    origin: Origin
    adaptor: str
    options: dict[str, Any]
    max_autotune: bool
    #: The adaptor's `compute_hash` in the requesting process; a worker with a different one refuses the request.
    compiler: Digest
    #: Modules to import first.
    imports: tuple[Provider, ...]
    #: The settings of the requesting process.
    settings: Settings
    #: The factors, as from `factors_here`, that a worker on another machine must share; empty requires none.
    factors: dict[str, Json] = msgspec.field(default_factory=dict)
    #: Whether a worker on another machine proves the artifact.
    prove: bool = False
    #: The process groups that the piece's ops name, with their sizes; a worker is a member of none.
    groups: dict[str, int] = msgspec.field(default_factory=dict)


class CompileReport(Record, frozen=True, kw_only=True):
    """A worker's answer to a request; the artifact's bytes are sent beside it.

    Args:
        status: "done"; "refused": this worker cannot serve the request, another may; "rejected": the compiler rejects
            the piece; "wrong": the proof found the artifact wrong; "failed": out of memory or disk space, or a bug.
        artifact: The record of the artifact, if it is done.
        generated: The generated code, file name → text.
        reason: Why it is not done.
        op: The op at which the compiler rejected the piece, if it names one.
    """

    status: Literal["done", "refused", "rejected", "wrong", "failed"]
    artifact: Artifact | None = None
    generated: dict[str, str] = msgspec.field(default_factory=dict)
    reason: str = ""
    op: str | None = None


def groups_of(graph: PieceGraph) -> dict[str, int]:
    """Return the process groups that a piece's ops name and that include this process, with their sizes."""
    if not guards_private.process_group_is_initialized():
        return {}
    values = (value for node in graph.every_node() for value in (*node.args, *node.kwargs.values()))
    names = {value["s"] for value in values if isinstance(value, dict) and "s" in value}
    sizes = {name: guards_private.size_of_group(name) for name in sorted(names)}
    return {name: size for name, size in sizes.items() if size is not None}


# modules


def imports_for(ops: Iterable[str], adaptor: object) -> tuple[Provider, ...]:
    """Return the modules to import for a piece with these custom ops and an adaptor.

    Raises:
        StaysHereError: Another process cannot import one of them.
    """
    names: dict[str, None] = {}
    for op in ops:
        found = dict.fromkeys(_modules_of(op))
        if not found:
            raise StaysHereError(f"no module is known to register the op {op}", path=op)
        names.update(found)
    names[type(adaptor).__module__] = None
    return tuple(_provider(name) for name in names if name.partition(".")[0] not in _PREINSTALLED)


def import_providers(providers: Iterable[Provider]) -> None:
    """Import each module once, in order.

    Raises:
        ModelError: A module cannot be imported.
    """
    for provider in providers:
        name = provider.module
        if name in sys.modules:
            continue
        try:
            if provider.file is None:
                importlib.import_module(name)
            else:
                _import_file(name, Path(provider.file))
        except Exception as error:  # user code may raise anything
            raise ModelError(
                f"{provider.file or name}, which registers the model's custom ops, cannot be imported in a worker "
                f"process: {type(error).__name__}: {error}. Make it importable from a fresh process.",
                path=provider.file or name,
                actual=str(error),
            ) from error


def why_ops_differ(ops: dict[str, str]) -> str | None:
    """Return why the custom ops here differ from those that a piece was traced with, or None."""
    for name, digest in ops.items():
        if guards_private.find_op(name) is None:
            return f"importing its modules does not register the op {name}"
        if op_digest(name) != digest:
            return f"the op {name} has a different schema or fake implementation in a fresh process"
    return None


def _modules_of(op: str) -> Iterator[str]:
    """Yield the names of the modules that registered an op, as far as they are known."""
    provider = provider_of(op.partition(".")[0])
    if provider is not None:
        yield provider
        return
    found = guards_private.find_op(op)
    if found is None:
        return
    from cgtool.compiler import _torch  # imports sympy; needed only for ops that do not record their provider

    files = {place.rpartition(":")[0] for place in _torch.places_of(op)}
    functions = [guards_private.fake_implementation(found), _torch.author_of(op)]
    yield from (function.__module__ for function in functions if getattr(function, "__module__", None))
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) in files and name.partition(".")[0] not in _PREINSTALLED:
            yield name


def _provider(name: str) -> Provider:
    module = sys.modules.get(name)
    if name == "__main__" or module is None:
        raise StaysHereError(f"the module {name} exists only in this process", path=name)
    file = getattr(module, "__file__", None)
    if file is None:
        raise StaysHereError(f"the module {name} has no file", path=name)
    return Provider(module=name, file=None if _is_findable(name, file) else str(Path(file).resolve()))


def _is_findable(name: str, file: str) -> bool:
    """Return whether importing `name` in a fresh process finds this file."""
    spec = find_spec(name, sys.path)
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def _import_file(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        msg = f"{path} is not a Python file"
        raise ImportError(msg)
    folder = str(path.parent)
    if folder not in sys.path:  # as for a script, so that it can import its neighbors
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # do not leave a partly initialized module behind
        del sys.modules[name]
        raise


# the machine


def factors_here() -> dict[str, Json]:
    """Return the factors of this machine and its Python, without those that are sent as settings."""
    return {name: value for name, value in environment_factors().items() if name not in ("precision", "inductor")}


def why_machines_differ(factors: Mapping[str, Json]) -> str | None:
    """Return how this machine differs from that of a request, or None."""
    here = factors_here() if factors else {}
    differences = (difference_between(name, value, here.get(name)) for name, value in factors.items())
    return "; ".join(text for difference in differences for text in sentences(difference)) or None


# settings


def _set_matmul_precision(value: str) -> None:
    if value != "mixed":  # "mixed" cannot be set: it only reflects the backends' precisions
        torch.set_float32_matmul_precision(value)


#: Name → (getter, setter). Values are JSON.
_STATE: dict[str, tuple[Callable[[], Json], Callable[[Any], object]]] = {
    "float32_matmul_precision": (lambda: current("float32_matmul_precision"), _set_matmul_precision),
    "deterministic": (
        lambda: [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()],
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "default_dtype": (
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda value: torch.set_default_dtype(dtype_of(value)),
    ),
    "default_device": (
        lambda: str(torch.get_default_device()),
        torch.set_default_device,
    ),
}
#: Settings of torch.backends by their dotted names, with plain values. A setting precedes those that inherit from it.
_BACKENDS = (
    "fp32_precision",
    "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "cuda.matmul.fp32_precision",
    "mkldnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "mkldnn.enabled",
)


def changed_settings() -> Settings:
    """Return the settings of this process that a worker must apply.

    Raises:
        StaysHereError: The value of a setting is not JSON, such as a function.
    """
    inductor = changed_inductor_settings()
    for name, value in inductor.items():
        _check(f"torch._inductor.config.{name}", value)
    return Settings(torch=torch_settings(), inductor=inductor)


def torch_settings() -> dict[str, Json]:
    """Return the parts of torch's global state that decide what its ops compute."""
    return {name: read() for name, (read, _) in _STATE.items()} | {name: _get(name) for name in _BACKENDS}


def apply_settings(settings: Settings) -> None:
    """Apply the settings of another process; for children only, since nothing restores the old ones."""
    if settings.inductor:
        from cgtool.compiler import _torch  # imports sympy, which a proof does not need

        _torch.set_inductor_options(settings.inductor)
    for name, value in settings.torch.items():
        if name in _STATE:
            read, write = _STATE[name]
            if read() != value:
                write(value)
        elif name in _BACKENDS and _get(name) != value:
            _set(name, value)


def _check(name: str, value: Json) -> None:
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise StaysHereError(
            f"the setting {name} is {value!r:.80}, which cannot be sent to a worker; leave it at its default to "
            "compile in worker processes",
            path=name,
        )


def _get(name: str) -> Json:
    value = operator.attrgetter(name)(torch.backends)
    return value if isinstance(value, bool) else str(value)


def _set(name: str, value: Json) -> None:
    owner, _, last = name.rpartition(".")
    setattr(operator.attrgetter(owner)(torch.backends) if owner else torch.backends, last, value)
