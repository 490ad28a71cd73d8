"""Whether this machine can load an entry, told before anything is opened. Must not import torch.

The key is exact: `cgtool.load` takes an entry whose torch, triton, Python, processor, accelerators or code variables
differ in anything for a miss, and so does this. It never promises what load refuses:

    unsupported   load misses here, or what it opens cannot run here
    loads         load hits, in a process that is set up as the one that compiled; or it hits, and less than all is well
    optimal       nothing of this machine speaks against it

What belongs to the model (its sources, its weights, its guards) is for load itself and `cgtool why` to say. More
instructions of the processor than before are a miss too, for the key holds only their digest.

Which glibc native code asks for stands in its shared library, which lies uncompressed in a package
(`cgtool.store.artifacts`): the linker puts the name of each version that is needed ("GLIBC_2.34") among the names of
symbols, each between two zeros.
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

#: Factors that come of the model and of how it is compiled: nothing of a machine.
_OF_THE_MODEL = frozenset(
    {"model", "state", "config", "sources", "distributions", "variables", "ops", "guards", "calls"}
)
#: Factors of the process that loads.
_OF_THE_PROCESS = frozenset({"precision", "inductor"})
#: What torch's settings are where a process changes nothing.
_USUAL: Mapping[str, Json] = {
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
_OTHER_INSTRUCTIONS = "The processor's instruction sets are not those that it was compiled for"

_NAME = b"\0GLIBC_"
_VERSION = re.compile(rb"\d{1,4}\.\d{1,4}")
#: What a stranger's library may name, at most.
_MOST_NAMES = 4096
#: How many artifacts of an entry are looked into: those of one entry were made by one compiler.
_MOST_ARTIFACTS = 64
#: What is no longer than this is read, which is quicker than to map it.
_SMALL_BYTES = 1 << 16
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


class Verdict(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What is said of an entry on a machine, as `verify --json` prints it."""

    level: Level
    #: Why it is not the level above, the weightiest first; none for "optimal".
    reasons: tuple[str, ...] = ()


def verdict(
    key: Key,
    machine: Machine,
    *,
    world_size: int | None = None,
    ranks: Collection[int] | None = None,
    glibc_needed: str | None = None,
) -> Verdict:
    """Return whether an entry loads on a machine; what is None is not known."""
    against = [*_factors(key, machine), *_glibc(machine, glibc_needed)]
    advice = [*_process(key), *_driver(machine)]
    if world_size is not None and ranks is not None:
        absent = sorted(set(range(world_size)) - set(ranks))
        more = sorted(rank for rank in ranks if rank >= world_size)
        if absent:
            against.append(f"{_ranks(absent)} of a world of {world_size}: warm {'it' if len(absent) == 1 else 'them'}")
        if more:
            held = f"It holds rank {more[-1]}, which a world of {world_size} has not"
            advice.append(f"{held}: it may have been compiled for another world size")
    if against:
        return Verdict(level="unsupported", reasons=(*against, *advice))
    return Verdict(level="loads" if advice else "optimal", reasons=tuple(advice))


def _factors(key: Key, machine: Machine) -> Iterator[str]:
    if machine.torch is None and "torch" in key.factors:
        yield "torch is not installed for this Python"
    cpu = (key.value("target") or {}).get("cpu") or {}
    if machine.instructions is None and cpu.get("instructions") is not None:  # load compares it all the same
        yield _OTHER_INSTRUCTIONS
    for difference in sorted(differences_here(key, machine), key=lambda one: one.factor != "torch"):
        if difference.path == _INSTRUCTIONS:
            yield _OTHER_INSTRUCTIONS
        elif difference.path != "torch":  # as a whole: it is not installed
            yield difference.sentence
    for name in sorted(key.factors.keys() - machine.factors.keys() - _OF_THE_MODEL - _OF_THE_PROCESS):
        yield f"It was keyed on {name}, which this cgtool does not know"


def of_the_process(key: Key) -> tuple[str, ...]:
    """Return which of torch's settings a process must change as the one that compiled did."""
    precision, inductor = key.value("precision") or {}, key.value("inductor") or {}
    other = [f"precision.{name}" for name, usual in _USUAL.items() if precision.get(name, usual) != usual]
    return (*other, *(f"inductor.{name}" for name in inductor))


def _process(key: Key) -> Iterator[str]:
    other = of_the_process(key)
    if other:
        yield f"It loads only in a process that sets {', '.join(other)} as the one that compiled it did"


def _driver(machine: Machine) -> Iterator[str]:
    if machine.torch is not None and machine.accelerators is None:
        yield "Which accelerators torch sees here only torch can say: prove the entry with --load"
    built = (machine.torch or {}).get("with_cuda")
    if machine.driver is None or not built:
        return
    here, wanted = version_pair(machine.driver.cuda), version_pair(built)
    if here[0] == wanted[0] and here < wanted:
        yield (
            f"The driver serves CUDA {machine.driver.cuda} and torch was built with {built}: newer features of kernels "
            "fail as they run. Update the driver"
        )


def _glibc(machine: Machine, needed: str | None) -> Iterator[str]:
    if needed is not None and machine.glibc is not None and version_pair(machine.glibc) < version_pair(needed):
        yield f"Its native code needs glibc {needed} and here is {machine.glibc}: compile where glibc is as old as here"


def _ranks(absent: list[int]) -> str:
    if len(absent) == 1:
        return f"Rank {absent[0]} is missing"
    return f"{len(absent)} ranks are missing, the first {absent[0]},"


def glibc_of_entry(artifacts: Iterable[str]) -> str | None:
    """Return the newest glibc that any of several artifacts needs, "2.34"; None where none of them says."""
    packages = sorted(path for path in artifacts if path.endswith(".pt2"))[:_MOST_ARTIFACTS]
    needed = [version for path in packages if (version := glibc_needed(path)) is not None]
    return max(needed, key=version_pair, default=None)


def glibc_needed(path: str | Path) -> str | None:
    """Return the newest glibc that a package's library needs; None where it holds none or does not say."""
    try:
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | _NONBLOCK)) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _SMALL_BYTES:  # asked of each artifact of a cache, and quicker than to map it
                return max(_versions(file.read(size)), key=version_pair, default=None)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return max(_versions(data), key=version_pair, default=None)
    except (OSError, ValueError):  # gone, or cut meanwhile: the digests tell
        return None


def _versions(data: bytes | mmap.mmap) -> Iterator[str]:
    at = -1
    for _ in range(_MOST_NAMES):
        at = data.find(_NAME, at + 1)
        if at < 0:
            return
        match = _VERSION.match(data, at + len(_NAME))
        if match is not None:
            yield match[0].decode("ascii")
