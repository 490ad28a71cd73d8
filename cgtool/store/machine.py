"""The properties of this machine that decide whether an entry loads here. Must not import torch.

`Machine.factors` has the same form as the factors that `cgtool.runtime.factors` writes to `key.json`; a test with torch
compares the two. Properties that only torch itself can determine are None and are not compared:

- the architectures of AMD accelerators (torch's names are more specific than the kernel driver's);
- the level of vector instructions that torch uses on processors other than x86;
- precision and Inductor settings, which belong to the loading process rather than to the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cgtool import host
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json
from cgtool.store.key import FactorDifference, differences
from cgtool.store.records import Factor, Key

#: The variables in torch's version.py, by the names that factors use.
_BUILD = {"version": "__version__", "version_git": "git_version", "with_cuda": "cuda", "with_hip": "hip"}
_ASSIGNED = r"^{}\s*(?::[^=\n]*)?=\s*(?:None|'([^'\n]*)'|\"([^\"\n]*)\")\s*$"
_AVX512 = frozenset({"avx512vl", "avx512bw", "avx512dq", "fma"})
_AVX2 = frozenset({"avx2", "fma"})
#: The variable that limits torch's vector instructions, and torch's names for its values.
_CAPABILITY = "ATEN_CPU_CAPABILITY"
_CAPABILITIES = {"default": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}
#: Fields of the target that may be unknown without torch.
_MAY_BE_UNKNOWN = frozenset({"accelerators", "capability", "instructions"})
#: Device attributes of the CUDA driver API: the number of multiprocessors, and major and minor compute capability.
_COUNT, _MAJOR, _MINOR = 16, 75, 76


@dataclass(frozen=True, kw_only=True)
class Driver:
    """NVIDIA's driver, as reported by its library."""

    #: The newest CUDA version that it supports: "12.8".
    cuda: str
    #: "570.86.15"; None if the kernel does not report it.
    version: str | None
    #: The architectures of the visible devices, each once: "sm_90 x132".
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This machine and the packages of this Python; None stands for anything missing or unknown."""

    torch: Mapping[str, str | None] | None
    triton: str | None
    #: Without the patch level: "cpython 3.12".
    python: str
    python_version: str
    compiler: str | None
    machine: str
    #: The level of vector instructions that torch uses; None if only torch can determine it.
    capability: str | None
    #: The digest of the processor's instruction sets.
    instructions: str | None
    #: The architectures that torch would see, each once; None if only torch can determine them.
    accelerators: tuple[str, ...] | None
    driver: Driver | None
    #: None if the system has another C library.
    glibc: str | None
    code_variables: Mapping[str, str]
    cgtool: Mapping[str, str | None]

    @property
    def factors(self) -> dict[str, Json]:
        """The factors of a key that depend on the machine, in the form of `key.json`; None if unknown."""
        return {
            "torch": None if self.torch is None else dict(self.torch),
            "triton": self.triton,
            "python": self.python,
            "compiler": self.compiler,
            "target": {
                "cpu": {"machine": self.machine, "capability": self.capability, "instructions": self.instructions},
                "accelerators": None if self.accelerators is None else list(self.accelerators),
            },
            "inductor_environment": dict(self.code_variables),
            "cgtool": dict(self.cgtool),
        }


def this_machine() -> Machine:
    """Return the properties of this machine. Runs the C++ compiler once, to get its version."""
    build = _torch_build()
    flags = host.cpu_flags()
    driver = _nvidia() if build is not None and build["with_cuda"] else None
    variables = host.code_variables()
    return Machine(
        torch=build,
        triton=host.triton_version(),
        python=host.python_name(),
        python_version=platform.python_version(),
        compiler=host.compiler_version(),
        machine=platform.machine(),
        capability=_capability(flags, variables.get(_CAPABILITY)),
        instructions=digest_of(flags) if flags else None,
        accelerators=_accelerators(build, driver),
        driver=driver,
        glibc=_glibc(),
        code_variables=variables,
        cgtool=host.cgtool_build(),
    )


def differences_here(key: Key, machine: Machine) -> list[FactorDifference]:
    """Return the factors of an entry's key in which a machine differs, most informative first.

    Factors of the model and of the loading process are not compared, nor are unknown properties of the machine. A
    missing C++ compiler is not a difference: the machine can load what was compiled elsewhere.
    """
    stored = {name: value for name, value in key.factors.items() if name in machine.factors}
    if machine.compiler is None:
        stored.pop("compiler", None)
    now = {name: _as_far_as_known(machine.factors[name], value) for name, value in stored.items()}
    return differences(*(Key.of(Factor(name=name, value=side[name]) for name in side) for side in (stored, now)))


def _as_far_as_known(now: Json, stored: Json) -> Json:
    """Return the current value of a factor, with the stored values substituted for those that are unknown."""
    if not isinstance(now, dict) or not isinstance(stored, dict):
        return now
    return {
        name: stored.get(name)
        if value is None and name in _MAY_BE_UNKNOWN
        else _as_far_as_known(value, stored.get(name))
        for name, value in now.items()
    }


def parse_build(text: str) -> dict[str, str | None]:
    """Return the build information in the text of torch's version.py."""
    build: dict[str, str | None] = {}
    for name, assigned in _BUILD.items():
        match = re.search(_ASSIGNED.format(re.escape(assigned)), text, re.MULTILINE)
        build[name] = None if match is None else match[1] or match[2]
    return build


def version_pair(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version, "12.8" → (12, 8), or (0, 0) if it has none."""
    match = re.match(r"(\d+)(?:\.(\d+))?", text)
    return (0, 0) if match is None else (int(match[1]), int(match[2] or 0))


def _torch_build() -> dict[str, str | None] | None:
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        return parse_build(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (ImportError, ValueError, OSError):
        return None


def _capability(flags: list[str], forced: str | None) -> str | None:
    """Return the CPU capability that torch's kernel dispatch selects, by the same processor flags."""
    if platform.machine() not in ("x86_64", "AMD64") or not flags:
        return None
    if forced is not None and forced in _CAPABILITIES:
        return _CAPABILITIES[forced]
    if _AVX512.issubset(flags):
        return "AVX512"
    return "AVX2" if _AVX2.issubset(flags) else "DEFAULT"


def _glibc() -> str | None:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return version if name == "glibc" else None
    return None


def _accelerators(build: Mapping[str, str | None] | None, driver: Driver | None) -> tuple[str, ...] | None:
    if build is None or build["with_hip"]:
        return None
    if driver is None or version_pair(driver.cuda)[0] < version_pair(build["with_cuda"] or "")[0]:
        return ()  # torch sees no device if the driver supports only an older CUDA than torch was built with
    return driver.devices


def _nvidia() -> Driver | None:
    """Query the driver's library, which sees the same devices as torch: both respect CUDA_VISIBLE_DEVICES."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version)) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return None
    devices = set()
    for index in range(count.value):
        device = ctypes.c_int()
        if not cuda.cuDeviceGet(ctypes.byref(device), index):
            major, minor, units = (_attribute(cuda, device, number) for number in (_MAJOR, _MINOR, _COUNT))
            devices.add(f"sm_{major}{minor} x{units}")
    cuda_version = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return Driver(cuda=cuda_version, version=_driver_version(), devices=tuple(sorted(devices)))


def _attribute(cuda: ctypes.CDLL, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value


def _driver_version() -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text(encoding="ascii"))
        return None if match is None else match[1]
    return None
