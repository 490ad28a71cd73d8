"""`cgtool warm`: parse what the user asked, show the work, print what came of it.

Must not import torch; the command itself loads as it runs.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures, logs
from cgtool.cli.options import (
    CONFIG_FIELDS,
    cache_dir_option,
    compiler_options,
    coverage_options,
    model_options,
    talk_options,
)

if TYPE_CHECKING:
    from cgtool.cli.output import Output

_log = logging.getLogger(__name__)

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


#: Options that are fields of the configuration.
_FIELDS = (*CONFIG_FIELDS, "cache_dir", "level", "adaptor", "jobs", "compile_timeout", "debug_dump_path")


@click.command(epilog=EXAMPLES, short_help="Compile a model into the cache before it is served.")
@model_options
@click.option(
    "--weights",
    type=click.Choice(["fake", "real"]),
    default="fake",
    show_default=True,
    help="Build the model without memory for its weights, or as the factory does.",
)
@cache_dir_option
@coverage_options
@click.option("--level", metavar="0-3", help="Compilation level. Default: 3, piecewise.")
@click.option(
    "--adaptor", metavar="NAME", help="The compiler: aot_inductor (default), inductor_standalone, inductor, eager."
)
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
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Place in a model-parallel group. Default: RANK, else 0."
)
@click.option("--prefix", metavar="NAME", help="Which compiled part of the model this is. Default: the factory's word.")
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
    from cgtool.cli.settings import load_settings
    from cgtool.cli.tables import show_check, show_warm
    from cgtool.toolkit.warm import WarmOptions
    from cgtool.toolkit.warm import warm as run

    flags = {name: options[name] for name in _FIELDS}
    flags["disable_cache"] = options["no_cache"] or None
    flags["proof"] = False if options["no_proof"] else None
    settings = load_settings(compilation_config=options["compilation_config"], flags=flags)
    config = settings.config
    spelled = config.to_json()
    for field, origin in settings.origins.items():
        _log.debug("%s is %s, by %s", field, json.dumps(spelled[field]), origin)
    asked = WarmOptions(
        model=options["model"],
        factory_args=options["factory_args"],
        weights=options["weights"],
        device=options["device"],
        dtype=options["dtype"],
        pythonpath=options["pythonpath"],
        config=config,
        cache_dir=Path(config.cache_dir) if config.cache_dir else None,
        rank=options["rank"],
        prefix=options["prefix"],
        check=options["check"],
    )
    with reporting(output) as on_event:
        report = run(asked, logs.hushing(output, on_event))
    said_no = asked.check and not report.hit
    if output.as_json:
        output.json(report.to_json())
    elif asked.check:
        show_check(output, report, asked.model)
    else:
        show_warm(output, report, asked.model)
    return failures.CHECK_SAID_NO if said_no else failures.DONE
