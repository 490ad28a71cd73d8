"""`cgtool diff`: compare two entries, caches or bundles.

Must not import torch; the toolkit is imported when the command runs. Any text may come from an untrusted cache, so each
sentence and line is escaped and limited in length.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from cgtool.cli import failures
from cgtool.cli.options import cache_dir_option, cache_root, output_options
from cgtool.cli.text import count_text, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgtool.cli.output import Output
    from cgtool.toolkit.diff.run import DiffReport

#: Differences, and lines of each, shown without --all; `--json` has all of them.
MOST_DIFFERENCES = MOST_LINES = 12
_STYLES = {"-": "red", "+": "green"}

EXAMPLES = """\b
Examples:
  cgtool diff 3f9a 81c2
  cgtool diff 3f9a --here
  cgtool diff ~/.cache/cgtool /mnt/shared/cache
  cgtool diff /mnt/shared/cache:3f9a ~/.cache/cgtool:81c2
  cgtool diff ~/.cache/cgtool s3://models/cgtool
  cgtool diff monday.tar.zst tuesday.tar.zst --json | jq -r '.differences[0].sentence'
"""


@click.command(epilog=EXAMPLES)
@click.argument("old", metavar="A")
@click.argument("new", metavar="[B]", required=False)
@click.option("--here", is_flag=True, help="Compare the entry A with this machine: versions, compiler, CPU, GPU.")
@click.option("--all", "everything", is_flag=True, help="Show every difference in full.")
@cache_dir_option
@output_options
def diff(*, output: Output, old: str, new: str | None, here: bool, everything: bool, cache_dir: str | None) -> int:
    """Compare A and B and list their differences, the most significant first: fields, lines, guards, versions.

    A and B are each a cache directory, an entry (a prefix of its hash, ROOT:HASH, or its directory), a bundle, or the
    URL of a store (URL:HASH for one entry). No artifacts are fetched from a store. This runs no code of a model and
    does not need torch.

    Exit code 0: equal. Exit code 3: different.
    """
    from cgtool.toolkit.diff.run import diff as run

    report = run(old, new, here=here, cache_dir=cache_root(cache_dir))
    output.report(report, partial(_show, everything=everything))
    return failures.DONE if report.equal else failures.CHECK_FAILED


def _show(output: Output, report: DiffReport, *, everything: bool) -> None:
    """Print the differences, and how many are not shown."""
    if report.equal:
        output.line(f"{one_line(report.old)} and {one_line(report.new)} are equal.")
        return
    count = count_text(len(report.differences), "difference")
    output.line(f"{one_line(report.old)} → {one_line(report.new)}: {count}, the most significant first.", style="bold")
    shown = report.differences if everything else report.differences[:MOST_DIFFERENCES]
    for difference in shown:
        output.line(f"{difference.what:>8}  {one_line(difference.sentence)}")
        show_lines(output, difference.detail, everything=everything)
    if len(shown) < len(report.differences):
        output.line(f"and {len(report.differences) - len(shown)} more (shown by --all and --json)")


def show_lines(output: Output, lines: Sequence[str], *, everything: bool) -> None:
    """Print the lines of a difference, changed lines in colour."""
    from cgtool.toolkit.diff.records import ALSO

    shown = lines if everything else [line for line in lines if not line.startswith(ALSO)][:MOST_LINES]
    for line in shown:
        output.line(f"          {one_line(line)}", style=_STYLES.get(line[:1], "dim"))
    if len(shown) < len(lines) and len(shown) == MOST_LINES:
        output.line(f"          and {count_text(len(lines) - len(shown), 'line')} more", style="dim")
