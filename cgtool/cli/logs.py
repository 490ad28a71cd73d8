"""Library messages on stderr: warnings always, everything with --verbose, and other libraries' chatter only then.

Must not import torch. cgtool's modules speak through `logging.getLogger("cgtool...")`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TYPE_CHECKING

from cgtool.cli.text import plain

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.events import Event, OnEvent

CHATTY = ("torch", "transformers", "filelock", "py.warnings")


class _ToOutput(logging.Handler):
    """Hand a record to the output, which keeps it off stdout and clear of a live progress line."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record)
        except (TypeError, ValueError):
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING:
            self._output.note(f"Warning: {plain(message, lines=True)}", style="yellow")
        else:
            self._output.note(f"{record.name}: {plain(message, lines=True)}", style="dim")


def configure(output: Output) -> None:
    """Send cgtool's log to stderr, and hush the libraries that a warm drags in unless --verbose."""
    logger = logging.getLogger("cgtool")
    logger.handlers = [_ToOutput(output)]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if output.verbose else logging.WARNING)
    if output.verbose:
        return
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # What the user asked of Python itself (-W, PYTHONWARNINGS) goes before our quiet.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def hushing(output: Output, on_event: OnEvent) -> OnEvent:
    """Return `on_event`, after each of whose calls torch's own log handlers say errors only, unless --verbose.

    torch installs them, on many of its loggers, as it is imported: in the middle of a command, and no sooner. They are
    plain ones; what else hangs there belongs to whoever called.
    """
    if output.verbose:
        return on_event

    def told(event: Event) -> None:
        for name in list(logging.root.manager.loggerDict):
            if name.partition(".")[0] == "torch":
                for handler in logging.getLogger(name).handlers:
                    if type(handler) is logging.StreamHandler:
                        handler.setLevel(logging.ERROR)
        on_event(event)

    return told
