"""The one sink of the command line: data goes to stdout, talk goes to stderr.

Must not import torch, nor rich before something is shown: `--help` does without. Nothing else of cgtool prints. While a
model's own code runs, its prints are sent to stderr (`Output.talking`), so that what a program reads from stdout is a
report and nothing else.
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
#: Wider than any table: where nobody looks at a terminal, nothing is cut or wrapped.
_PIPE_WIDTH = 100_000
#: How much of a sentence is shown that others wrote.
_MOST_OF_SENTENCE = 1000


class Output:
    """Where a command's words go."""

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
        """Where data is drawn: what was the standard output when this was made."""
        return _console_of(self._streams[0])

    @functools.cached_property
    def stderr(self) -> Console:
        """Where talk is drawn: what was the standard error when this was made."""
        return _console_of(self._streams[1])

    def json(self, document: Any) -> None:
        """Print a report for programs, a record or a mapping: indented, ASCII only, so that no terminal obeys it."""
        from msgspec import to_builtins  # which `--help` does without

        plain_document = to_builtins(document, enc_hook=str)  # paths are text
        _write(sys.stdout, json.dumps(plain_document, indent=2, ensure_ascii=True, allow_nan=False) + "\n")

    def report(self, report: _Report, show: Callable[[Output, _Report], None]) -> None:
        """Print a report: as JSON where that was asked for, else as `show` shows it to people."""
        if self.as_json:
            self.json(report.to_json() if hasattr(report, "to_json") else report)
        else:
            show(self, report)

    def json_of_many(self, document: dict[str, Any], name: str, items: Iterable[Any]) -> None:
        """Print a report whose field `name` is a long list: an item a line, each made as it is printed.

        The report has anything for that field, which keeps its place.
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
        """Draw something of rich's on stdout; where no terminal shows it, without spaces at the ends of lines."""
        if self.stdout.is_terminal:
            self.stdout.print(renderable)
            return
        with self.stdout.capture() as captured:
            self.stdout.print(renderable)
        _write(self.stdout.file, "".join(line.rstrip() + "\n" for line in captured.get().splitlines()))

    def line(self, text: str = "", *, style: str = "", whole: bool = False) -> None:
        """Print plain text on stdout, never read as markup, wrapped between words on a terminal.

        With `whole`, wrapping is left to the terminal, so that it can be copied as one line.
        """
        shown = plain(text, lines=True)
        if not self.stdout.is_terminal:  # rich takes a fifth of a second for some thousand lines
            _write(self.stdout.file, shown + "\n")
            return
        from rich.text import Text

        self.stdout.print(Text(shown, style=style), soft_wrap=whole)

    def note(self, text: str, *, style: str = "") -> None:
        """Say something on stderr, unless quiet."""
        if not self.quiet:
            from rich.text import Text

            self.stderr.print(Text(plain(text, lines=True), style=style))

    def notes(self, word: str, sentences: Iterable[str]) -> None:
        """Say some of what is to be noted, each after a word such as "Warning"; line ends stay."""
        for sentence in first(list(sentences)):
            self.note(f"{word}: {cut(sentence, _MOST_OF_SENTENCE)}", style="yellow")

    def error(self, text: str) -> None:
        """Say what failed on stderr, quiet or not."""
        from rich.text import Text

        words = Text("Error: ", style="bold red")
        words.append(plain(text, lines=True), style="not bold default")
        self.stderr.print(words)

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Send what others print to stdout (a model's own code, compilers) to stderr while the block runs."""
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
    """A terminal that is given no size has 80 columns; a pipe has no width at all."""
    from rich.console import Console

    class WholeConsole(Console):
        """A console that leaves a reader who went away to the one place where every exception ends."""

        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - rich calls this while it handles the BrokenPipeError

    width = None if stream.isatty() else _PIPE_WIDTH
    return WholeConsole(file=stream, width=width, markup=False, highlight=False, emoji=False, legacy_windows=False)


def _write(stream: IO[str], text: str) -> None:
    # An unbuffered stream (PYTHONUNBUFFERED) drops what a pipe did not take of one write, without an error: a reader
    # that went away would look like success. A pipe takes this much whole or fails.
    for start in range(0, len(text), _CHUNK):
        stream.write(text[start : start + _CHUNK])
