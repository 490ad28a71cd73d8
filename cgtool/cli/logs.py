"""Log messages on stderr: cgtool's warnings always; its other messages, and those of libraries, only with --verbose.

Must not import torch. cgtool's modules log to `logging.getLogger("cgtool...")`.
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


class _OutputHandler(logging.Handler):
    """Print records through `Output`, which keeps them off stdout and clear of the live progress line."""

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
    """Send cgtool's log to stderr and, unless --verbose, silence the libraries that a warm imports."""
    logger = logging.getLogger("cgtool")
    logger.handlers = [_OutputHandler(output)]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if output.verbose else logging.WARNING)
    if output.verbose:
        return
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # The user's own filters (-W, PYTHONWARNINGS) take precedence.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def silencing_torch(output: Output, on_event: OnEvent) -> OnEvent:
    """Wrap `on_event` so that each event limits torch's log handlers to errors, unless --verbose.

    torch installs plain `StreamHandler`s on many of its loggers when it is imported, which is in the middle of a
    command. Handlers of other types belong to the caller and are left alone.
    """
    if output.verbose:
        return on_event

    def silence_and_forward(event: Event) -> None:
        for name in list(logging.root.manager.loggerDict):
            if name.partition(".")[0] == "torch":
                for handler in logging.getLogger(name).handlers:
                    if type(handler) is logging.StreamHandler:
                        handler.setLevel(logging.ERROR)
        on_event(event)

    return silence_and_forward
