"""`cgtool warm`: compile a model into the cache.

Must not import torch; the toolkit is imported when the command runs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures, logs
from cgtool.cli.options import (
    ADAPTOR_FIELDS,
    REMOTE_FIELDS,
    model_and_config,
    output_options,
    parse_required,
    place_options,
    remote_options,
    warming_options,
)
from cgtool.cli.text import count_text, first, indices_text, secs_text, size_text
from cgtool.host import environment, launched

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.warm import WarmReport

#: Reasons shown to people; `--json` has all of them.
_MOST_REASONS = 8

EXAMPLES = """\b
Examples:
  cgtool warm fixtures/tiny_llama.py:build
  cgtool warm fixtures/tiny_llama.py:build --arg num_layers=80 --compile-sizes 1,8
  cgtool warm fixtures/tiny_llama.py:build --remote s3://models/cgtool
  cgtool warm mypackage.models:build --weights real --dtype bfloat16
  cgtool warm hf:checkpoints/llama --compile-sizes batch=4:seq=128
  cgtool warm hf:checkpoints/llama --cache static --cache-length 1024
  cgtool warm mypackage.models:build --jobs 4 --compile-timeout 600
  cgtool warm mypackage.models:build --executor dask://10.0.0.1:8786
  cgtool warm mypackage.models:build --require num_tokens=1-512
  cgtool warm fixtures/tiny_llama.py:build --check || echo "not warm yet"
  cgtool warm fixtures/tiny_llama.py:build --json | jq .compiled
"""


@click.command(epilog=EXAMPLES)
@warming_options
@click.option(
    "--jobs",
    metavar="N",
    help="Compile N pieces in parallel, each in a worker process; 0 compiles in this process. Default: one for each "
    "core, as memory allows.",
)
@click.option(
    "--executor",
    metavar="URL",
    help="Compile on a cluster: dask://HOST:PORT, ray://HOST:PORT, slurm:NAME=VALUE,..., mpi, or a plug-in's URL.",
)
@click.option(
    "--compile-timeout", metavar="SECS", help="Kill a worker that takes longer for one piece. Default: no limit."
)
@click.option(
    "--no-proof",
    is_flag=True,
    help="Do not run each artifact and the whole call once and compare the results before publishing.",
)
@click.option(
    "--dump",
    "debug_dump_path",
    metavar="DIR",
    help="Write the model's graph, stitched program and generated code to this directory for reading, even on a hit.",
)
@click.option(
    "--require",
    multiple=True,
    callback=parse_required,
    metavar="DIM=LOW-HIGH",
    help="Trace further variants until all these sizes of a dynamic dimension are covered. Repeatable.",
)
@place_options
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Warm all N ranks of a model-parallel MODEL with this command, each under a process group that exchanges "
    "nothing.",
)
@remote_options
@click.option("--check", is_flag=True, help="Compile nothing; exit with 3 if MODEL is not warm.")
@click.option("--no-cache", is_flag=True, help="Disable the cache, which leaves nothing to do; a note says so.")
@output_options
def warm(*, output: Output, **options: Any) -> int:
    """Compile MODEL into the cache ahead of serving.

    MODEL is path/to/file.py:factory, package.module:factory, or hf:PATH, where PATH is a config.json of transformers or
    a directory with one. A factory returns a cgtool.ModelSpec or (module, args). This runs MODEL's code: warm only
    models that you would run.

    Artifacts that the cache already has are not compiled again.

    Settings are read, in increasing order of precedence, from: defaults, [tool.cgtool] in pyproject.toml or
    cgtool.toml, CGTOOL_* variables, --compilation-config, individual options.
    """
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.ranks import warm_all_ranks, warm_launched
    from cgtool.toolkit.warm import warm as run

    if options["world_size"] and options["rank"] is not None:
        raise click.UsageError("--world-size warms every rank and --rank only one. Give one of them.")
    together = launched() and options["rank"] is None and not options["world_size"]
    follows = together and environment().rank > 0  # rank 0 reports for all ranks
    output.quiet = output.quiet or follows
    disable_cache, proof = options["no_cache"] or None, False if options["no_proof"] else None
    choice, config = model_and_config(
        options,
        (*ADAPTOR_FIELDS, *REMOTE_FIELDS, "jobs", "executor", "compile_timeout", "debug_dump_path"),
        disable_cache=disable_cache,
        proof=proof,
    )
    with reporting(output) as on_event:
        common = {"config": config, "check": options["check"], "on_event": logs.silencing_torch(output, on_event)}
        if options["world_size"]:
            report = warm_all_ranks(choice, options["world_size"], **common)
        elif together:
            report = warm_launched(choice, **common)
        else:
            report = run(choice, rank=options["rank"], **common)
    if output.as_json or not follows:
        output.report(report, partial(_show_check if options["check"] else _show_warm, model=choice.model))
    return failures.CHECK_FAILED if options["check"] and not report.is_warm else failures.DONE


def _show_warm(output: Output, report: WarmReport, *, model: str) -> None:
    from cgtool.cli.columns import Styled, show_rows
    from cgtool.plan.shapes import shape_text
    from cgtool.store.layout import short

    output.notes("Note", report.notes)
    if report.reasons:
        reasons = first(report.reasons, _MOST_REASONS)
        listed = f" {reasons[0]}" if len(reasons) == 1 else "".join(f"\n  - {reason}" for reason in reasons)
        output.note(f"Compiled because:{listed}", style="dim")
    reused = count_text(report.reused, "artifact")
    output.line(
        f"{model} was warm already: {reused} in place, nothing traced or compiled."
        if report.hit
        else f"Warmed {model}: {report.compiled} compiled in {secs_text(report.compile_secs)}, {report.reused} reused, "
        f"traced in {secs_text(report.trace_secs)}.",
        style="bold",
    )
    if report.entry is not None:
        entry = report.entry
        output.line(
            f"{entry['model']} {short(entry['hash'])} rank {entry['rank']} {entry['prefix']}: "
            f"{count_text(entry['pieces'], 'piece')}, {entry['splitting_pieces']} splitting, "
            f"{entry['unique_pieces']} unique, {size_text(entry['size_bytes'])} with {entry['adaptor']}"
        )
        rows = [
            (
                indices_text(artifact["piece_index"]),
                shape_text(artifact["shape"]),
                len(artifact["piece_index"]),
                Styled(short(artifact["digest"]), "cyan"),
                f"{artifact['compile_secs']:.2f}",
                size_text(artifact["size_bytes"]),
            )
            for artifact in entry["artifacts"]
        ]
        show_rows(output, ("pieces", "shape", ">shared by", "artifact", ">seconds", ">size"), rows)
    for rank in report.ranks[1:]:
        output.line(f"Rank {rank.rank}: {rank.compiled} compiled, {rank.reused} reused.")
        output.notes(f"Note, rank {rank.rank}", [note for note in rank.notes if note not in report.notes])
    output.line("Load it in Python:", style="bold")
    output.line(f"  import cgtool; model = {report.load_call}", whole=True)
    output.line("Try it from this directory:", style="bold")
    output.line(f"  {report.start}", whole=True)


def _show_check(output: Output, report: WarmReport, *, model: str) -> None:
    output.notes("Note", report.notes)
    if report.hit and not report.is_warm:
        cold = ", ".join(str(rank.rank) for rank in report.ranks if not rank.hit)
        output.line(f"{model} is not warm for rank {cold}. Run the same command without --check to warm it.")
        return
    if report.hit:
        output.line(f"{model} is warm: the cache at {report.root} has a matching entry.")
        return
    output.line(f"{model} is not warm. Run the same command without --check to warm it. Reasons:")
    for reason in first(report.reasons or ("The cache has no entry for it.",), _MOST_REASONS):
        output.line(f"  - {reason}")
