"""`cgtool why`: explain why a model hits or misses the cache.

Must not import torch; the toolkit is imported when the command runs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures, logs
from cgtool.cli.diff import MOST_DIFFERENCES, show_lines
from cgtool.cli.options import ADAPTOR_FIELDS, model_and_config, output_options, place_options, warming_options
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

#: Options to leave out of the suggested `cgtool warm` command.
_OUTPUT_OPTIONS = frozenset({"--json", "--quiet", "--verbose", "--traceback", "--all", "-q", "-v"})
_ARGUMENTS = "cgtool.why.arguments"


class _ArgumentKeepingCommand(click.Command):
    """A command that keeps its arguments, to suggest a `cgtool warm` with the same ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = tuple(argument for argument in args if argument not in _OUTPUT_OPTIONS)
        return super().parse_args(ctx, args)


@click.command(cls=_ArgumentKeepingCommand, epilog=EXAMPLES)
@warming_options
@place_options
@click.option("--all", "everything", is_flag=True, help="Show every reason in full.")
@output_options
@click.pass_context
def why(ctx: click.Context, /, *, output: Output, everything: bool, **options: Any) -> int:
    """Explain why MODEL hits or misses the cache.

    For a miss, show the nearest entry, the reasons why it does not match, the decisive ones first, and the command that
    turns the miss into a hit. MODEL and its options are those of `cgtool warm`. This runs MODEL's code, but traces,
    compiles and writes nothing.

    Exit code 0: hit. Exit code 3: miss.
    """
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.why import why as run

    choice, config = model_and_config(options, ADAPTOR_FIELDS)
    with reporting(output) as on_event:
        report = run(
            choice,
            config=config,
            rank=options["rank"],
            arguments=ctx.meta[_ARGUMENTS],
            on_event=logs.silencing_torch(output, on_event),
        )
    output.report(report, partial(show_why, model=choice.model, everything=everything))
    return failures.DONE if report.hit else failures.CHECK_FAILED


def show_why(output: Output, report: WhyReport, *, model: str, everything: bool) -> None:
    """Print the entry that a model hits; for a miss, the reasons and the command to run."""
    name = one_line(model)
    if report.entry is not None:
        output.line(f"{name} hits in {one_line(report.root)}: {_entry_text(report.entry)}.")
        return
    if report.nearest is None:
        known = report.reasons and report.pruned is None
        cause = report.reasons[0].sentence.rstrip(".") if known else "no entry is left"
        output.line(f"{name} misses in {one_line(report.root)}: {one_line(cause)}.", style="bold")
    else:
        output.line(f"{name} misses. The nearest entry, {_entry_text(report.nearest)}, does not match because:")
    shown = report.reasons if everything else report.reasons[:MOST_DIFFERENCES]
    for reason in shown if report.nearest is not None else ():
        output.line(f"  - {one_line(reason.sentence)}")
        show_lines(output, reason.detail, everything=everything)
    if len(shown) < len(report.reasons):
        output.line(f"  and {len(report.reasons) - len(shown)} more (shown by --all and --json)")
    if report.pruned is not None:
        output.line(_pruned_text(report.pruned))
    if report.run:
        output.line("To make it hit, run:")
        output.line(f"  {one_line(report.run)}", whole=True)


def _pruned_text(pruned: Pruned) -> str:
    from cgtool.store.layout import short

    last = pruned.entries[-1]
    missed = "" if pruned.misses == 0 else f"; it has been missed {count_text(pruned.misses, 'time')} since"
    return f"Entry {short(last.hash)} of this model was pruned {one_line(last.when)} ({one_line(last.why)}){missed}."


def _entry_text(entry: EntryFacts) -> str:
    from cgtool.store.layout import short

    created = "" if entry.created is None else f", created {one_line(entry.created)}"
    used = "never used" if entry.last_used is None else f"used {count_text(entry.hits, 'time')}, last {entry.last_used}"
    model = "" if entry.model is None else f"{one_line(entry.model)} "
    return f"{model}{short(entry.hash)} (rank {entry.rank} {entry.prefix}{created}, {used})"
