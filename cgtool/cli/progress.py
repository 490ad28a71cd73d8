"""Progress on stderr: a live line on a terminal, plain lines in a pipe, nothing with --quiet.

Must not import torch. Consumes `cgtool.events.Event` records.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from rich.text import Text

from cgtool.cli.text import plain, secs_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.progress import TaskID

    from cgtool.cli.output import Output
    from cgtool.events import Event, OnEvent

PHASE_WIDTH = max(len(phase) for phase in ("model", "trace", "split", "compile", "store", "hit", "note"))

#: Phases whose events report completed work even without a duration.
FINISHED_AT_ONCE = frozenset({"split", "hit", "note"})


@contextlib.contextmanager
def reporting(output: Output) -> Iterator[OnEvent]:
    """Yield a function that shows events on stderr.

    Inside the block, anything that is printed to stdout goes to stderr.
    """
    with output.stdout_to_stderr():
        if output.quiet:
            yield lambda event: None  # noqa: ARG005 - OnEvent's signature
        elif output.stderr.is_terminal and not output.stderr.is_dumb_terminal:
            with _LiveProgress(output.stderr) as live:
                yield live.take
        else:
            yield lambda event: output.note(line_of(event)) if is_finished(event) else None


def is_finished(event: Event) -> bool:
    """Return whether an event reports completed work. A pipe and a terminal's history show no other events."""
    return event.secs is not None or event.phase in FINISHED_AT_ONCE


def line_of(event: Event) -> str:
    """Format an event as one plain line: "compile 3/9: piece 2, general shape (4.1 s)"."""
    count = "" if event.total is None else f" {event.done or 0}/{event.total}"
    took = "" if event.secs is None else f" ({secs_text(event.secs)})"
    return f"{event.phase}{count}: {plain(event.message)}{took}"


class _LiveProgress:
    """One line for each completed event, and a live last line for current work, with a bar if it is counted."""

    def __init__(self, console: Console) -> None:
        # Imported here because output to a pipe does not need it.
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn(f"{{task.fields[phase]:{PHASE_WIDTH}}}", style="bold", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn(
                "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._phase: str | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def take(self, event: Event) -> None:
        """Show one event."""
        if is_finished(event):
            self._console.print(_finished_line(event), no_wrap=event.phase != "note", overflow="ellipsis")
        if event.phase == "note":
            return
        if self._task is None or event.phase != self._phase:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task("", total=None, phase=event.phase)
            self._phase = event.phase
        self._progress.update(
            self._task,
            description=plain(event.message) if event.secs is None else "",
            completed=event.done or 0,
            total=event.total,
        )


def _finished_line(event: Event) -> Text:
    line = Text("! " if event.phase == "note" else "✓ ", style="yellow" if event.phase == "note" else "green")
    line.append(f"{event.phase:{PHASE_WIDTH}} ", style="bold default")
    if event.phase != "note":
        line.append(f"{'' if event.secs is None else secs_text(event.secs):>8}  ", style="cyan")
    if event.total is not None:
        line.append(f"{event.done or 0}/{event.total}  ", style="dim default")
    line.append(plain(event.message), style="default")
    return line
