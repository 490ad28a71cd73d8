"""Folders of one process's own, and how those that killed processes left are told. Must not import torch.

Whoever makes such a folder holds a lock on it, which ends with the process. A folder that nobody holds is abandoned,
unless it is so young that its maker may not hold it yet.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    _HAS_FLOCK = False
else:
    _HAS_FLOCK = True

#: Between making a folder and locking it, nobody holds it.
_YOUNG_SECS = 60.0
#: Where locks do not work, age alone tells.
_ABANDONED_SECS = 86400.0


def hold(folder: Path) -> int:
    """Return a descriptor that holds a folder until it is closed.

    Raises:
        OSError: The folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    if _HAS_FLOCK:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def is_abandoned(folder: Path) -> bool:
    """Return whether the process that made a folder is gone."""
    try:
        age = time.time() - folder.stat().st_mtime
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not _HAS_FLOCK:
            return age > _ABANDONED_SECS
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return age > _ABANDONED_SECS
    finally:
        os.close(descriptor)
    return age > _YOUNG_SECS
