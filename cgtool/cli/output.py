"""The only output of the command line: reports go to stdout, everything else to stderr.

Must not import torch, or rich before something is shown: `--help` does not need it. Nothing else in cgtool prints.
While a model's code runs, `Output.stdout_to_stderr` redirects its output, so that stdout holds nothing but the report.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from typing import IO, TYPE_CHECKING, Any, TextIO, TypeVar

from cgtool.cli.text import cut, first, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console, RenderableType

_Report = TypeVar("_Report")

_CHUNK = 1024
#: Wider than any table: output to a pipe is not wrapped.
_PIPE_WIDTH = 100_000
#: Characters shown of a sentence that may come from an untrusted cache.
_MOST_OF_SENTENCE = 1000


class Output:
    """Prints a command's report and messages as the output options ask."""

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False, traceback: bool = False
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.traceback = traceback
        self._streams = sys.stdout, sys.stderr

    @functools.cached_property
    def stdout(self) -> Console:
        """A console on the sys.stdout of the time when this object was created."""
        return _console_of(self._streams[0])

    @functools.cached_property
    def stderr(self) -> Console:
        """A console on the sys.stderr of the time when this object was created."""
        return _console_of(self._streams[1])

    def json(self, document: Any) -> None:
        """Print a record or a mapping as indented JSON, in ASCII so that it holds no control sequences."""
        from msgspec import to_builtins  # lazy: `--help` does not need it

        plain_document = to_builtins(document, enc_hook=str)  # for paths
        _write(sys.stdout, json.dumps(plain_document, indent=2, ensure_ascii=True, allow_nan=False) + "\n")

    def report(self, report: _Report, show: Callable[[Output, _Report], None]) -> None:
        """Print a report: as JSON with --json, otherwise with `show`."""
        if self.as_json:
            self.json(report.to_json() if hasattr(report, "to_json") else report)
        else:
            show(self, report)

    def json_of_many(self, document: dict[str, Any], name: str, items: Iterable[Any]) -> None:
        """Print a report as JSON whose field `name` is a long list: one item per line, each encoded as it is printed.

        `document[name]` is only a placeholder that sets the position of the field.
        """
        for number, (field, value) in enumerate(document.items()):
            _write(sys.stdout, ("{" if number == 0 else ",") + f"\n  {json.dumps(field)}: ")
            if field != name:
                _write(sys.stdout, json.dumps(value, ensure_ascii=True, allow_nan=False))
                continue
            ends = "[\n    "
            for item in items:
                _write(sys.stdout, ends + json.dumps(item, ensure_ascii=True, allow_nan=False))
                ends = ",\n    "
            _write(sys.stdout, "[]" if ends.startswith("[") else "\n  ]")
        _write(sys.stdout, "\n}\n")

    def show(self, renderable: RenderableType) -> None:
        """Print a renderable on stdout; without trailing spaces unless stdout is a terminal."""
        if self.stdout.is_terminal:
            self.stdout.print(renderable)
            return
        with self.stdout.capture() as captured:
            self.stdout.print(renderable)
        _write(self.stdout.file, "".join(line.rstrip() + "\n" for line in captured.get().splitlines()))

    def line(self, text: str = "", *, style: str = "", whole: bool = False) -> None:
        """Print plain text on stdout, never as markup, wrapped between words on a terminal.

        With `whole`, the terminal does the wrapping, so that the text can be copied as one line.
        """
        shown = plain(text, lines=True)
        if not self.stdout.is_terminal:  # rich needs a fifth of a second for a few thousand lines
            _write(self.stdout.file, shown + "\n")
            return
        from rich.text import Text

        self.stdout.print(Text(shown, style=style), soft_wrap=whole)

    def note(self, text: str, *, style: str = "") -> None:
        """Print a message on stderr, unless --quiet."""
        if not self.quiet:
            from rich.text import Text

            self.stderr.print(Text(plain(text, lines=True), style=style))

    def notes(self, label: str, sentences: Iterable[str]) -> None:
        """Print the first sentences on stderr, each after a label such as "Warning"; line ends are kept."""
        for sentence in first(list(sentences)):
            self.note(f"{label}: {cut(sentence, _MOST_OF_SENTENCE)}", style="yellow")

    def error(self, text: str) -> None:
        """Print an error on stderr, even with --quiet."""
        from rich.text import Text

        message = Text("Error: ", style="bold red")
        message.append(plain(text, lines=True), style="not bold default")
        self.stderr.print(message)

    @contextlib.contextmanager
    def stdout_to_stderr(self) -> Iterator[None]:
        """Redirect what others print to stdout (a model's code, compilers) to stderr inside the block."""
        sys.stdout.flush()
        with contextlib.redirect_stdout(sys.stderr):
            saved = os.dup(1)
            os.dup2(2, 1)
            try:
                yield
            finally:
                os.dup2(saved, 1)
                os.close(saved)


def _console_of(stream: TextIO) -> Console:
    """Return a console; a terminal of unknown size has 80 columns, a pipe is not wrapped."""
    from rich.console import Console

    class RaisingConsole(Console):
        """A console that lets BrokenPipeError propagate to `main`."""

        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - rich calls this while it handles the BrokenPipeError

    width = None if stream.isatty() else _PIPE_WIDTH
    return RaisingConsole(file=stream, width=width, markup=False, highlight=False, emoji=False, legacy_windows=False)


def _write(stream: IO[str], text: str) -> None:
    # An unbuffered stream (PYTHONUNBUFFERED) silently drops the part of a write that a pipe did not take, so a reader
    # that closed the pipe would look like success. A pipe takes a chunk of this size completely or fails.
    for start in range(0, len(text), _CHUNK):
        stream.write(text[start : start + _CHUNK])
