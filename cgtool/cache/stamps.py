"""Stamps of processes: what stands for a lock where flock does not work. Must not import torch.

A stamp is an empty file, `<what it holds>~<machine>~<pid>~<start>`: 16 digits of the digest of the host's name, its
boot id and the namespace of process ids (containers of one host do not see each other's), the process, and its start in
clock ticks since the boot. See `cgtool.cache.leases`.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

from cgtool.digests import sha256_hex

SEPARATOR = "~"
#: Of another machine nothing can be asked; its stamps count for so long.
_FOREIGN_SECS = 30 * 86400.0


def stamp_path(path: str) -> str:
    """Return the stamp of this process beside the path of a lock."""
    pid = os.getpid()
    return f"{path}{SEPARATOR}{_machine()}{SEPARATOR}{pid}{SEPARATOR}{_started(pid)}"


def stamp_lives(path: str) -> bool:
    """Return whether the process of a stamp lives, as far as this machine can tell."""
    try:
        _, machine, pid, start = Path(path).name.split(SEPARATOR)
        if machine == _machine():
            return _started(int(pid)) == start
        return time.time() - os.stat(path).st_mtime < _FOREIGN_SECS  # noqa: PTH116 - a str
    except (ValueError, OSError):
        return False


@functools.cache
def _machine() -> str:
    try:
        processes = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - a str
    except OSError:
        processes = ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    host = os.uname().nodename if hasattr(os, "uname") else ""
    return sha256_hex(f"{host} {boot} {processes}".encode())[:16]


def _started(pid: int) -> str:
    """A process's start in clock ticks since the boot; "0" for a live one that cannot be asked, "" for a dead one."""
    try:
        # The second field is the program's name in brackets, which may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return _is_alive(pid)


def _is_alive(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return "0"
    except (OSError, OverflowError):
        return ""
    return "0"
