"""What cgtool reports while it works: the events of an action. The standard library alone."""

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
    """One thing that began, moved on or ended.

    Args:
        phase: Which stage speaks; "model" is the user's factory at work, "prove" calls what was compiled beside the
            model itself, "hit" says that the cache already holds it, "note" is advice for the user; "prepare" and
            "start" are what a bench does, "verify" reads what is there, "prune" reads it and removes, "capture"
            captures CUDA graphs, "push" and "pull" move entries to and from a remote store.
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


@contextlib.contextmanager
def told_while_waiting(name: str) -> Iterator[OnEvent]:
    """Yield a callback that shows whoever waits for a compilation how far it is; hits take no time and are not shown.

    On a terminal, one line of stderr shows what runs now and is cleared at the end; elsewhere the log gets a line of
    level INFO for each step that has finished.
    """
    log = logging.getLogger("cgtool")
    shows = sys.stderr is not None and sys.stderr.isatty()
    written = False

    def tell(event: Event) -> None:
        nonlocal written
        if event.phase in {"hit", "note"}:
            return
        counted = "" if event.total is None else f" {event.done or 0}/{event.total}"
        line = f"{event.phase}{counted}: {event.message if event.message.isprintable() else ascii(event.message)}"
        if shows:
            written = True
            width = shutil.get_terminal_size().columns - 1
            _write("\r\x1b[2K" + f"Compiling {name}, {line}"[:width])
        elif event.secs is not None:
            log.info("Compiling %s, %s (%.1f s)", name, line, event.secs)

    try:
        yield tell
    finally:
        if written:
            _write("\r\x1b[2K")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
