"""Predict whether this machine can load an entry, without opening any artifact. Must not import torch.

The key is exact: `cgtool.load` misses if torch, triton, Python, the processor, the accelerators or the code variables
differ in any way, and the verdict follows it. It never promises what load refuses:

    unsupported   load misses here, or the artifacts cannot run here
    loads         load hits, but only in a process with the same settings as the one that compiled, or with a caveat
    optimal       load hits, and nothing about this machine argues against it

Load itself and `cgtool why` check what belongs to the model: its sources, weights and guards. A processor with
additional instructions is a miss too, because the key holds only a digest of the instruction sets.

The glibc version that native code needs is read from its shared library, which is stored uncompressed in a package
(`cgtool.store.artifacts`): the linker writes each required version ("GLIBC_2.34") into the dynamic string table,
between two zero bytes.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from cgtool.plan.grammar import Record
from cgtool.plan.pieces import Json
from cgtool.store.machine import Machine, differences_here, version_pair
from cgtool.store.records import Key

Level = Literal["optimal", "loads", "unsupported"]

#: Factors that depend on the model and on how it is compiled, not on the machine.
_MODEL_FACTORS = frozenset(
    {"model", "state", "config", "sources", "distributions", "variables", "ops", "guards", "calls"}
)
#: Factors of the loading process.
_PROCESS_FACTORS = frozenset({"precision", "inductor"})
#: torch's default settings.
_DEFAULTS: Mapping[str, Json] = {
    "float32_matmul": "highest",
    "fp32": {
        "fp32_precision": "ieee",
        "cuda_fp32_precision": "ieee",
        "cuda_fp32_precision_matmul": "ieee",
        "cuda_fp32_precision_conv": "tf32",
        "cuda_fp32_precision_rnn": "tf32",
        "mkldnn_fp32_precision": "ieee",
        "mkldnn_fp32_precision_matmul": "ieee",
        "mkldnn_fp32_precision_conv": "ieee",
        "mkldnn_fp32_precision_rnn": "ieee",
    },
    "fp16_reduced": True,
    "bf16_reduced": True,
    "fp16_accumulated": False,
    "deterministic": False,
    "filled": True,
}
_INSTRUCTIONS = "target.cpu.instructions"
_OTHER_INSTRUCTIONS = "The processor's instruction sets differ from those the entry was compiled for"

_NAME = b"\0GLIBC_"
_VERSION = re.compile(rb"\d{1,4}\.\d{1,4}")
#: Bounds the scan of an untrusted library.
_MAX_NAMES = 4096
#: How many artifacts of an entry are inspected: one compiler produced all of them.
_MAX_ARTIFACTS = 64
#: Files up to this size are read, which is faster than mapping them.
_SMALL_BYTES = 1 << 16
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


class Verdict(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Whether an entry loads on a machine, as `verify --json` prints it."""

    level: Level
    #: Why the level is not higher, most important first; empty for "optimal".
    reasons: tuple[str, ...] = ()


def verdict(
    key: Key,
    machine: Machine,
    *,
    world_size: int | None = None,
    ranks: Collection[int] | None = None,
    glibc_needed: str | None = None,
) -> Verdict:
    """Return whether an entry loads on a machine.

    Args:
        key: The entry's key.
        machine: The machine to judge by.
        world_size: How many ranks the entry must have; None if unknown.
        ranks: The ranks that the entry has; None if unknown.
        glibc_needed: The newest glibc version that its native code needs; None if unknown.
    """
    blockers = [*_factors(key, machine), *_glibc(machine, glibc_needed)]
    caveats = [*_process(key), *_driver(machine)]
    if world_size is not None and ranks is not None:
        absent = sorted(set(range(world_size)) - set(ranks))
        more = sorted(rank for rank in ranks if rank >= world_size)
        if absent:
            what = (
                f"Rank {absent[0]} is" if len(absent) == 1 else f"{len(absent)} ranks, starting with {absent[0]}, are"
            )
            blockers.append(
                f"{what} missing for a world size of {world_size}: warm {'it' if len(absent) == 1 else 'them'}"
            )
        if more:
            held = f"The entry holds rank {more[-1]}, which does not exist in a world size of {world_size}"
            caveats.append(f"{held}: it may have been compiled for another world size")
    if blockers:
        return Verdict(level="unsupported", reasons=(*blockers, *caveats))
    return Verdict(level="loads" if caveats else "optimal", reasons=tuple(caveats))


def _factors(key: Key, machine: Machine) -> Iterator[str]:
    if machine.torch is None and "torch" in key.factors:
        yield "torch is not installed for this Python"
    cpu = (key.value("target") or {}).get("cpu") or {}
    if machine.instructions is None and cpu.get("instructions") is not None:  # load compares them nevertheless
        yield _OTHER_INSTRUCTIONS
    for difference in sorted(differences_here(key, machine), key=lambda difference: difference.factor != "torch"):
        if difference.path == _INSTRUCTIONS:
            yield _OTHER_INSTRUCTIONS
        elif difference.path != "torch":  # torch as a whole differs: it is not installed
            yield difference.sentence
    for name in sorted(key.factors.keys() - machine.factors.keys() - _MODEL_FACTORS - _PROCESS_FACTORS):
        yield f"Its key has the factor {name}, which this version of cgtool does not know"


def process_settings(key: Key) -> tuple[str, ...]:
    """Return the names of the torch settings that the compiling process had changed from their defaults."""
    precision, inductor = key.value("precision") or {}, key.value("inductor") or {}
    changed = [f"precision.{name}" for name, usual in _DEFAULTS.items() if precision.get(name, usual) != usual]
    return (*changed, *(f"inductor.{name}" for name in inductor))


def _process(key: Key) -> Iterator[str]:
    changed = process_settings(key)
    if changed:
        yield f"It loads only in a process that sets {', '.join(changed)} to the values it was compiled with"


def _driver(machine: Machine) -> Iterator[str]:
    if machine.torch is not None and machine.accelerators is None:
        yield "Only torch can tell which accelerators it sees here: test the entry with --load"
    built = (machine.torch or {}).get("with_cuda")
    if machine.driver is None or not built:
        return
    here, wanted = version_pair(machine.driver.cuda), version_pair(built)
    if here[0] == wanted[0] and here < wanted:
        yield (
            f"The driver supports CUDA {machine.driver.cuda} and torch was built with {built}: kernels that use newer "
            "features fail at run time. Update the driver"
        )


def _glibc(machine: Machine, needed: str | None) -> Iterator[str]:
    if needed is not None and machine.glibc is not None and version_pair(machine.glibc) < version_pair(needed):
        here = machine.glibc
        yield f"Its native code needs glibc {needed}, and this machine has {here}: compile with glibc {here} or older"


def glibc_of_entry(artifacts: Iterable[str]) -> str | None:
    """Return the newest glibc version ("2.34") that any of the artifacts needs; None if none names one."""
    packages = sorted(path for path in artifacts if path.endswith(".pt2"))[:_MAX_ARTIFACTS]
    needed = [version for path in packages if (version := glibc_needed(path)) is not None]
    return max(needed, key=version_pair, default=None)


def glibc_needed(path: str | Path) -> str | None:
    """Return the newest glibc version that a package's library needs; None without a library or a version."""
    try:
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | _NONBLOCK)) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _SMALL_BYTES:
                return max(_versions(file.read(size)), key=version_pair, default=None)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return max(_versions(data), key=version_pair, default=None)
    except (OSError, ValueError):  # removed or truncated meanwhile: the digest check reports it
        return None


def _versions(data: bytes | mmap.mmap) -> Iterator[str]:
    at = -1
    for _ in range(_MAX_NAMES):
        at = data.find(_NAME, at + 1)
        if at < 0:
            return
        match = _VERSION.match(data, at + len(_NAME))
        if match is not None:
            yield match[0].decode("ascii")
