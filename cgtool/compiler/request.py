"""A request to compile a piece in another process, and what must hold there before it means what it means here.

That is the modules that register a piece's custom ops, imported by name or from their file, and what was changed of
torch's global state. The compiler hash counts most of that state, too: a worker that could not take over a setting
refuses its pieces. A module that is `__main__`, or that no file was read for, exists in one process only: a piece that
needs it stays here.
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

#: Of a piece with collectives: those that a whole call has are run by all ranks.
NEEDS_RANKS = "not proved alone: its collectives need other processes"
#: Packages whose modules every worker has.
_OURS = ("torch", "cgtool")


class StaysHereError(CgtoolError):
    """A piece cannot leave this process, or no worker takes it: here it may compile all the same."""


class WorkerSetup(Record, frozen=True, kw_only=True):
    """What all workers of a pool are told as they start."""

    #: How many processes Inductor may use for one piece.
    threads: Count
    #: Whether to import Inductor before there is a unit.
    inductor: bool
    #: Whether C++ code will be written for the CPU.
    native: bool
    #: A folder of theirs: what one of them found out of this machine, the others take.
    shared: str


class Provider(Record, frozen=True, kw_only=True):
    """A module that registers custom ops or an adaptor."""

    module: str
    #: Where an import statement does not find it: a script that the user named by its path.
    file: str | None = None


class Settings(Record, frozen=True, kw_only=True):
    """What of global state decides what torch's ops and compilers give."""

    torch: dict[str, Any]
    #: Options that were changed; what the environment gave is the worker's own.
    inductor: dict[str, Any] = msgspec.field(default_factory=dict)


class CompileRequest(Record, frozen=True, kw_only=True):
    """One piece to compile, specialised or restricted to its shape."""

    graph: PieceGraph
    origin: Origin
    adaptor: str
    options: dict[str, Any]
    max_autotune: bool
    #: The adaptor's `compute_hash` where the request was made: a worker with another refuses the request.
    compiler: Digest
    #: Modules to import first.
    imports: tuple[Provider, ...]
    #: What holds in the process that made the request.
    settings: Settings
    #: What a worker on another machine must share, as `factors_here` says; empty asks for nothing.
    factors: dict[str, Json] = msgspec.field(default_factory=dict)
    #: Whether a worker on another machine proves what it compiled.
    prove: bool = False
    #: The groups of processes that its ops name, each with its size: a worker is in none of them.
    groups: dict[str, int] = msgspec.field(default_factory=dict)


class CompileReport(Record, frozen=True, kw_only=True):
    """What a worker says of a request; the artifact's bytes go beside it.

    A refused request is not for that process, and is compiled elsewhere. Of a rejected one the compiler does not take
    the piece; of a wrong one a proof refused what it made. A failed one met memory, disk or a bug.
    """

    status: Literal["done", "refused", "rejected", "wrong", "failed"]
    artifact: Artifact | None = None
    #: What the compiler wrote for people, name → text.
    generated: dict[str, str] = msgspec.field(default_factory=dict)
    reason: str = ""
    #: The op of the piece at which it was rejected, where the compiler names one.
    op: str | None = None


def groups_of(graph: PieceGraph) -> dict[str, int]:
    """Return the groups of processes that the ops of a piece name and this process is in, each with its size."""
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
        StaysHereError: One of them is not to be found by another process.
    """
    names: dict[str, None] = {}
    for op in ops:
        found = dict.fromkeys(_modules_of(op))
        if not found:
            raise StaysHereError(f"no module is known to register the op {op}", path=op)
        names.update(found)
    names[type(adaptor).__module__] = None
    return tuple(_provider(name) for name in names if name.partition(".")[0] not in _OURS)


def import_providers(providers: Iterable[Provider]) -> None:
    """Import each module once, in order.

    Raises:
        ModelError: A module is not here, or its code raised.
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
        except Exception as error:  # the code of a user raises what it likes
            raise ModelError(
                f"{provider.file or name}, which provides custom ops of the model, could not be imported by a process "
                f"that builds its pieces: {type(error).__name__}: {error}. Make it importable from a fresh process.",
                path=provider.file or name,
                actual=str(error),
            ) from error


def why_ops_differ(ops: dict[str, str]) -> str | None:
    """Return why the custom ops here are not those that a piece was traced with, or None."""
    for name, digest in ops.items():
        if guards_private.find_op(name) is None:
            return f"importing its modules registers no op {name}"
        if op_digest(name) != digest:
            return f"the op {name} has another schema or fake implementation in a fresh process"
    return None


def _modules_of(op: str) -> Iterator[str]:
    """Yield the names of the modules that registered an op, as far as they can be known."""
    provider = provider_of(op.partition(".")[0])
    if provider is not None:
        yield provider
        return
    found = guards_private.find_op(op)
    if found is None:
        return
    from cgtool.compiler import _torch  # as above: only for ops that do not say who registered them

    files = {place.rpartition(":")[0] for place in _torch.places_of(op)}
    written = [guards_private.fake_implementation(found), _torch.author_of(op)]
    yield from (function.__module__ for function in written if getattr(function, "__module__", None))
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) in files and name.partition(".")[0] not in _OURS:
            yield name


def _provider(name: str) -> Provider:
    module = sys.modules.get(name)
    if name == "__main__" or module is None:
        raise StaysHereError(f"the module {name} exists in this process only", path=name)
    file = getattr(module, "__file__", None)
    if file is None:
        raise StaysHereError(f"the module {name} was read from no file", path=name)
    return Provider(module=name, file=None if _is_findable(name, file) else str(Path(file).resolve()))


def _is_findable(name: str, file: str) -> bool:
    """Return whether an import statement of a fresh process finds this very file by the name."""
    spec = find_spec(name, sys.path)
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def _import_file(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        msg = f"{path} is no Python file"
        raise ImportError(msg)
    folder = str(path.parent)
    if folder not in sys.path:  # as for a script: its neighbours can be imported
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever ended it: half a module is none
        del sys.modules[name]
        raise


# the machine


def factors_here() -> dict[str, Json]:
    """Return the factors of this machine and its Python, without those that a request brings along as settings."""
    return {name: value for name, value in environment_factors().items() if name not in ("precision", "inductor")}


def why_machines_differ(factors: Mapping[str, Json]) -> str | None:
    """Return in what this machine differs from that of a request, or None."""
    now = factors_here() if factors else {}
    found = [said for name, old in factors.items() for said in sentences(difference_between(name, old, now.get(name)))]
    return "; ".join(found) or None


# settings


def _set_matmul_precision(value: str) -> None:
    if value != "mixed":  # else it is no setting: the backends' own precisions say it all
        torch.set_float32_matmul_precision(value)


#: name → (how to read it, how to set it). Values are JSON.
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
#: Switches of torch.backends: dotted names, plain values. What is inherited comes before what inherits it.
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
    """Return the settings of this process that a worker does not have by itself.

    Raises:
        StaysHereError: One of them is no JSON: a function, an object.
    """
    inductor = changed_inductor_settings()
    for name, value in inductor.items():
        _check(f"torch._inductor.config.{name}", value)
    return Settings(torch=torch_settings(), inductor=inductor)


def torch_settings() -> dict[str, Json]:
    """Return what of torch's own state decides what its ops give in this process."""
    return {name: read() for name, (read, _) in _STATE.items()} | {name: _get(name) for name in _BACKENDS}


def apply_settings(settings: Settings) -> None:
    """Make the settings of another process those of this one, for good: only a child that ends with its work does."""
    if settings.inductor:
        from cgtool.compiler import _torch  # sympy and more, which a proof does without

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
            f"the setting {name} is {value!r:.80}, which a file cannot hold; leave it at its default to compile in "
            "worker processes",
            path=name,
        )


def _get(name: str) -> Json:
    value = operator.attrgetter(name)(torch.backends)
    return value if isinstance(value, bool) else str(value)


def _set(name: str, value: Json) -> None:
    owner, _, last = name.rpartition(".")
    setattr(operator.attrgetter(owner)(torch.backends) if owner else torch.backends, last, value)
