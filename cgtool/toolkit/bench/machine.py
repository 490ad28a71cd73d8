"""What a bench says of the machine and of the versions that it ran with.

Must not import torch as it loads: the functions that need it are for the processes that have it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cgtool import __version__


def machine_facts() -> dict[str, Any]:
    """Return the processor, its cores, the memory and the system."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "cores_available": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def version_facts() -> dict[str, Any]:
    """Return the versions of Python and of cgtool, with the commit where cgtool runs from a git checkout."""
    return {"python": platform.python_version(), "cgtool": __version__, "commit": _commit()}


def uses_cuda() -> bool:
    """Return whether this process computes on a CUDA device; imports torch."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def torch_facts() -> dict[str, Any]:
    """Return the versions of torch and triton, the device's name and the number of threads; imports torch."""
    import torch

    return {
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if uses_cuda() else None,
        "threads": torch.get_num_threads(),
    }


def load_average() -> float | None:
    """Return how many processes ran or waited in the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def now_text() -> str:
    """Return the time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(name: str) -> str | None:
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__version__", None)
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _commit() -> str | None:
    """The commit of the checkout that cgtool runs from, with "+" where its package differs from it."""
    package = Path(__file__).resolve().parents[1]
    if not (package.parent / ".git").exists():
        return None
    commit = _git(package, "rev-parse", "--short=10", "HEAD")
    changed = _git(package, "status", "--porcelain", "--", ".")
    return commit + "+" if commit and changed else commit or None


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603  fixed words
            ["git", "-C", str(folder), *arguments],  # noqa: S607  the user's own git
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
