"""What of this machine and process decides compiled code, as named factors. Torch alone: no Inductor, no Dynamo.

A factor is the same in a process that imported Inductor and in one that did not, wherever things are installed, and for
every index of a device.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from typing import Any

import torch

from cgtool import host
from cgtool.guards import _torch as private
from cgtool.guards import state
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json


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
        "version": torch.__version__,
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
