"""What of this machine and process decides compiled code, as named factors. Torch alone: no Inductor, no Dynamo.

A factor is the same in a process that imported Inductor and in one that did not, wherever things are installed, and for
every index of a device. The first version of a compiler is asked of it once per process, and again only when its file
changed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from cgtool.digests import digest_of
from cgtool.guards import _torch as private
from cgtool.pieces import Json
from cgtool.variables import environment

#: What Inductor takes on Linux where CXX says nothing.
_COMPILER = "g++"
_COMPILER_SECS = 20.0
#: How flags of /proc/cpuinfo that name instructions begin; the others speak of power, mitigations and virtual machines.
_INSTRUCTIONS = (
    *("sse", "ssse", "avx", "amx", "fma", "bmi", "f16c", "popcnt", "abm", "lzcnt", "aes", "vaes", "sha", "gfni"),
    *("pclmulqdq", "vpclmulqdq", "movbe", "adx", "rdrnd", "rdseed", "cx16", "xsave", "movdiri", "movdir64b", "clwb"),
    *("clflushopt", "serialize", "asimd", "sve", "sme", "neon", "fp16", "fphp", "bf16", "i8mm", "atomics", "dotprod"),
    *("crc32", "fcma", "jscvt", "lrcpc", "vsx", "altivec"),
)


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
    return {name: compiler_version() if name == "compiler" else factors[name] for name in _NAMES}


_NAMES = ("torch", "triton", "python", "compiler", "target", "precision", "inductor_environment", "inductor")


def factors_but_compiler() -> dict[str, Json]:
    """Return the factors of `environment_factors` that no other process is asked for."""
    return {
        "torch": _torch_build(),
        "triton": _triton(),
        "python": f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}",
        "target": {"cpu": _cpu(), "accelerators": _accelerators()},
        "precision": _precision(),
        "inductor_environment": dict(environment().code_variables),
        "inductor": {name: plain(value) for name, value in sorted(private.changed_inductor_settings().items())},
    }


#: Path, modification time and size of a compiler.
_Compiler = tuple[str, int, int]


def ask_compiler() -> None:
    """Ask the C++ compiler for its version without waiting for the answer, which `compiler_version` returns."""
    compiler = _compiler()
    if compiler is not None:
        _question(compiler)


def compiler_version() -> str | None:
    """Return what the C++ compiler that torch would call says it is, or None where there is none that works."""
    compiler = _compiler()
    return None if compiler is None else _question(compiler).answer()


class _Question:
    """A compiler that is asked for its version; several threads may wait for the answer.

    Args:
        program: The path of the compiler.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._lock = threading.Lock()
        self._process = _start(program)
        self._is_answered = False
        self._answer: str | None = None

    def answer(self) -> str | None:
        """Return what it says; waits until it has."""
        with self._lock:
            if not self._is_answered:
                process, self._process = self._process or _start(self._program), None  # anew where that was broken off
                self._answer = None if process is None else _said_by(process)
                self._is_answered = True
            return self._answer


_questions: dict[_Compiler, _Question] = {}
_lock = threading.Lock()


def _question(compiler: _Compiler) -> _Question:
    with _lock:
        if compiler not in _questions:
            _questions[compiler] = _Question(compiler[0])
        return _questions[compiler]


def _compiler() -> _Compiler | None:
    program, *_ = (environment().cxx or "").split() or [_COMPILER]
    found = shutil.which(program)
    if found is None:
        return None
    try:
        stat = os.stat(found)  # noqa: PTH116 - a path costs more than the look
    except OSError:
        return None
    return found, stat.st_mtime_ns, stat.st_size


def _start(program: str) -> subprocess.Popen[str] | None:
    try:
        return subprocess.Popen(  # noqa: S603 - the compiler that torch itself would run
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
    except OSError:
        return None


def _said_by(process: subprocess.Popen[str]) -> str | None:
    with process:
        try:
            answer, _ = process.communicate(timeout=_COMPILER_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    lines = answer.strip().splitlines()
    if process.returncode != 0 or not lines:
        return None  # what cannot say its version compiles nothing
    # GCC begins with the name that it was called by: c++, g++ and x86_64-linux-gnu-g++ are one compiler
    return re.sub(r"^\S+ (?=\()", "", lines[0])


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
def _triton() -> str | None:
    if importlib.util.find_spec("triton") is None:  # the module of all its packages, quicker to look for than they are
        return None
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton-xpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@lru_cache(maxsize=1)
def _cpu() -> Json:
    machine = platform.machine()
    flags = _cpu_flags()
    return {
        "machine": machine,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": digest_of(flags) if flags else None,
    }


def _cpu_flags() -> list[str]:
    """Return the instruction sets of the first CPU; [] where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return sorted(flag for flag in match.group(1).split() if flag.startswith(_INSTRUCTIONS)) if match else []


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
        "float32_matmul": torch.get_float32_matmul_precision(),
        "fp16_reduced": plain(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
        "bf16_reduced": plain(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "cudnn_tf32": bool(torch.backends.cudnn.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
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
