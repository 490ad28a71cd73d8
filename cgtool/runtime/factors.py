"""The factors of a key: how each is computed, and when a load compares it. Used by warm and load alike.

`warm` creates the key of a traced model with `key_of`, and a load compares a stored key with this process with
`differences_now`. Both use `FACTORS`; a factor that is missing on either side is a difference. The only files read are
those listed in `sources` and those of cgtool itself, and the C++ compiler is run for its version.

A factor of the machine or process must not depend on whether Inductor was imported, on where packages are installed,
or on the index of a device.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
import torch

from cgtool import host
from cgtool.errors import CgtoolError, ModelError
from cgtool.guards import _torch as private
from cgtool.guards import state
from cgtool.guards.code import op_digest
from cgtool.guards.files import installed_versions, source_digests
from cgtool.guards.kinds import equal_json
from cgtool.guards.sources import qualified_name
from cgtool.host import variables_now
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json
from cgtool.store.records import Factor, Key

When = Literal["first", "last", "elsewhere"]


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The factors of a model and of this process that are known without a trace.

    Args:
        lookup: The digest of the model's class and tensors, which leads to candidate entries.
        known: Factors by name: the model's and the process's.
        config: The key fields of the requested configuration; None accepts any.
        exact_config: Whether unset splitting ops in `config` must also be unset in the entry.
    """

    lookup: str
    known: Mapping[str, Json]
    config: Mapping[str, Json] | None
    exact_config: bool

    @classmethod
    def of(
        cls, module: torch.nn.Module, *, config: Mapping[str, Json] | None = None, exact_config: bool = False
    ) -> Live:
        """Return the current factors of `module` and of this process; see the class for the other arguments.

        Raises:
            ModelError: The model has uninitialized parameters.
        """
        host.prefetch_compiler_version()  # runs in the background while the model is inspected
        model = {"class": qualified_name(type(module))}
        try:
            state = state_of(module)
        except ValueError as error:  # from torch, for a lazy parameter
            msg = (
                "The model has uninitialized parameters, as nn.LazyLinear does. Call the model once with an example "
                "first."
            )
            raise ModelError(msg, path="module") from error
        found = {**factors_but_compiler(), "cgtool": host.cgtool_build()}
        return cls(
            lookup=digest_of([model, state]),
            known={"model": model, "state": state, **found},
            config=config,
            exact_config=exact_config,
        )


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """How one factor is compared.

    Args:
        when: "first": compared before anything else of an entry is read. "last": compared once its guards hold.
            "elsewhere": the value is a digest or a call, and the plan's guards or `warm` compare what it stands for.
        now: Computes the current value from the known factors and the stored value: a factor found by a trace is
            computed again for the names that it contains.
    """

    when: When
    now: Callable[[Live, Any], Json]


def _known(name: str) -> Rule:
    return Rule(when="first", now=lambda live, _: live.known[name])


def _ops_now(_: Live, stored: Mapping[str, Json]) -> Json:
    now: dict[str, Json] = {}
    for name in stored:
        try:
            now[name] = op_digest(name)
        except CgtoolError:
            now[name] = None
    return now


def _config_now(live: Live, stored: Mapping[str, Json]) -> Json:
    if live.config is None:
        return stored
    if live.config.get("splitting_ops") is None and not live.exact_config:
        return {**live.config, "splitting_ops": stored.get("splitting_ops")}
    return dict(live.config)


def _compiler_now(_: Live, stored: Json) -> Json:
    """Return the compiler's version. A machine without a compiler cannot compile, so it accepts the stored version."""
    now = host.compiler_version()
    return stored if now is None else now


FACTORS: Mapping[str, Rule] = {
    "sources": Rule(when="first", now=lambda _, stored: source_digests(stored)),
    "distributions": Rule(when="first", now=lambda _, stored: installed_versions(stored)),
    "variables": Rule(when="first", now=lambda _, stored: variables_now(stored)),
    "ops": Rule(when="first", now=_ops_now),
    "guards": Rule(when="elsewhere", now=lambda _, stored: stored),
    "config": Rule(when="first", now=_config_now),
    "model": _known("model"),
    "state": _known("state"),
    "calls": Rule(when="elsewhere", now=lambda _, stored: stored),
    "torch": _known("torch"),
    "triton": _known("triton"),
    "python": _known("python"),
    "compiler": Rule(when="last", now=_compiler_now),
    "target": _known("target"),
    "precision": _known("precision"),
    "inductor": _known("inductor"),
    "inductor_environment": _known("inductor_environment"),
    "cgtool": _known("cgtool"),
}


def key_of(live: Live, traced: Mapping[str, Json]) -> Key:
    """Return the key of a new entry.

    Args:
        live: The factors of the model and of this process; its configuration is a factor.
        traced: The factors that only the trace provides: all others except the compiler.
    """
    found = {**live.known, **traced, "config": dict(live.config or {}), "compiler": host.compiler_version()}
    return Key.of(Factor(name=name, value=found[name]) for name in FACTORS)


def differences_now(key: Key, live: Live, *, when: When | None = None) -> tuple[str, ...]:
    """Return the differences between a stored key and this process as sentences, the most telling first.

    Args:
        key: The stored key.
        live: The current factors of the model and of this process.
        when: Which factors to compare; None compares all.
    """
    stored = key.factors
    found = [f"the factor {name} is missing from the entry's key" for name in FACTORS if name not in stored]
    found += [f"the entry's key has an unknown factor {name}" for name in stored if name not in FACTORS]
    for name, rule in FACTORS.items():
        if name in stored and when in (rule.when, None):
            now = rule.now(live, stored[name])
            if not equal_json(stored[name], now):  # comparing digests of a large factor would take milliseconds
                from cgtool.store.key import difference_between, sentences  # imported lazily: a hit does not need it

                found += sentences(difference_between(name, stored[name], now))
    return tuple(found)


def state_of(module: torch.nn.Module) -> Json:
    """Return the module's tensors by name ("float32[64, 128] cpu"), and which names share one tensor."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    tensors: dict[str, str] = {}
    texts: dict[Any, str] = {}
    holders = list(_modules(module, ""))
    for kind in ("_parameters", "_buffers"):
        for prefix, held in holders:
            for attribute, tensor in vars(held).get(kind, {}).items():
                if tensor is None:
                    continue
                name = prefix + attribute
                strides = tensor.stride() if tensor.layout is torch.strided else None  # a CSR tensor has no strides
                placements = private.placements_of(tensor)
                metadata = tensor.dtype, tensor.shape, strides, tensor.device, tensor.layout, placements
                if metadata not in texts:
                    texts[metadata] = _tensor_text(tensor, placements)
                tensors[name] = texts[metadata]
                other = first.setdefault(id(tensor), name)
                if other != name:
                    tied[name] = other
    return {"tensors": tensors, "tied": tied}


def _modules(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module under each of its names, with that name and a dot. Much faster than `named_modules`."""
    pending = [(prefix, module)]
    while pending:
        prefix, module = pending.pop()
        yield prefix, module
        children = vars(module).get("_modules", {})  # a TorchScript module stores its children elsewhere
        pending += [(f"{prefix}{name}.", child) for name, child in reversed(children.items()) if child is not None]


def _tensor_text(tensor: Any, placements: Sequence[str]) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return " ".join([f"{dtype}{list(tensor.shape)} {tensor.device.type}{_layout_text(tensor)}", *placements])


def _layout_text(tensor: Any) -> str:
    """Return a tensor's memory layout, "" if it is contiguous. Strides of dimensions of size 1 are ignored."""
    if tensor.layout is not torch.strided:
        return f" {tensor.layout}"
    if tensor.is_contiguous():
        return ""
    return f" strides {[step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]}"


def environment_factors() -> dict[str, Json]:
    """Return every factor by name.

    Returns:
        torch: version, git revision and CUDA or ROCm version of the build.
        triton: its version, or None.
        python: implementation and version without the patch level.
        compiler: the first line of the C++ compiler's `--version` without the compiler's name, or None if none works.
        target: the CPU's instruction sets, and the architectures of the accelerators.
        precision: torch's global settings for precision and determinism.
        inductor_environment: environment variables that change generated code.
        inductor: Inductor settings that were changed in this process.
    """
    factors = factors_but_compiler()
    return {name: host.compiler_version() if name == "compiler" else factors[name] for name in _NAMES}


_NAMES = ("torch", "triton", "python", "compiler", "target", "precision", "inductor_environment", "inductor")


def factors_but_compiler() -> dict[str, Json]:
    """Return the factors of `environment_factors` that need no child process."""
    return {
        "torch": _torch_build(),
        "triton": host.triton_version(),
        "python": host.python_name(),
        "target": {"cpu": _cpu(), "accelerators": _accelerators()},
        "precision": _precision(),
        "inductor_environment": host.code_variables(),
        "inductor": {name: plain(value) for name, value in sorted(private.changed_inductor_settings().items())},
    }


@lru_cache(maxsize=1)
def _torch_build() -> Json:
    return {
        "version": str(torch.__version__),  # a subclass of str, which would not equal a stored string
        # The version sorts first by name, too: of all differences between two builds, it is the most telling.
        "version_git": torch.version.git_version,
        "with_cuda": torch.version.cuda,
        "with_hip": torch.version.hip,
    }


@lru_cache(maxsize=1)
def _cpu() -> Json:
    machine = platform.machine()
    flags = host.cpu_flags()
    return {
        "machine": machine,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": digest_of(flags) if flags else None,
    }


def _accelerators() -> list[str]:
    """Return the distinct architectures of the visible accelerators, without their indices."""
    if not torch.cuda.is_available():
        return []
    found = set()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = getattr(properties, "gcnArchName", None) if torch.version.hip else None
        # Inductor tunes for the number of multiprocessors, not only for the architecture.
        found.add(f"{arch or f'sm_{properties.major}{properties.minor}'} x{properties.multi_processor_count}")
    return sorted(found)


def _precision() -> Json:
    return {
        "float32_matmul": state.current("float32_matmul_precision"),
        "fp32": {name: state.current(name) for name in state.FP32_NAMES},
        "fp16_reduced": plain(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
        "bf16_reduced": plain(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "fp16_accumulated": plain(torch.backends.cuda.matmul.allow_fp16_accumulation),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filled": state.current("fill_uninitialized"),
    }


def plain(value: Any) -> Json:
    """Return a setting as JSON; a value without a JSON form is named by its type, never by its address."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"f": repr(value)}
    if isinstance(value, dict):
        return {"d": sorted(([plain(k), plain(v)] for k, v in value.items()), key=repr)}
    if isinstance(value, set | frozenset):
        return {"set": sorted((plain(item) for item in value), key=repr)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    kind = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    return {"type": f"{kind.__module__}.{kind.__qualname__}"}
