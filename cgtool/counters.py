"""What this process did that costs time: traces, compilations, openings of artifacts, captures and replays.

A server reads the counters after start-up and later: what it must never do while it serves did not happen if they stand
where they stood. Imports the standard library alone.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal, get_args

Happening = Literal["traces", "compiles", "opens", "captures", "replays"]

_counts: Counter[str] = Counter(dict.fromkeys(get_args(Happening), 0))
_lock = threading.Lock()


def count(what: Happening) -> None:
    """Note that something happened once."""
    with _lock:
        _counts[what] += 1


def counters() -> dict[str, int]:
    """Return how often each thing happened in this process: traces, compiles, opens, captures and replays."""
    with _lock:
        return dict(_counts)
