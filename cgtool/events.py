"""Progress events, and the progress display of the library. Imports the standard library only."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

Phase = Literal[
    "model",
    "trace",
    "split",
    "compile",
    "prove",
    "store",
    "hit",
    "note",
    "prepare",
    "start",
    "verify",
    "prune",
    "capture",
    "push",
    "pull",
]


class Event(NamedTuple):
    """The start, progress or end of one step.

    Args:
        phase: The stage that reports. "model" runs the user's factory, "prove" compares compiled code with the model
            itself, "hit" means that the cache already holds the entry, "note" is advice for the user, "prepare" and
            "start" belong to a bench, "verify" reads a cache, "prune" reads it and removes from it, "capture" captures
            CUDA graphs, "push" and "pull" move entries to and from a remote store.
        message: A short sentence or a name, as plain text. Names come from the model's author and may hold anything.
        done: The number of finished units of the phase; None if units are not counted.
        total: The number of units of the phase; None if units are not counted.
        secs: The duration of the step; None while it runs.
    """

    phase: Phase
    message: str
    done: int | None = None
    total: int | None = None
    secs: float | None = None


OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Do nothing: the default `on_event`."""


@contextlib.contextmanager
def show_progress(name: str) -> Iterator[OnEvent]:
    """Yield an `on_event` callback that shows the progress of a compilation in the user's program.

    On a terminal, a line on stderr shows the current step and is cleared at the end. Otherwise each finished step is
    logged at level INFO. Hits are not shown: they take no time.
    """
    log = logging.getLogger("cgtool")
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    written = False

    def on_event(event: Event) -> None:
        nonlocal written
        if event.phase in {"hit", "note"}:
            return
        count = "" if event.total is None else f" {event.done or 0}/{event.total}"
        line = f"{event.phase}{count}: {event.message if event.message.isprintable() else ascii(event.message)}"
        if on_terminal:
            written = True
            width = shutil.get_terminal_size().columns - 1
            _write("\r\x1b[2K" + f"Compiling {name}, {line}"[:width])
        elif event.secs is not None:
            log.info("Compiling %s, %s (%.1f s)", name, line, event.secs)

    try:
        yield on_event
    finally:
        if written:
            _write("\r\x1b[2K")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
