"""`cgtool check`: check that a model can be served from its CUDA graphs.

Must not import torch; the toolkit is imported when the command runs.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures, logs
from cgtool.cli.options import (
    cache_dir_option,
    config_option,
    model_and_config,
    model_options,
    output_options,
    place_options,
)

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
#: The property that each kind of fault violates.
_PROPERTIES = {
    "pads": "padding never reaches real rows",
    "differs": "replays are bitwise equal to runs without graphs",
    "overwritten": "outputs that the caller holds stay unchanged",
    "made": "nothing is traced, compiled, opened or captured after warm-up",
    "refused": "inputs and weights keep their addresses since capture",
}


@click.command(epilog=EXAMPLES)
@model_options
@cache_dir_option
@click.option("--level", metavar="0-3", help="Compilation level; 0 checks the uncompiled model. Default: 3, piecewise.")
@click.option(
    "--cudagraph-mode",
    metavar="MODE",
    help="NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE. Default: what the attention ops allow.",
)
@click.option(
    "--capture-sizes",
    "cudagraph_capture_sizes",
    metavar="SIZES",
    help="Batch sizes to capture, in sequences: 1,2,4,8. Default: vLLM's list.",
)
@config_option
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Replays of each graph.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Seed for the batches and their order."
)
@place_options
@output_options
def check(*, output: Output, **options: Any) -> int:
    """Load MODEL from the cache, capture its CUDA graphs, and check that it can be served from them.

    MODEL is as for `cgtool warm`, with real weights. Its ModelSpec describes how it is served:
    serving=cgtool.Serving(...).

    Padding and unused blocks of the KV cache are filled with NaN. Every captured size is replayed in random order and
    compared bitwise with a run without graphs. Outputs are held and compared again later. Nothing may be traced,
    compiled, opened or captured meanwhile.

    Exit code 3: a fault was found.
    """
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.check import check as run

    choice, config = model_and_config(options, _FIELDS)
    with reporting(output) as on_event:
        report = run(
            choice,
            config=config,
            rank=options["rank"],
            num_rounds=options["rounds"],
            seed=options["seed"],
            on_event=logs.silencing_torch(output, on_event),
        )
    output.report(report, partial(_show, model=choice.model))
    return failures.DONE if report.record.may_be_served else failures.CHECK_FAILED


def _show(output: Output, report: CheckReport, *, model: str) -> None:
    from cgtool.cli.columns import show_rows
    from cgtool.cli.text import count_text, secs_text, size_text

    record, captured = report.record, report.captured
    output.notes("Note", report.mode_reasons)
    counts = Counter[str](finding.fault for finding in record.findings)
    rows = [
        (text, f"no, in {count_text(counts[fault], 'graph')}" if counts[fault] else "yes")
        for fault, text in _PROPERTIES.items()
    ]
    show_rows(output, ("property", "holds"), rows)
    for finding in record.findings:
        where = "" if finding.mode is None else f"{finding.mode.name}, {count_text(finding.num_tokens or 0, 'token')}: "
        output.line(f"  - {where}{finding.sentence}", style="red")
    verdict = "can be served" if record.may_be_served else "must not be served"
    output.line(
        f"{model} {verdict} with {record.mode.name}: {count_text(record.num_keys, 'graph')} captured in "
        f"{secs_text(captured.secs)}, {size_text(captured.pool_bytes)}, {count_text(record.num_replays, 'replay')}.",
        style="bold",
    )
