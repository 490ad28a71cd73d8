"""`cgtool why`: parse what the user asked, look, print whether the model would hit and why not.

Must not import torch; the command itself loads as it runs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures, logs
from cgtool.cli.diff import MOST_DIFFERENCES, show_lines
from cgtool.cli.options import ADAPTOR_FIELDS, model_asked, place_options, talk_options, warming_options
from cgtool.cli.text import count_text, one_line

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.store.pruned import Pruned
    from cgtool.toolkit.why import EntryFacts, WhyReport

EXAMPLES = """\b
Examples:
  cgtool why fixtures/tiny_llama.py:build
  cgtool why fixtures/tiny_llama.py:build --compile-sizes 1,8
  cgtool why hf:checkpoints/llama --cache-dir /mnt/shared/cache
  cgtool why mypackage.models:build --json | jq -r '.reasons[0].sentence'
"""

#: Options about talking, which are no part of the line that mends a miss.
_TALK = frozenset({"--json", "--quiet", "--verbose", "--traceback", "--all", "-q", "-v"})
_ARGUMENTS = "cgtool.why.arguments"


class _Remembering(click.Command):
    """A command that keeps what was typed, for the line of another that takes the same options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = tuple(argument for argument in args if argument not in _TALK)
        return super().parse_args(ctx, args)


@click.command(cls=_Remembering, epilog=EXAMPLES)
@warming_options
@place_options
@click.option("--all", "everything", is_flag=True, help="Show every reason with all of its lines.")
@talk_options
@click.pass_context
def why(ctx: click.Context, /, *, output: Output, everything: bool, **options: Any) -> int:
    """Say whether the cache serves MODEL, and if not, which entry is nearest and what keeps it from that.

    MODEL and its options are those of warm. This runs MODEL's code, traces and compiles nothing, and writes nothing.
    Exit code 0 for a hit, 3 for a miss: its reasons, the guilty first, and the line that mends it.
    """
    # Rich, tomllib and the command itself: what `--help` does without.
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.why import why as run

    choice, config = model_asked(options, ADAPTOR_FIELDS)
    with reporting(output) as on_event:
        told = logs.hushing(output, on_event)
        report = run(choice, config=config, rank=options["rank"], arguments=ctx.meta[_ARGUMENTS], on_event=told)
    output.report(report, partial(show_why, model=choice.model, everything=everything))
    return failures.DONE if report.hit else failures.CHECK_SAID_NO


def show_why(output: Output, report: WhyReport, *, model: str, everything: bool) -> None:
    """Print whether a model would hit, and if not, why not and what to run."""
    name = one_line(model)
    if report.entry is not None:
        output.line(f"{name} hits: {_entry_words(report.entry)} in {one_line(report.root)} serves it.")
        return
    if report.nearest is None:
        said = report.reasons[0].sentence.rstrip(".") if report.reasons and report.pruned is None else "none is left"
        output.line(f"{name} misses in {one_line(report.root)}: {one_line(said)}.", style="bold")
    else:
        output.line(f"{name} misses. The nearest is {_entry_words(report.nearest)}, which does not serve it because:")
    shown = report.reasons if everything else report.reasons[:MOST_DIFFERENCES]
    for reason in shown if report.nearest is not None else ():
        output.line(f"  - {one_line(reason.sentence)}")
        show_lines(output, reason.detail, everything=everything)
    if len(shown) < len(report.reasons):
        output.line(f"  and {len(report.reasons) - len(shown)} more, which --all and --json show")
    if report.pruned is not None:
        output.line(_pruned_words(report.pruned))
    if report.run:
        output.line("To make it hit, run:")
        output.line(f"  {one_line(report.run)}", whole=True)


def _pruned_words(pruned: Pruned) -> str:
    from cgtool.store.layout import short

    last = pruned.entries[-1]
    missed = "" if pruned.misses == 0 else f"; it was missed {count_text(pruned.misses, 'time')} since"
    return f"Entry {short(last.hash)} of this model was pruned {one_line(last.when)} ({one_line(last.why)}){missed}."


def _entry_words(entry: EntryFacts) -> str:
    from cgtool.store.layout import short

    made = "" if entry.created is None else f", made {one_line(entry.created)}"
    used = "never used" if entry.last_used is None else f"used {count_text(entry.hits, 'time')}, last {entry.last_used}"
    model = "" if entry.model is None else f"{one_line(entry.model)} "
    return f"{model}{short(entry.hash)} (rank {entry.rank} {entry.prefix}{made}, {used})"
