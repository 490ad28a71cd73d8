"""`cgtool prune`: parse the rules, show the plan, ask, and tell what came of it.

Must not import torch; the command itself loads as it runs. Grammar of amounts, as in the filters of `inspect cache`::

    AGE  = number ("s" | "min" | "h" | "d" | "w")
    SIZE = number ("" | "B" | "KB" | "MB" | "GB" | "TB" | ("K" | "M" | "G" | "T") ("" | "iB"))    KB is 1000, KiB 1024
"""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.options import cache_dir_option, cache_folder, talk_options

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.prune.records import Rules
    from cgtool.toolkit.prune.run import PruneReport

EXAMPLES = """\b
Examples:
  cgtool prune --dry-run
  cgtool prune --older-than 30d --keep-last 2
  cgtool prune --max-size 10GB --yes
  cgtool prune --stale --orphans --units
  cgtool prune --entry 3f9a
  cgtool prune --stats
  cgtool prune --cache-dir ~/.cache/vllm/torch_compile_cache --older-than 60d
"""

_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_SECS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_BYTES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", 1) for end in ("", "ib")},
}


def _age(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    return None if text is None else _amount(text, _SECS, "an age such as 30d, 12h or 90min", ctx, param)


def _size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    return None if text is None else int(_amount(text, _BYTES, "a size such as 10GB or 512MiB", ctx, param))


def _amount(text: str, units: dict[str, Any], what: str, ctx: click.Context, param: click.Parameter) -> float:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise click.BadParameter(f"{text!r} is not {what}.", ctx=ctx, param=param)
    amount = float(match[1]) * float(units[match[2].lower()])
    if not math.isfinite(amount):
        raise click.BadParameter(f"{text[:20]!r}… is more than can be counted. Give less.", ctx=ctx, param=param)
    return amount


def _hashes(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text) is None:  # other systems' names are not hexadecimal
            message = f"{text!r} is not the beginning of a hash, which `cgtool inspect cache` lists."
            raise click.BadParameter(message, ctx=ctx, param=param)
    return texts


@click.command(epilog=EXAMPLES, short_help="Remove from the cache what is old, stale, too much or left over.")
@click.option("--older-than", callback=_age, metavar="AGE", help="Entries not used for longer: 30d, 12h, 90min, 2w.")
@click.option(
    "--max-size", callback=_size, metavar="SIZE", help="Entries used longest ago, until the cache takes no more: 10GB."
)
@click.option(
    "--stale", is_flag=True, help="Entries whose torch, triton, target or sources are not this machine's any more."
)
@click.option("--entry", "entries", multiple=True, callback=_hashes, metavar="HASH", help="This entry. Repeatable.")
@click.option(
    "--keep-last",
    type=click.IntRange(min=0),
    metavar="N",
    help="Keep the N entries of each model that were used last; without another rule, the others go.",
)
@click.option(
    "--orphans", is_flag=True, help="What nothing names, and what dead processes left. Default without a rule."
)
@click.option("--units", is_flag=True, help="Compiled units that no entry shares, and orphans.")
@click.option("--keep-units", is_flag=True, help="Leave the units of entries that go: less comes free.")
@click.option("-n", "--dry-run", is_flag=True, help="Show the plan and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do it without asking.")
@click.option("--stats", is_flag=True, help="Show what earlier prunes removed, and how often it was missed.")
@click.option(
    "--pythonpath",
    multiple=True,
    metavar="DIR",
    help="With --stale: a folder in which models' modules are looked for first. Repeatable.",
)
@cache_dir_option
@talk_options
def prune(*, output: Output, cache_dir: str | None, **options: Any) -> int:
    """Remove entries of the cache that a rule chooses, and what nothing names any more.

    The plan is shown first: what goes, why, how many bytes come free, and which models will miss. Then it asks, unless
    --yes is given. Rules add up; --keep-last protects entries from all of them but --entry. Entries that a live process
    uses stay.

    An entry that was never used is as old as it is. A file with several names comes free with the last of them, so an
    entry's compiled units go with it where no other entry shares them.

    --cache-dir may also name a cache of vLLM, ATOM, torch's Inductor or Triton: by age, size and name whole entries go
    where nothing else needs them, and it is said where that is not so.
    """
    # Rich and the command itself: what `--help` does without.
    from cgtool.cli.progress import reporting
    from cgtool.cli.prune_tables import show_outcome, show_plan, show_stats
    from cgtool.toolkit.prune.run import PruneOptions, plan_prune, prune_stats
    from cgtool.toolkit.prune.run import prune as run

    folder = cache_folder(cache_dir)
    if options["stats"]:
        stats = prune_stats(folder)
        if output.as_json:
            output.json(stats.to_json())
        else:
            show_stats(output, stats)
        return failures.DONE
    asks = not options["yes"] and not options["dry_run"]
    if asks:
        _check_terminal(output)
    asked = PruneOptions(rules=_rules(options), cache_dir=folder, pythonpath=options["pythonpath"])
    with reporting(output) as on_event:
        report = plan_prune(asked, on_event)
    if not output.as_json:
        show_plan(output, report, dry_run=options["dry_run"])
    if not options["dry_run"] and (not asks or _agreed(output, report)):
        with reporting(output) as on_event:
            report = run(report, on_event)
        if not output.as_json:
            show_outcome(output, report)
    if output.as_json:
        output.json(report.to_json())
    return failures.FAILED if report.outcome is not None and report.outcome.failed else failures.DONE


def _rules(options: dict[str, Any]) -> Rules:
    from cgtool.toolkit.prune.records import Rules

    return Rules(
        older_than_secs=options["older_than"],
        max_bytes=options["max_size"],
        stale=options["stale"],
        orphans=options["orphans"],
        units=options["units"],
        keep_last=options["keep_last"],
        entries=options["entries"],
        keep_units=options["keep_units"],
    )


def _check_terminal(output: Output) -> None:
    """Refuse to remove anything where nobody can be asked.

    Raises:
        click.UsageError: This is no terminal, or the output is JSON.
    """
    if output.as_json or not (sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()):
        what = "--json asks nobody" if output.as_json else "There is nobody to ask, for this is no terminal"
        raise click.UsageError(f"{what}: give --yes to remove what the plan names, or --dry-run to see the plan.")


def _agreed(output: Output, report: PruneReport) -> bool:
    if report.plan.is_empty:
        return False
    if click.confirm("Remove this?", default=False, err=True):
        return True
    output.line("Nothing was removed.")
    return False
