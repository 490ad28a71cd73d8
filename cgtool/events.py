"""What a long job says of itself while it runs: one record, and the function that takes it.

Imports nothing of cgtool and never torch. A library function takes `on_event` and prints nothing; what shows on a
terminal is the command line's business (`cgtool.cli.progress`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cgtool.records import dataclass

Phase = Literal[
    "model", "trace", "split", "compile", "store", "hit", "note", "prepare", "start", "verify", "prune", "capture"
]


@dataclass(frozen=True, kw_only=True)
class Event:
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
