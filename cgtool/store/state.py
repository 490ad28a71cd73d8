"""When an entry was last used, and how often: outside of every digest, never shipped, never in the way. No torch.

`state/used/<hash>-rank_<i>-<prefix>` grows by one byte a hit, so its size is the number of hits and its modification
time the last use: one append, which needs no lock. A cache that is read-only or full simply is not stamped.
"""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime

from cgtool.records import dataclass
from cgtool.store.descriptors import opened
from cgtool.store.files import RECORD_MODE
from cgtool.store.layout import CacheLayout, RankName


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How an entry was used.

    Args:
        hits: How often it was loaded.
        last_used: When it was loaded last, in UTC; None for never.
    """

    hits: int = 0
    last_used: str | None = None


class StateStore:
    """The stamps of one cache. No method raises on account of the disk.

    Args:
        layout: Where the cache lies.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout

    def record_hit(self, name: RankName) -> None:
        """Count one load of an entry, if the cache can be written to."""
        path = self._layout.used_file(name)
        with contextlib.suppress(OSError):
            try:
                _append(str(path))
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                _append(str(path))

    def last_used(self) -> dict[str, float]:
        """Return when each rank and prefix was loaded last, seconds since the epoch, by `RankName.flat`."""
        found: dict[str, float] = {}
        with contextlib.suppress(OSError), os.scandir(self._layout.state_dir / "used") as stamps:
            for stamp in stamps:
                with contextlib.suppress(OSError):
                    found[stamp.name] = stamp.stat(follow_symlinks=False).st_mtime
        return found

    def usage(self, name: RankName) -> Usage:
        """Return how an entry was used; never used where nothing is known."""
        try:
            status = self._layout.used_file(name).stat()
        except OSError:
            return Usage()
        return Usage(hits=status.st_size, last_used=timestamp(status.st_mtime))


def timestamp(seconds: float | None = None) -> str:
    """Return a moment as UTC text, "2026-01-31T12:00:00.123Z": later moments sort later as text, too.

    Args:
        seconds: Since the epoch; now when None.
    """
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _append(path: str) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    with opened(os.open, path, flags, RECORD_MODE) as descriptor:
        os.write(descriptor, b".")
