"""Differences and reasons as people read them: a sentence each, the lines that belong to it below.

Must not import torch. All of it may come from a stranger's cache: each sentence and line is quoted and has an end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from cgtool.cli.text import count_text, plain
from cgtool.store.layout import short
from cgtool.toolkit.diff.records import ALSO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgtool.cli.output import Output
    from cgtool.store.pruned import Pruned
    from cgtool.toolkit.diff.run import DiffReport
    from cgtool.toolkit.why import EntryFacts, WhyReport

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


def show_why(output: Output, report: WhyReport, model: str, *, everything: bool) -> None:
    """Print whether a model would hit, and if not, why not and what to run.

    Args:
        output: Where to.
        report: What was found.
        model: MODEL as it was given.
        everything: Leave nothing out.
    """
    name = one_line(model)
    if report.entry is not None:
        output.line(f"{name} hits: {_entry_words(report.entry)} in {one_line(report.root)} serves it.")
        return
    if report.nearest is None:
        output.line(f"{name} misses: {one_line(report.root)} holds no entry of it.", style="bold")
    else:
        output.line(f"{name} misses. The nearest is {_entry_words(report.nearest)}, which does not serve it because:")
    shown = report.reasons if everything else report.reasons[:MOST_DIFFERENCES]
    for reason in shown if report.nearest is not None else ():
        output.show(Text(f"  - {one_line(reason.sentence)}"))
        show_lines(output, reason.detail, everything=everything)
    if len(shown) < len(report.reasons):
        output.line(f"  and {len(report.reasons) - len(shown)} more, which --all and --json show")
    if report.pruned is not None:
        output.line(_pruned_words(report.pruned))
    if report.run:
        output.line("To make it hit, run:")
        output.line(f"  {one_line(report.run)}", whole=True)


def _pruned_words(pruned: Pruned) -> str:
    last = pruned.entries[-1]
    missed = "" if pruned.misses == 0 else f"; it was missed {count_text(pruned.misses, 'time')} since"
    return f"Entry {short(last.hash)} of this model was pruned {one_line(last.when)} ({one_line(last.why)}){missed}."


def _entry_words(entry: EntryFacts) -> str:
    made = "" if entry.created is None else f", made {one_line(entry.created)}"
    used = "never used" if entry.last_used is None else f"used {count_text(entry.hits, 'time')}, last {entry.last_used}"
    model = "" if entry.model is None else f"{one_line(entry.model)} "
    return f"{model}{short(entry.name.hash)} (rank {entry.name.rank} {entry.name.prefix}{made}, {used})"


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
