"""Stamps of processes: what stands for a lock where flock does not work. Must not import torch.

A stamp is an empty file, `<what it holds>~<machine>~<pid>~<start>`: 16 digits of the digest of the host's name, its
boot id and the namespace of process ids (containers of one host do not see each other's), the process, and its start in
clock ticks since the boot: so a stamp of a dead process is told from one of a live process that got its number. Of
another machine or container nothing can be asked: its stamps count for 30 days.

    state/leases/<lease>~...        a process uses or writes an entry: see `cgtool.store.leases`
    state/claims/<hash>~...         a prune is about to remove an entry

Whoever uses an entry looks for claims once its stamp is there, and whoever claims one looks for leases once its claim
is there, so that one of the two always sees the other and lets it be.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from cgtool.digests import sha256_hex
from cgtool.store.files import RECORD_MODE

SEPARATOR = "~"
#: Of another machine nothing can be asked; its stamps count for so long.
_FOREIGN_SECS = 30 * 86400.0


def stamp_path(path: str) -> str:
    """Return the stamp of this process beside the path of a lock."""
    pid = os.getpid()
    return f"{path}{SEPARATOR}{_machine()}{SEPARATOR}{pid}{SEPARATOR}{_started(pid)}"


def stamp(path: str) -> str:
    """Make the stamp of this process beside the path of a lock, and return its path.

    Raises:
        OSError: It cannot be made.
    """
    made = stamp_path(path)
    os.close(os.open(made, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), RECORD_MODE))
    return made


@contextlib.contextmanager
def claiming(path: str) -> Iterator[None]:
    """Say while the block runs that an entry is claimed. Never raises on account of the disk.

    Args:
        path: The lease of the entry's writers.
    """
    made = None
    with contextlib.suppress(OSError):
        os.makedirs(_claims(path), exist_ok=True)  # noqa: PTH103 - a str
        made = stamp(f"{_claims(path)}/{_entry(path)}")
    try:
        yield
    finally:
        if made is not None:
            with contextlib.suppress(OSError):
                os.unlink(made)  # noqa: PTH108 - a str


def is_claimed(path: str) -> bool:
    """Return whether a live process has claimed the entry that a lease is of."""
    try:
        found = os.listdir(_claims(path))  # noqa: PTH208 - names alone
    except OSError:
        return False
    return any(text[:64] == _entry(path) and stamp_lives(f"{_claims(path)}/{text}") for text in found)


def _claims(path: str) -> str:
    return f"{path.rpartition('/leases/')[0]}/claims"


def _entry(path: str) -> str:
    return path.rpartition("/")[2][:64]


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
