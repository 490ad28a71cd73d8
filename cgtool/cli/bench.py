"""`cgtool bench`: benchmark the ways to start a model.

Must not import torch; the toolkit is imported when the command runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.options import (
    CONFIG_FIELDS,
    compiler_options,
    coverage_options,
    model_and_config,
    model_options,
    output_options,
)
from cgtool.cli.text import secs_text

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.bench.report import BenchReport

#: Terminal widths from which the tables show more columns. A pipe gets all of them.
_MEDIUM_COLUMNS, _FULL_COLUMNS = 110, 165

EXAMPLES = """\b
Examples:
  cgtool bench fixtures/tiny_llama.py:build
  cgtool bench fixtures/tiny_llama.py:build --ways eager,compile-warm,cgtool/eager --html bench.html
  cgtool bench fixtures/tiny_llama.py:build --arg num_layers=16 --arg width=256 --starts 15,torch=5
  cgtool bench mypackage.models:build --device cuda --dtype bfloat16 --tokens 1,8,64 --json > bench.json
  cgtool bench hf:checkpoints/llama --size-dim seq --keep bench-caches --starts 0
"""


def _tokens(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    sizes = [size.strip() for size in text.split(",") if size.strip()]
    wrong = next((size for size in sizes if not (size.isdecimal() and int(size))), None)
    if wrong is not None:
        raise click.BadParameter(f"{wrong!r} is not a size. Give sizes such as 1,8,64.", ctx=ctx, param=param)
    return tuple(dict.fromkeys(map(int, sizes)))


@click.command(epilog=EXAMPLES)
@model_options
@click.option(
    "--weights",
    type=click.Choice(["fake", "real"]),
    default="fake",
    show_default=True,
    help="How to build the model while filling cgtool's cache. Timed starts always use real weights.",
)
@click.option(
    "--ways",
    default="all",
    show_default=True,
    metavar="WAYS",
    help="Ways to measure: eager, compile-cold, compile-warm, mega-cache, aot-precompile, cgtool/ADAPTOR; or the "
    "groups torch, cgtool, all.",
)
@click.option(
    "--starts",
    default="6",
    show_default=True,
    metavar="N[,WAY=N]",
    help="Starts of each way, except cold ones. Override for some ways with 15,torch=5. 0 only prepares.",
)
@click.option(
    "--warm-ups",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Uncounted starts of each way before the counted ones.",
)
@click.option(
    "--cold-starts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Compilations with empty caches, by torch and by cgtool.",
)
@click.option(
    "--tokens",
    default="1,8,64",
    show_default=True,
    callback=_tokens,
    metavar="SIZES",
    help="Sizes of the dynamic dimension to time steps for; an empty list times none.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    metavar="N",
    help="Steps of each size in each start.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Seed for the weights, the order of starts and the bounds.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=1800,
    show_default=True,
    metavar="SECS",
    help="Time limit for one process, which is then killed and counted as failed.",
)
@click.option(
    "--keep",
    metavar="DIR",
    help="Keep prepared caches in this directory, and reuse them in the next bench of the same model.",
)
@click.option("--html", metavar="FILE", help="Write a self-contained HTML page with charts and tables.")
@coverage_options
@compiler_options
@output_options
def bench(*, output: Output, **options: Any) -> int:
    """Benchmark every way to start MODEL, each in fresh processes, taking turns.

    The ways are: eager; torch.compile with empty caches, with warm local caches and from a mega-cache; torch's AOT
    precompile; and cgtool with each adaptor. Each way has its own caches in a temporary directory; yours are not
    touched. MODEL is as for `cgtool warm`, with real weights. This runs MODEL's code many times.

    The tables show the time to import, to build the model and to be ready (from the built model to its first output),
    the time of a step, the bytes on disk and the memory: medians with quartiles, and the ratio to eager within each
    round with its 95 % bound. Outputs are compared with those of eager. A way that fails is listed with its error, and
    the others continue.
    """
    from cgtool.cli.pages import bench_page, write_text
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.bench.runner import bench as run
    from cgtool.toolkit.bench.ways import Settings, parse_starts, parse_ways

    choice, config = model_and_config(options, CONFIG_FIELDS)
    settings = Settings(
        model=choice,
        config=config.to_json(),
        ways=parse_ways(options["ways"]),
        starts=parse_starts(options["starts"], default=6),
        dimension=config.size_dim,
        limit_secs=options["timeout"],
        **{name: options[name] for name in ("warm_ups", "cold_starts", "tokens", "repeats", "seed")},
    )
    html = Path(options["html"]) if options["html"] else None
    if html is not None:
        _check_writable(html)
    keep = Path(options["keep"]) if options["keep"] else None
    with reporting(output) as on_event:
        report = run(settings, keep=keep, command=["cgtool", *sys.argv[1:]], on_event=on_event)
    if html is not None:
        write_text(html, bench_page(report))
    output.report(report, _show)
    return failures.DONE


def _check_writable(file: Path) -> None:
    """Fail now if the page cannot be written, not after minutes of benchmarking."""
    file.parent.mkdir(parents=True, exist_ok=True)
    existed = file.exists()
    file.open("a", encoding="utf-8").close()
    if not existed:
        file.unlink()


def _show(output: Output, report: BenchReport) -> None:
    from cgtool.cli import bench_tables as tables
    from cgtool.cli.columns import Styled, show_rows

    def show(table: list[list[str]]) -> None:
        cells = [[Styled(cell, "bold red") if cell.startswith("DIFFER") else cell for cell in row] for row in table[1:]]
        show_rows(output, [table[0][0], *(f">{column}" for column in table[0][1:])], cells)

    output.notes("Note", report.notes)
    output.line(f"Ways to start {report.model}: medians (quartiles), ratios [95 % bound]", style="bold")
    width = output.stdout.width
    detail = tables.FULL if width >= _FULL_COLUMNS else tables.MEDIUM if width >= _MEDIUM_COLUMNS else tables.SHORT
    show(tables.start_table(report, detail))
    steps = tables.step_table(report, detail)
    if steps:
        output.line()
        output.line(tables.step_caption(report), style="bold")
        show(steps)
    for line in tables.failure_lines(report):
        output.line(line, style="red")
    output.line(f"{tables.machine_line(report)}; took {secs_text(report.secs)}", style="dim")
