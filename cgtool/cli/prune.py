"""`cgtool prune`: parse the rules, show the plan, ask, and tell what came of it.

Must not import torch; the command itself loads as it runs.
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
from cgtool.cli.options import cache_dir_option, cache_named, talk_options
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

#: Models that people are shown; `--json` has all.
_MOST = 20
_KINDS = {
    "temporary": ("temporary file", "temporary files"),
    "shared": ("artifact that no entry links to", "artifacts that no entry links to"),
    "artifact": ("artifact that nothing names", "artifacts that nothing names"),
    "rank": ("rank that was never finished", "ranks that were never finished"),
    "unfinished": ("entry that was never finished", "entries that were never finished"),
    "unit": ("unit that no entry shares", "units that no entry shares"),
    "lookup": ("mark of an entry that is gone", "marks of entries that are gone"),
    "state": ("stamp or lock of an entry that is gone", "stamps and locks of entries that are gone"),
    "trash": ("folder that a prune left in the trash", "folders that a prune left in the trash"),
}


def _age(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    return _amount(text, "SECS", "an age such as 30d, 12h or 90min", ctx, param)


def _size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    size = _amount(text, "BYTES", "a size such as 10GB or 512MiB", ctx, param)
    return None if size is None else int(size)


def _amount(text: str | None, units: str, what: str, ctx: click.Context, param: click.Parameter) -> float | None:
    if text is None:
        return None
    from cgtool.toolkit import filters  # what `--help` does without

    found = filters.amount(text, getattr(filters, units))
    if found is None:
        raise click.BadParameter(f"{text!r} is not {what}.", ctx=ctx, param=param)
    if not math.isfinite(found):
        raise click.BadParameter(f"{text[:20]!r}… is more than can be counted. Give less.", ctx=ctx, param=param)
    return found


def _hashes(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        if re.fullmatch(r"[0-9a-fA-F]{1,64}", text) is None:
            message = f"{text!r} is not the beginning of a hash, which `cgtool inspect cache` lists."
            raise click.BadParameter(message, ctx=ctx, param=param)
    return texts


@click.command(epilog=EXAMPLES)
@click.argument("path", required=False, type=click.Path(), metavar="[PATH|URL]")
@click.option(
    "--older-than",
    "older_than_secs",
    callback=_age,
    metavar="AGE",
    help="Entries not used for longer: 30d, 12h, 90min, 2w.",
)
@click.option(
    "--max-size",
    "max_bytes",
    callback=_size,
    metavar="SIZE",
    help="Entries used longest ago, until the cache takes no more: 10GB.",
)
@click.option(
    "--stale",
    is_flag=True,
    help="Entries whose cgtool, torch, triton, target or sources are not this machine's any more.",
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
def prune(*, output: Output, path: str | None, cache_dir: str | None, **options: Any) -> int:
    """Remove entries of the cache at PATH that a rule chooses, and what nothing names any more.

    The plan is shown first: what goes, why, how many bytes come free, and which models will miss. Then it asks, unless
    --yes is given. Rules add up; --keep-last protects entries from all of them but --entry. Entries that a live process
    uses stay.

    An unused entry's age counts from its creation. A file with several names comes free with the last of them, so an
    entry's compiled units go with it where no other entry shares them.

    URL is a store, as `cgtool push` takes it: no use is known there, so age counts from creation. Artifacts that
    nothing names any more go once they are a day old, for a push may be under way.
    """
    # Rich and the command itself: what `--help` does without.
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.mirror import remove_pruned
    from cgtool.toolkit.prune.plan import Rules
    from cgtool.toolkit.prune.run import plan_prune, prune_stats

    if options["stats"]:
        with cache_named(path, cache_dir) as (folder, _):
            output.report(prune_stats(folder), _show_stats)
        return failures.DONE
    asks = not options["yes"] and not options["dry_run"]
    if asks:
        _check_terminal(output)
    rules = Rules(**{field.name: options[field.name] for field in dataclasses.fields(Rules)})
    with cache_named(path, cache_dir) as (folder, mirror):
        with reporting(output) as on_event:
            plan = plan_prune(rules, cache_dir=folder, pythonpath=options["pythonpath"], on_event=on_event)
        plan = dataclasses.replace(plan, where=None if mirror is None else mirror.store.url)
        if not output.as_json:
            _show_plan(output, plan, dry_run=options["dry_run"])
        outcome = None
        if not options["dry_run"] and (not asks or _agreed(output, plan)):
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
    """Refuse to remove anything where nobody can be asked."""
    if output.as_json or not (sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()):
        what = "--json asks nobody" if output.as_json else "There is nobody to ask, for this is no terminal"
        raise click.UsageError(f"{what}: give --yes to remove what the plan names, or --dry-run to see the plan.")


def _agreed(output: Output, plan: Plan) -> bool:
    if plan.is_empty:
        return False
    if click.confirm("Remove this?", default=False, err=True):
        return True
    output.line("Nothing was removed.")
    return False


def _show_plan(output: Output, plan: Plan, *, dry_run: bool) -> None:
    """Print what goes, why, what comes free, what stays all the same and what will miss."""
    from cgtool.cli.columns import show_rows  # with rich

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
        show_rows(output, ("hash", "model", "used", ">size", ">comes free", "why"), rows)
    for kind, count in Counter(file.kind for file in plan.files).items():
        frees = sum(file.frees_bytes for file in plan.files if file.kind == kind)
        output.line(f"{count_text(count, *_KINDS[kind])}: {size_text(frees)}")
    missing = [entry for entry in plan.entries if not entry.instead]
    if missing:
        output.line(f"These will miss, until they are warmed again: {_models(missing)}.")
    gone = count_text(len(plan.entries), "entry", "entries") + (
        f" and {count_text(len(plan.files), 'leftover')}" if plan.files else ""
    )
    verb = "would go" if dry_run else "will go"
    output.line(f"{gone} of {plan.where or plan.root} {verb}; {size_text(plan.frees_bytes)} come free.", style="bold")


def _show_outcome(output: Output, plan: Plan, outcome: Outcome) -> None:
    """Print what came of a plan."""
    _show_kept(output, outcome.kept)
    for sentence in first([failed.sentence for failed in outcome.failed]):
        output.error(sentence)
    entries = count_text(len(outcome.removed), "entry", "entries")
    leftovers = f" and {count_text(outcome.removed_files, 'leftover')}" if plan.files else ""
    output.line(f"Removed {entries}{leftovers}; {size_text(outcome.freed_bytes)} came free.", style="bold")


def _show_stats(output: Output, stats: PruneStats) -> None:
    """Print what earlier prunes removed and how often it was missed."""
    from cgtool.cli.columns import show_rows  # with rich

    if not stats.pruned:
        output.line(f"No prune removed anything from {stats.root} that is still missing.")
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
    output.line(f"{count_text(stats.misses, 'miss', 'misses')} that a prune caused.")


def _show_kept(output: Output, kept: tuple[Kept, ...]) -> None:
    for line in first([f"{short(item.hash)} {cut(plain(item.model))}: {plain(item.sentence)}." for item in kept]):
        output.note(f"Stays: {line}", style="dim")


def _models(entries: list[PlannedEntry]) -> str:
    counts = Counter(cut(plain(entry.model)) or short(entry.hash) for entry in entries)
    named = [model + (f" ({count} entries)" if count > 1 else "") for model, count in counts.most_common(_MOST)]
    rest = len(counts) - len(named)
    return ", ".join(named) + (f" and {rest} more" if rest > 0 else "")
