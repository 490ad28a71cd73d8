"""The cores and memory available to this process, within its control group, and the number of workers they allow.

Must not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

#: The peak memory of a worker: torch and Inductor (about 0.5 GiB) and a C++ compile of generated code.
WORKER_BYTES = 2 * 1024**3

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


def num_cores() -> int:
    """Return the number of available cores: the affinity mask, limited by the CPU quota of the control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups():
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return max(1, cores)


def free_bytes() -> int | None:
    """Return the memory available to this process, limited by its control group; None if unknown."""
    found = [int(line.split()[1]) * 1024 for line in _text(_MEMINFO).splitlines() if line.startswith("MemAvailable:")]
    for folder in _cgroups():
        limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            # the page cache counts as used, but is reclaimable
            cached = [
                line.split()[1] for line in _text(folder / "memory.stat").splitlines() if line[:14] == "inactive_file "
            ]
            found.append(max(0, int(limit) - int(used) + sum(map(int, cached))))
    return min(found, default=None)


def default_jobs() -> int:
    """Return the default number of workers: one per core, as far as memory allows, at least 1."""
    free = free_bytes()
    room = num_cores() if free is None else free // WORKER_BYTES
    return max(1, min(num_cores(), room))


def early_jobs(jobs: int) -> int:
    """Return how many of `jobs` workers to start before the pieces are known.

    This leaves a core to the process that traces meanwhile. A decoder has three unique pieces in each of four variants,
    with a dynamic batch and length.
    """
    return max(1, min(jobs, num_cores() - 1, 12))


def tracing_jobs(jobs: int | None) -> int:
    """Return the number of children that trace beside this process; None means `default_jobs`.

    This leaves a core to this process and one to the workers that start meanwhile. With two cores, children gain
    nothing.
    """
    return max(0, (default_jobs() if jobs is None else jobs) - 2)


def _cgroups() -> Iterator[Path]:
    """Yield the folders of this process's control group (version 2) and of its ancestors."""
    path = next((line[3:] for line in _text(_OWN_CGROUP).splitlines() if line.startswith("0::")), "/")
    own = _CGROUP / path.strip().lstrip("/")
    for folder in (own, *own.parents):
        if folder == _CGROUP or _CGROUP in folder.parents:
            yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
