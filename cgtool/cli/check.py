"""`cgtool check`: parse which model and which graphs, show the work, print whether it may be served so.

Must not import torch; the command itself loads as it runs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures, logs
from cgtool.cli.options import cache_dir_option, model_asked, model_options, place_options, talk_options

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.check import CheckReport

EXAMPLES = """\b
Examples:
  cgtool check fixtures/paged_llama.py:build --device cuda
  cgtool check mypackage.models:build --cudagraph-mode FULL_DECODE_ONLY --capture-sizes 1,8,64
  cgtool check mypackage.models:build --rounds 20 --seed 7
  cgtool check mypackage.models:build --json | jq '.findings[].sentence'
"""

#: Options that are fields of the configuration.
_FIELDS = ("level", "cudagraph_mode", "cudagraph_capture_sizes")
#: What each fault is called where it was looked for and not found.
_LOOKED_FOR = {
    "pads": "pads never reach real rows",
    "differs": "a replay gives the bits of a run without graphs",
    "overwritten": "outputs that are held stay as they are",
    "made": "nothing is traced, compiled, opened or captured after warm-up",
    "refused": "inputs and weights lie where they lay at capture",
}


@click.command(epilog=EXAMPLES)
@model_options
@cache_dir_option
@click.option("--level", metavar="0-3", help="Compilation level; 0 checks the model itself. Default: 3, piecewise.")
@click.option(
    "--cudagraph-mode",
    metavar="MODE",
    help="NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE. Default: what attention allows.",
)
@click.option(
    "--capture-sizes",
    "cudagraph_capture_sizes",
    metavar="SIZES",
    help="Sequences of a batch to capture: 1,2,4,8. Default: vLLM's list.",
)
@click.option("--compilation-config", metavar="JSON", help="Any fields of CompilationConfig; a single flag wins.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="How often each graph is replayed.",
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Fixes the batches and their order.")
@place_options
@talk_options
def check(*, output: Output, **options: Any) -> int:
    """Load MODEL from the cache, capture its CUDA graphs, and say whether it may be served from them.

    MODEL is that of warm, with real weights; its ModelSpec says with serving=cgtool.Serving(...) how it is served. Pads
    and unused blocks of the KV cache hold NaN, every captured size is replayed in random order and compared bit by bit
    with a run without graphs, outputs are held and looked at again, and nothing may be traced, compiled, opened or
    captured meanwhile. Exit code 3: a fault was found.
    """
    # Rich, tomllib and the command itself: what `--help` does without.
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.check import check as run

    choice, config = model_asked(options, _FIELDS)
    figures = {"rank": options["rank"], "num_rounds": options["rounds"], "seed": options["seed"]}
    with reporting(output) as on_event:
        report = run(choice, config=config, **figures, on_event=logs.hushing(output, on_event))
    output.report(report, partial(_show, model=choice.model))
    return failures.DONE if report.record.may_be_served else failures.CHECK_SAID_NO


def _show(output: Output, report: CheckReport, *, model: str) -> None:
    from cgtool.cli.columns import show_rows
    from cgtool.cli.text import count_text, secs_text, size_text

    record, captured = report.record, report.captured
    output.notes("Note", report.mode_reasons)
    faults = {fault: [one for one in record.findings if one.fault == fault] for fault in _LOOKED_FOR}
    rows = [
        (words, "yes" if not faults[fault] else f"no, of {count_text(len(faults[fault]), 'graph')}")
        for fault, words in _LOOKED_FOR.items()
    ]
    show_rows(output, ("what must hold", "holds"), rows)
    for one in record.findings:
        where = "" if one.mode is None else f"{one.mode.name}, {count_text(one.num_tokens or 0, 'token')}: "
        output.line(f"  - {where}{one.sentence}", style="red")
    verdict = "may be served" if record.may_be_served else "must not be served"
    output.line(
        f"{model} {verdict} with {record.mode.name}: {count_text(record.num_keys, 'graph')} captured in "
        f"{secs_text(captured.secs)}, {size_text(captured.pool_bytes)}, {count_text(record.num_replays, 'replay')}.",
        style="bold",
    )
