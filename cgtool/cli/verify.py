"""`cgtool verify`: parse what is to be checked, show the work, print what was found.

Must not import torch; the command itself loads as it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures, values
from cgtool.cli.options import cache_dir_option, cache_folder, talk_options

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.verify.load import ModelChoice

EXAMPLES = """\b
Examples:
  cgtool verify
  cgtool verify 3f9a --world-size 8
  cgtool verify /mnt/shared/cache --strict
  cgtool verify llama.tar.zst
  cgtool verify --repair
  cgtool verify 3f9a --load
  cgtool verify --load --model fixtures/tiny_llama.py:build --arg num_layers=4
  cgtool verify --json | jq '.entries[].verdict'
"""


@click.command(epilog=EXAMPLES, short_help="Check every file of the cache, and whether this machine can load it.")
@click.argument("targets", nargs=-1, metavar="[HASH...|PATH]")
@click.option("--strict", is_flag=True, help="Fail where any entry is not optimal here.")
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many ranks each entry must have. Default: from 0 to the greatest that it has.",
)
@click.option("--repair", is_flag=True, help="Mend what is damaged; compile again what nothing else has.")
@click.option("--load", is_flag=True, help="Open every artifact in a fresh process in which nothing can be compiled.")
@click.option("--model", metavar="MODEL", help="With --load: also load this model, as warm takes it, and call it once.")
@click.option(
    "--arg",
    "factory_args",
    multiple=True,
    callback=values.arguments,
    metavar="NAME=VALUE",
    help="A keyword argument for MODEL's factory; JSON, else a string. Repeatable.",
)
@click.option("--device", metavar="DEVICE", help="Where MODEL is built: cpu, cuda, cuda:1.")
@click.option("--dtype", metavar="DTYPE", help="MODEL's default floating dtype: float32, bfloat16.")
@click.option(
    "--pythonpath",
    multiple=True,
    metavar="DIR",
    help="A folder in which MODEL's modules are looked for first. Repeatable.",
)
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="The rank to load MODEL as. Default: RANK, else 0."
)
@click.option("--prefix", metavar="NAME", help="Which compiled part MODEL is. Default: the factory's word.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Read N files at a time. Default: the cores.")
@cache_dir_option
@talk_options
def verify(*, output: Output, targets: tuple[str, ...], **options: Any) -> int:
    """Read every file of the cache, match it to its digest, and judge whether this machine loads it.

    HASH is the beginning of a hash that `inspect cache` lists; PATH is a cache, one entry's folder, or a bundle, which
    is looked at before it is imported. Without either, all of the cache is checked. Without --load and --repair nothing
    is executed and nothing is changed.

    Each entry is optimal, or loads though compiling it again is advised, or is unsupported here. Exit code 3: a file is
    damaged, something is missing, or load refuses an entry for who may write to it or for want of a signature. A
    verdict alone gives 3 where HASH, an entry's folder or a bundle was named and is unsupported, where a cache holds no
    entry that is supported, and with --strict: entries for other machines are no failure of a cache.
    """
    # Rich and the command itself: what `--help` does without.
    from cgtool.cli.progress import reporting
    from cgtool.cli.verify_tables import show_verify
    from cgtool.toolkit.verify.run import VerifyOptions
    from cgtool.toolkit.verify.run import verify as run

    model = _model(options)
    asked = VerifyOptions(
        targets=targets,
        cache_dir=cache_folder(options["cache_dir"]),
        names_cache=options["cache_dir"] is not None,
        strict=options["strict"],
        world_size=options["world_size"],
        jobs=options["jobs"],
        load=options["load"],
        repair=options["repair"],
        model=model,
        rank=options["rank"],
    )
    with reporting(output) as on_event:
        report = run(asked, on_event)
    if output.as_json:
        output.json(report.to_json())
    else:
        show_verify(output, report)
    return failures.DONE if report.ok else failures.CHECK_SAID_NO


def _model(options: dict[str, Any]) -> ModelChoice | None:
    from cgtool.toolkit.verify.load import ModelChoice  # kept out of `--help`

    names = ("factory_args", "device", "dtype", "pythonpath", "prefix")
    if options["model"] is None:
        given = [f"--{'arg' if name == 'factory_args' else name}" for name in (*names, "rank") if options[name]]
        if given:
            message = f"{given[0]} speaks of a model, and none is named. Name it with --model."
            raise click.UsageError(message)
        return None
    if not options["load"]:
        message = "--model says what --load loads and calls. Give --load too."
        raise click.UsageError(message)
    return ModelChoice(model=options["model"], **{name: options[name] for name in names})
