"""The factors of a key: how each is found now, and when a load compares it. The one place, on warm and on load alike.

`warm` makes the key of what it traced by `key_of`, and a load compares a stored key with this process by
`differences_now`; both go by `FACTORS`, and a factor that is missing on either side is a difference. The files that
`sources` names and those of cgtool itself are all that is read, and the C++ compiler is run for its version.

A factor of this machine or process is the same in a process that imported Inductor and in one that did not, wherever
things are installed, and for every index of a device.
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
    """What a key says of a model and of this process, as far as it is found without a trace.

    Args:
        lookup: The digest of what the model is; it leads to candidates.
        known: Factors by name: the model's and the process's.
        config: The key fields of the configuration that is asked for; None takes any.
        exact_config: Whether splitting ops that `config` leaves open must have been left open by the entry too.
    """

    lookup: str
    known: Mapping[str, Json]
    config: Mapping[str, Json] | None
    exact_config: bool

    @classmethod
    def of(
        cls, module: torch.nn.Module, *, config: Mapping[str, Json] | None = None, exact_config: bool = False
    ) -> Live:
        """Return what is known of `module` and of this process now; for the other arguments see the class.

        Raises:
            ModelError: It has parameters that are not made yet.
        """
        host.prefetch_compiler_version()  # runs while the model is inspected
        model = {"class": qualified_name(type(module))}
        try:
            state = state_of(module)
        except ValueError as error:  # torch's, of a lazy parameter
            msg = "The model has parameters without a size yet, as nn.LazyLinear has: call it once with an example."
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
        when: "first" before anything else of an entry is read, "last" once its guards hold; "elsewhere": its value is a
            digest or a call, and what it stands for is compared by the plan's guards or by `warm`.
        now: Makes the value as it is now, of what is known and of the stored value: a factor that a trace found is
            looked for again by the names that it holds.
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
    """Return the compiler's version; a machine without one takes what was compiled elsewhere: it can make no other."""
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
    """Return the key of an entry that is made now.

    Args:
        live: The model and this process; its configuration is a factor.
        traced: What only the trace tells: all other factors but the compiler.
    """
    found = {**live.known, **traced, "config": dict(live.config or {}), "compiler": host.compiler_version()}
    return Key.of(Factor(name=name, value=found[name]) for name in FACTORS)


def differences_now(key: Key, live: Live, *, when: When | None = None) -> tuple[str, ...]:
    """Return in which factors a stored key differs from this process, the most telling first.

    Args:
        key: The stored key.
        live: The model and this process.
        when: Which factors to compare; None compares all.
    """
    stored = key.factors
    found = [f"the factor {name} is missing from its key" for name in FACTORS if name not in stored]
    found += [f"this cgtool does not know the factor {name} of its key" for name in stored if name not in FACTORS]
    for name, rule in FACTORS.items():
        if name in stored and when in (rule.when, None):
            now = rule.now(live, stored[name])
            if not equal_json(stored[name], now):  # to compare two digests of a big factor costs milliseconds
                from cgtool.store.key import difference_between, sentences  # kept off the way of a hit

                found += sentences(difference_between(name, stored[name], now))
    return tuple(found)


def state_of(module: torch.nn.Module) -> Json:
    """Return the module's tensors by name ("float32[64, 128] cpu"), and which names share one tensor."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    tensors: dict[str, str] = {}
    spelled: dict[Any, str] = {}
    holders = list(_modules(module, ""))
    for kind in ("_parameters", "_buffers"):
        for prefix, held in holders:
            for own, tensor in vars(held).get(kind, {}).items():
                if tensor is None:
                    continue
                name = prefix + own
                steps = tensor.stride() if tensor.layout is torch.strided else None  # a CSR tensor has none
                placements = private.placements_of(tensor)
                make = tensor.dtype, tensor.shape, steps, tensor.device, tensor.layout, placements
                if make not in spelled:
                    spelled[make] = _spelled(tensor, placements)
                tensors[name] = spelled[make]
                other = first.setdefault(id(tensor), name)
                if other != name:
                    tied[name] = other
    return {"tensors": tensors, "tied": tied}


def _modules(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module under every name, with that name and a dot: `named_modules` costs much more."""
    pending = [(prefix, module)]
    while pending:
        prefix, module = pending.pop()
        yield prefix, module
        children = vars(module).get("_modules", {})  # TorchScript keeps what it traced elsewhere
        pending += [(f"{prefix}{name}.", child) for name, child in reversed(children.items()) if child is not None]


def _spelled(tensor: Any, placements: Sequence[str]) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return " ".join([f"{dtype}{list(tensor.shape)} {tensor.device.type}{_layout(tensor)}", *placements])


def _layout(tensor: Any) -> str:
    """Return what is unusual about how a tensor lies in memory; a stride of a dimension of size 1 says nothing."""
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
        compiler: the first line of the C++ compiler's `--version` without its own name, or None where none works.
        target: the CPU's instruction sets, and the architectures of the accelerators.
        precision: torch's global settings of precision and determinism.
        inductor_environment: variables of the environment that change code.
        inductor: settings of Inductor that were changed in this process.
    """
    factors = factors_but_compiler()
    return {name: host.compiler_version() if name == "compiler" else factors[name] for name in _NAMES}


_NAMES = ("torch", "triton", "python", "compiler", "target", "precision", "inductor_environment", "inductor")


def factors_but_compiler() -> dict[str, Json]:
    """Return the factors of `environment_factors` that no other process is asked for."""
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
        "version": str(torch.__version__),  # which is of a class of its own, and would equal no stored one
        # In this order also by name: of two builds that differ, the version tells most.
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
    """Return the architectures of the visible accelerators, each once: an index must not enter."""
    if not torch.cuda.is_available():
        return []
    found = set()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = getattr(properties, "gcnArchName", None) if torch.version.hip else None
        # Inductor tunes for the number of multiprocessors, not only for the architecture
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
    """Return a setting as JSON; what has no word of its own is named by its type, never by its address."""
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
