"""Differences as people read them: a sentence each, the lines that belong to it below.

Must not import torch. All of it may come from a stranger's cache: each sentence and line is quoted and has an end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from cgtool.cli.text import count_text, plain
from cgtool.toolkit.diff.records import ALSO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgtool.cli.output import Output
    from cgtool.toolkit.diff.run import DiffReport

#: What is shown of a report unless all of it was asked for; programs get all.
MOST_DIFFERENCES = 12
MOST_LINES = 12
_MOST_CHARACTERS = 400
_STYLES = {"-": "red", "+": "green"}


def show_diff(output: Output, report: DiffReport, *, everything: bool) -> None:
    """Print what differs between two sides, and how much of it is not shown.

    Args:
        output: Where to.
        report: What was found.
        everything: Leave nothing out.
    """
    if report.equal:
        output.line(f"{one_line(report.old)} and {one_line(report.new)} are equal.")
        return
    count = count_text(len(report.differences), "difference")
    output.line(f"{one_line(report.old)} → {one_line(report.new)}: {count}, the most telling first.", style="bold")
    shown = report.differences if everything else report.differences[:MOST_DIFFERENCES]
    for difference in shown:
        output.show(Text(f"{difference.what:>8}  {one_line(difference.sentence)}"))
        show_lines(output, difference.detail, everything=everything)
    if len(shown) < len(report.differences):
        output.line(f"and {len(report.differences) - len(shown)} more, which --all and --json show")


def show_lines(output: Output, lines: Sequence[str], *, everything: bool) -> None:
    """Print the lines that belong to a difference, those that changed in colour.

    Args:
        output: Where to.
        lines: What is printed, indented.
        everything: Leave nothing out.
    """
    shown = lines if everything else [line for line in lines if not line.startswith(ALSO)][:MOST_LINES]
    for line in shown:
        output.show(Text(f"          {one_line(line)}", style=_STYLES.get(line[:1], "dim")))
    if len(shown) < len(lines) and len(shown) == MOST_LINES:
        output.show(Text(f"          and {count_text(len(lines) - len(shown), 'line')} more", style="dim"))


def one_line(text: object) -> str:
    """Return text on one line, quoted, and cut where it is longer than anybody reads."""
    spelled = plain(str(text)[: 2 * _MOST_CHARACTERS])
    return spelled if len(spelled) <= _MOST_CHARACTERS else f"{spelled[:_MOST_CHARACTERS]}…"
