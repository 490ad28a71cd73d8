"""How many processes this machine bears: its cores and memory, as control groups bound them. Must not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

#: What a worker takes at its peak: torch and Inductor (about 0.5 GiB) and a C++ compile of generated code.
WORKER_BYTES = 2 * 1024**3

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


def num_cores() -> int:
    """Return how many cores this process may use: its affinity mask, bounded by the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups():
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return max(1, cores)


def free_bytes() -> int | None:
    """Return how much memory is left to this process: the machine's, bounded by its control group's; None: unknown."""
    found = [int(line.split()[1]) * 1024 for line in _text(_MEMINFO).splitlines() if line.startswith("MemAvailable:")]
    for folder in _cgroups():
        limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            # the page cache counts as used and is given back when it is wanted
            cached = [
                line.split()[1] for line in _text(folder / "memory.stat").splitlines() if line[:14] == "inactive_file "
            ]
            found.append(max(0, int(limit) - int(used) + sum(map(int, cached))))
    return min(found, default=None)


def default_jobs() -> int:
    """Return how many workers to start where nobody says: one for each core, as the memory allows, at least 1."""
    free = free_bytes()
    room = num_cores() if free is None else free // WORKER_BYTES
    return max(1, min(num_cores(), room))


def early_jobs(jobs: int) -> int:
    """Return how many of `jobs` workers to start before it is known what there is to compile.

    A core is left to the process that traces meanwhile; a decoder has three different pieces in each of its variants,
    of which dynamic batches and lengths make four.
    """
    return max(1, min(jobs, num_cores() - 1, 12))


def tracing_jobs(jobs: int | None) -> int:
    """Return how many children may trace beside this process; None is `default_jobs`.

    A core is left to this process, and one to the workers that get ready meanwhile: of two cores, children would take
    as much as they give.
    """
    return max(0, (default_jobs() if jobs is None else jobs) - 2)


def _cgroups() -> Iterator[Path]:
    """Yield the folders of this process's control group (version 2) and of those above it."""
    own = next((line[3:] for line in _text(_OWN_CGROUP).splitlines() if line.startswith("0::")), "/")
    folder = _CGROUP / own.strip().lstrip("/")
    for found in (folder, *folder.parents):
        if found == _CGROUP or _CGROUP in found.parents:
            yield found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
