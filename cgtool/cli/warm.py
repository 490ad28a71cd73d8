"""`cgtool warm`: parse what the user asked, show the work, print what came of it.

Must not import torch; the command itself loads as it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures, logs
from cgtool.cli.options import (
    adaptor_options,
    cache_dir_option,
    compiler_options,
    coverage_options,
    model_asked,
    model_options,
    place_options,
    talk_options,
    weights_option,
)

if TYPE_CHECKING:
    from cgtool.cli.output import Output

EXAMPLES = """\b
Examples:
  cgtool warm fixtures/tiny_llama.py:build
  cgtool warm fixtures/tiny_llama.py:build --arg num_layers=80 --compile-sizes 1,8
  cgtool warm mypackage.models:build --weights real --dtype bfloat16
  cgtool warm hf:checkpoints/llama --compile-sizes batch=4:seq=128
  cgtool warm mypackage.models:build --jobs 4 --compile-timeout 600
  cgtool warm fixtures/tiny_llama.py:build --check || echo "not warm yet"
  cgtool warm fixtures/tiny_llama.py:build --json | jq .compiled
"""


@click.command(epilog=EXAMPLES, short_help="Compile a model into the cache before it is served.")
@model_options
@weights_option
@cache_dir_option
@coverage_options
@adaptor_options
@compiler_options
@click.option(
    "--jobs", metavar="N", help="Compile N pieces at a time, each in a process; 0: in this one. Default: the cores."
)
@click.option(
    "--compile-timeout", metavar="SECONDS", help="End a worker that takes longer for one piece. Default: no limit."
)
@click.option("--no-proof", is_flag=True, help="Store artifacts without running them once and comparing their results.")
@click.option(
    "--dump",
    "debug_dump_path",
    metavar="DIR",
    help="Write the model's graph, program and generated code into this folder, for people; on a hit, too.",
)
@place_options
@click.option("--check", is_flag=True, help="Only say whether the cache serves the model: exit code 3 where not.")
@click.option("--no-cache", is_flag=True, help="Switch the cache off; warm has nothing to do then and says so.")
@talk_options
def warm(*, output: Output, **options: Any) -> int:
    """Compile MODEL into the cache before it is served.

    MODEL is path/to/file.py:factory, package.module:factory, or hf:PATH, where PATH is a folder or a config.json of
    transformers. This runs MODEL's code: warm only what you would run. A factory returns a cgtool.ModelSpec or
    (module, args).

    Nothing is compiled that the cache already holds. Settings come from, in rising order: defaults, [tool.cgtool] in
    pyproject.toml or cgtool.toml, CGTOOL_* variables, --compilation-config, single flags.
    """
    # Rich, tomllib and the command itself: what `--help` does without.
    from cgtool.cli.progress import reporting
    from cgtool.cli.tables import show_check, show_warm
    from cgtool.toolkit.warm import warm as run

    disable_cache, proof = options["no_cache"] or None, False if options["no_proof"] else None
    asked = model_asked(
        options, ("jobs", "compile_timeout", "debug_dump_path"), disable_cache=disable_cache, proof=proof
    )
    with reporting(output) as on_event:
        report = run(asked, check=options["check"], on_event=logs.hushing(output, on_event))
    if output.as_json:
        output.json(report.to_json())
    elif options["check"]:
        show_check(output, report, asked.model)
    else:
        show_warm(output, report, asked.model)
    return failures.CHECK_SAID_NO if options["check"] and not report.hit else failures.DONE
