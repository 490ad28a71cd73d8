"""How a unit's compile came to a bad end, in words: whose fault it was, and what its log says last. No torch here."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

#: How many lines of a log an error shows.
TAIL_LINES = 12
_LINE_CHARS = 200
#: Of a log, only so much is read.
_TAIL_BYTES = 16_384

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
#: What compilers and libraries print when the machine, and not the piece, stops them.
_SAID = {
    "No space left on device": "disk",
    "Disk quota exceeded": "disk",
    "Killed signal terminated program": "memory",
    "Cannot allocate memory": "memory",
    "virtual memory exhausted": "memory",
    "std::bad_alloc": "memory",
    "out of memory": "memory",
    "can't allocate memory": "memory",
}
DISK_IS_FULL = "the disk is full. Free some space (the cache's disk and TMPDIR both count) and warm again"
_ADVICE = {
    "disk": DISK_IS_FULL,
    "memory": "memory ran out. Use fewer workers (--jobs), or a machine with more memory",
}


def machine_fault(error: BaseException) -> str | None:
    """Return what of the machine stopped a compile, or None where the compiler itself refused the piece.

    Args:
        error: What was raised; what it was raised from counts too.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, OSError) and found.errno in _NO_SPACE:
            return _ADVICE["disk"]
        if isinstance(found, MemoryError) or (isinstance(found, OSError) and found.errno == errno.ENOMEM):
            return _ADVICE["memory"]
        for line in str(found).splitlines():
            kind = next((kind for said, kind in _SAID.items() if said in line), None)
            if kind is not None:
                return f"{_ADVICE[kind]} ({line.strip()[:_LINE_CHARS]})"
        found = found.__cause__ or found.__context__
    return None


def reason_of(error: BaseException) -> str:
    """Return one sentence for what a compile raised."""
    fault = machine_fault(error)
    if fault is not None:
        return fault
    words = str(error).strip()
    return words or type(error).__name__


def ended_words(code: int) -> str:
    """Return how a process ended, from its exit code as `subprocess` gives it, and the likely cause."""
    if code == -signal.SIGKILL:
        return (
            "its worker was killed (SIGKILL), most likely by the kernel because memory ran out. Use fewer workers "
            "(--jobs), or a machine with more memory"
        )
    if code < 0:
        return f"its worker crashed with {signal.Signals(-code).name}. The log shows where"
    return f"its worker ended with exit code {code}. The log says why"


def log_tail(path: Path) -> str:
    """Return the last lines of a log, indented, or "" where there are none."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            lines = log.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    shown = [line.rstrip() for line in lines if line.strip()][-TAIL_LINES:]
    return "".join(f"\n    {line[:_LINE_CHARS]}" for line in shown)
