"""Rich's consoles as cgtool uses them: whole lines in pipes, no markup, and a reader that went away is an exception.

Must not import torch. Loads rich, so `cgtool.cli.output` imports it when something is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.console import Console

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Wider than any table: where nobody looks at a terminal, nothing is cut or wrapped.
PIPE_WIDTH = 100_000


class _Console(Console):
    """A console that leaves a reader who went away to the one place where every exception ends."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704  rich calls this while it handles the BrokenPipeError


def console_of(stream: TextIO) -> Console:
    """Return a console for a stream: a terminal that is given no size has 80 columns; a pipe has no width at all."""
    return _Console(
        file=stream,
        width=None if stream.isatty() else PIPE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )


def draw(console: Console, renderable: RenderableType) -> str:
    """Return what a table or a line looks like where no terminal shows it: no box, no spaces at the ends of lines."""
    from rich.table import Table  # which most commands do without: they write lines

    if isinstance(renderable, Table):
        renderable.box = None
        renderable.padding = (0, 2, 0, 0)
    # rich pads every line of a table to its full width: nobody wants that in a file
    with console.capture() as captured:
        console.print(renderable)
    return "".join(line.rstrip() + "\n" for line in captured.get().splitlines())
