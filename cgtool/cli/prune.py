"""`cgtool prune`: remove old, stale or unreferenced data from the cache.

Must not import torch; the toolkit is imported when the command runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.options import cache_dir_option, opened_cache, output_options
from cgtool.cli.text import ago_text, count_text, cut, first, plain, size_text
from cgtool.store.layout import short

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.prune.plan import Kept, Outcome, Plan, PlannedEntry
    from cgtool.toolkit.prune.run import PruneStats

EXAMPLES = """\b
Examples:
  cgtool prune --dry-run
  cgtool prune --older-than 30d --keep-last 2
  cgtool prune --max-size 10GB --yes
  cgtool prune --stale --orphans --units
  cgtool prune --entry 3f9a
  cgtool prune --stats
  cgtool prune s3://models/cgtool --older-than 60d --dry-run
"""

#: Models shown to people; `--json` has all of them.
_MOST = 20
_KINDS = {
    "temporary": ("temporary file", "temporary files"),
    "shared": ("artifact that no entry links to", "artifacts that no entry links to"),
    "artifact": ("artifact that no manifest names", "artifacts that no manifest names"),
    "rank": ("unfinished rank", "unfinished ranks"),
    "unfinished": ("unfinished entry", "unfinished entries"),
    "unit": ("unit that no entry shares", "units that no entry shares"),
    "lookup": ("lookup file of a removed entry", "lookup files of removed entries"),
    "state": ("stamp or lock of a removed entry", "stamps and locks of removed entries"),
    "trash": ("directory that an earlier prune left in the trash", "directories that earlier prunes left in the trash"),
}


def _age(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    return _amount(text, "SECS", "an age such as 30d, 12h or 90min", ctx, param)


def _size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    size = _amount(text, "BYTES", "a size such as 10GB or 512MiB", ctx, param)
    return None if size is None else int(size)


def _amount(text: str | None, units: str, what: str, ctx: click.Context, param: click.Parameter) -> float | None:
    if text is None:
        return None
    from cgtool.toolkit import filters

    value = filters.amount(text, getattr(filters, units))
    if value is None:
        raise click.BadParameter(f"{text!r} is not {what}.", ctx=ctx, param=param)
    if not math.isfinite(value):
        raise click.BadParameter(f"{text[:20]!r}… is too large. Give less.", ctx=ctx, param=param)
    return value


def _hashes(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        if re.fullmatch(r"[0-9a-fA-F]{1,64}", text) is None:
            message = f"{text!r} is not a prefix of a hash. `cgtool inspect cache` lists the hashes."
            raise click.BadParameter(message, ctx=ctx, param=param)
    return texts


@click.command(epilog=EXAMPLES)
@click.argument("path", required=False, type=click.Path(), metavar="[PATH|URL]")
@click.option(
    "--older-than",
    "older_than_secs",
    callback=_age,
    metavar="AGE",
    help="Remove entries not used for longer than AGE: 30d, 12h, 90min, 2w.",
)
@click.option(
    "--max-size",
    "max_bytes",
    callback=_size,
    metavar="SIZE",
    help="Remove the least recently used entries until the cache is no larger than SIZE: 10GB.",
)
@click.option(
    "--stale",
    is_flag=True,
    help="Remove entries whose cgtool, torch, triton, target or sources no longer match this machine.",
)
@click.option(
    "--entry", "entries", multiple=True, callback=_hashes, metavar="HASH", help="Remove this entry. Repeatable."
)
@click.option(
    "--keep-last",
    type=click.IntRange(min=0),
    metavar="N",
    help="Keep the N most recently used entries of each model. Without another rule, remove the others.",
)
@click.option(
    "--orphans",
    is_flag=True,
    help="Remove unreferenced files and leftovers of dead processes. Default if no rule is given.",
)
@click.option("--units", is_flag=True, help="Remove compiled units that no entry shares, and orphans.")
@click.option("--keep-units", is_flag=True, help="Keep the units of removed entries, which frees less space.")
@click.option("-n", "--dry-run", is_flag=True, help="Show the plan and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--stats", is_flag=True, help="Show what earlier prunes removed and how often it was missed since.")
@click.option(
    "--pythonpath",
    multiple=True,
    metavar="DIR",
    help="With --stale, search this directory first for models' modules. Repeatable.",
)
@cache_dir_option
@output_options
def prune(*, output: Output, path: str | None, cache_dir: str | None, **options: Any) -> int:
    """Remove entries that match a rule, and unreferenced files, from the cache at PATH.

    The plan is shown first: what is removed and why, how many bytes that frees, and which models will miss. Then prune
    asks for confirmation, unless --yes is given. Rules add up. --keep-last protects entries from every rule but
    --entry. Entries that a live process uses are kept.

    An unused entry's age counts from its creation. A file with several hard links is freed with the last of them, so
    the compiled units of an entry are removed with it, unless another entry shares them.

    URL is a store, as for `cgtool push`. A store records no use, so age counts from creation there. Unreferenced
    artifacts are removed from a store only once they are a day old, since a push may be in progress.
    """
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.mirror import remove_pruned
    from cgtool.toolkit.prune.plan import Rules
    from cgtool.toolkit.prune.run import plan_prune, prune_stats

    if options["stats"]:
        with opened_cache(path, cache_dir) as (folder, _):
            output.report(prune_stats(folder), _show_stats)
        return failures.DONE
    confirm = not options["yes"] and not options["dry_run"]
    if confirm:
        _check_terminal(output)
    rules = Rules(**{field.name: options[field.name] for field in dataclasses.fields(Rules)})
    with opened_cache(path, cache_dir) as (folder, mirror):
        with reporting(output) as on_event:
            plan = plan_prune(rules, cache_dir=folder, pythonpath=options["pythonpath"], on_event=on_event)
        plan = dataclasses.replace(plan, where=None if mirror is None else mirror.store.url)
        if not output.as_json:
            _show_plan(output, plan, dry_run=options["dry_run"])
        outcome = None
        if not options["dry_run"] and (not confirm or _confirmed(output, plan)):
            with reporting(output) as on_event:
                outcome = plan.execute(on_event)
                if mirror is not None:
                    remove_pruned(mirror)
            if not output.as_json and not plan.is_empty:
                _show_outcome(output, plan, outcome)
    if output.as_json:
        output.json(plan.to_json(outcome))
    return failures.FAILED if outcome is not None and outcome.failed else failures.DONE


def _check_terminal(output: Output) -> None:
    """Refuse to continue if the user cannot be asked for confirmation."""
    if output.as_json or not (sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()):
        reason = "--json cannot ask for confirmation" if output.as_json else "Confirmation needs a terminal"
        raise click.UsageError(f"{reason}. Give --yes to carry out the plan, or --dry-run to see it.")


def _confirmed(output: Output, plan: Plan) -> bool:
    if plan.is_empty:
        return False
    if click.confirm("Remove this?", default=False, err=True):
        return True
    output.line("Nothing was removed.")
    return False


def _show_plan(output: Output, plan: Plan, *, dry_run: bool) -> None:
    """Print what is removed and why, the bytes freed, what is kept nonetheless, and which models will miss."""
    from cgtool.cli.columns import show_rows  # lazy: imports rich

    now = time.time()
    output.notes("Note", plan.notes)
    _show_kept(output, plan.kept)
    if plan.is_empty:
        output.line(f"Nothing to remove in {plan.where or plan.root}.")
        return
    if plan.entries:
        rows = [
            (
                short(entry.hash),
                entry.model,
                ago_text(entry.last_used, now),
                size_text(entry.size_bytes),
                size_text(entry.frees_bytes),
                "; ".join(reason.sentence for reason in entry.reasons),
            )
            for entry in plan.entries
        ]
        show_rows(output, ("hash", "model", "used", ">size", ">frees", "why"), rows)
    for kind, count in Counter(file.kind for file in plan.files).items():
        frees = sum(file.frees_bytes for file in plan.files if file.kind == kind)
        output.line(f"{count_text(count, *_KINDS[kind])}: {size_text(frees)}")
    missing = [entry for entry in plan.entries if not entry.instead]
    if missing:
        output.line(f"These models will miss until they are warmed again: {_models(missing)}.")
    amount = count_text(len(plan.entries), "entry", "entries") + (
        f" and {count_text(len(plan.files), 'leftover')}" if plan.files else ""
    )
    verb = "Would remove" if dry_run else "Will remove"
    output.line(f"{verb} {amount} from {plan.where or plan.root}, freeing {size_text(plan.frees_bytes)}.", style="bold")


def _show_outcome(output: Output, plan: Plan, outcome: Outcome) -> None:
    """Print what was removed and what failed."""
    _show_kept(output, outcome.kept)
    for sentence in first([failed.sentence for failed in outcome.failed]):
        output.error(sentence)
    entries = count_text(len(outcome.removed), "entry", "entries")
    leftovers = f" and {count_text(outcome.removed_files, 'leftover')}" if plan.files else ""
    output.line(f"Removed {entries}{leftovers}, freeing {size_text(outcome.freed_bytes)}.", style="bold")


def _show_stats(output: Output, stats: PruneStats) -> None:
    """Print what earlier prunes removed and how often it was missed."""
    from cgtool.cli.columns import show_rows  # lazy: imports rich

    if not stats.pruned:
        output.line(f"Nothing that a prune removed from {stats.root} is still missing.")
        return
    now = time.time()
    rows = [
        (
            short(entry.hash),
            entry.model,
            ago_text(entry.when, now),
            record.misses,
            ago_text(record.last_missed, now),
            entry.why,
        )
        for record in stats.pruned
        for entry in record.entries[-1:]
    ]
    show_rows(output, ("hash", "model", "removed", ">misses", "last missed", "why"), rows)
    output.line(f"Prunes caused {count_text(stats.misses, 'miss', 'misses')}.")


def _show_kept(output: Output, kept: tuple[Kept, ...]) -> None:
    for line in first([f"{short(item.hash)} {cut(plain(item.model))}: {plain(item.sentence)}." for item in kept]):
        output.note(f"Kept: {line}", style="dim")


def _models(entries: list[PlannedEntry]) -> str:
    counts = Counter(cut(plain(entry.model)) or short(entry.hash) for entry in entries)
    named = [model + (f" ({count} entries)" if count > 1 else "") for model, count in counts.most_common(_MOST)]
    rest = len(counts) - len(named)
    return ", ".join(named) + (f" and {rest} more" if rest > 0 else "")
