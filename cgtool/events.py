"""What cgtool reports while it works: events of an action, counters of the process. The standard library alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

Phase = Literal[
    "model", "trace", "split", "compile", "store", "hit", "note", "prepare", "start", "verify", "prune", "capture"
]


class Event(NamedTuple):
    """One thing that began, moved on or ended.

    Args:
        phase: Which stage speaks; "model" is the user's factory at work, "hit" says that the cache
            already holds it, "note" is advice for the user; "prepare" and "start" are what a bench does, "verify" reads
            what is there, "prune" reads it and removes, "capture" captures CUDA graphs.
        message: A short sentence or name, plain text: it may hold whatever a model's author wrote.
        done: How many units of the phase are finished; None where nothing is counted.
        total: How many there will be; None where nothing is counted.
        secs: How long the thing took; None while it still runs.
    """

    phase: Phase
    message: str
    done: int | None = None
    total: int | None = None
    secs: float | None = None


OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Take an event and do nothing: the default of every `on_event`."""


Happening = Literal["traces", "compiles", "opens", "captures", "replays"]

_counts: Counter[str] = Counter(traces=0, compiles=0, opens=0, captures=0, replays=0)
_lock = threading.Lock()


def count(what: Happening) -> None:
    """Note that something happened once."""
    with _lock:
        _counts[what] += 1


def counters() -> dict[str, int]:
    """Return how often each thing happened in this process: traces, compiles, opens, captures and replays."""
    with _lock:
        return dict(_counts)
