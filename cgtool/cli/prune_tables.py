"""The plan and the outcome of `prune` as people read them.

Must not import torch. Strings of a cache go through `plain`, never into markup.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cgtool.cli.columns import show_rows
from cgtool.cli.text import ago_text, count_text, cut, plain, size_text
from cgtool.store.layout import short

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.prune.records import Kept, PlannedEntry
    from cgtool.toolkit.prune.run import PruneReport, StatsReport

#: Lines of one kind that people are shown; `--json` has all.
_MOST = 20
_KINDS = {
    "temporary": ("temporary file", "temporary files"),
    "artifact": ("artifact that nothing names", "artifacts that nothing names"),
    "rank": ("rank that was never finished", "ranks that were never finished"),
    "unfinished": ("entry that was never finished", "entries that were never finished"),
    "unit": ("unit that no entry shares", "units that no entry shares"),
    "lookup": ("mark of an entry that is gone", "marks of entries that are gone"),
    "state": ("stamp or lock of an entry that is gone", "stamps and locks of entries that are gone"),
    "trash": ("folder that a prune left in the trash", "folders that a prune left in the trash"),
}


def show_plan(output: Output, report: PruneReport, *, dry_run: bool) -> None:
    """Print what goes, why, what comes free, what stays all the same and what will miss."""
    plan = report.plan
    for note in plan.notes:
        output.note(f"Note: {note}", style="yellow")
    _show_kept(output, plan.kept)
    if plan.is_empty:
        output.line(f"Nothing to remove in {plan.root}.")
        return
    if plan.entries:
        rows = [_row(entry, report.now) for entry in plan.entries]
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
    output.line(f"{gone} of {plan.root} {verb}; {size_text(plan.frees_bytes)} come free.", style="bold")


def show_outcome(output: Output, report: PruneReport) -> None:
    """Print what came of a plan."""
    outcome = report.outcome
    if outcome is None or report.plan.is_empty:
        return
    _show_kept(output, outcome.kept)
    for failed in outcome.failed[:_MOST]:
        output.error(failed.sentence)
    if len(outcome.failed) > _MOST:
        output.error(f"and {len(outcome.failed) - _MOST} more, which --json shows.")
    entries = count_text(len(outcome.removed), "entry", "entries")
    leftovers = f" and {count_text(outcome.removed_files, 'leftover')}" if report.plan.files else ""
    output.line(f"Removed {entries}{leftovers}; {size_text(outcome.freed_bytes)} came free.", style="bold")


def show_stats(output: Output, report: StatsReport) -> None:
    """Print what earlier prunes removed and how often it was missed."""
    if not report.pruned:
        output.line(f"No prune removed anything from {report.root} that is still missing.")
        return
    rows = [
        (
            short(entry.hash),
            entry.model,
            ago_text(entry.when, report.now),
            record.misses,
            ago_text(record.last_missed, report.now),
            entry.why,
        )
        for record in report.pruned
        for entry in record.entries[-1:]
    ]
    show_rows(output, ("hash", "model", "removed", ">misses", "last missed", "why"), rows)
    output.line(f"{count_text(report.misses, 'miss', 'misses')} that a prune caused.")


def _show_kept(output: Output, kept: tuple[Kept, ...]) -> None:
    for item in kept[:_MOST]:
        output.note(f"Stays: {short(item.hash)} {cut(plain(item.model))}: {plain(item.sentence)}.", style="dim")
    if len(kept) > _MOST:
        output.note(f"Stays: {len(kept) - _MOST} more, which --json shows.", style="dim")


def _row(entry: PlannedEntry, now: float) -> tuple[str, ...]:
    return (
        short(entry.hash),
        entry.model,
        ago_text(entry.last_used, now),
        size_text(entry.size_bytes),
        size_text(entry.frees_bytes),
        "; ".join(reason.sentence for reason in entry.reasons),
    )


def _models(entries: list[PlannedEntry]) -> str:
    counts = Counter(cut(plain(entry.model)) or short(entry.hash) for entry in entries)
    named = [model + (f" ({count} entries)" if count > 1 else "") for model, count in counts.most_common(_MOST)]
    rest = len(counts) - len(named)
    return ", ".join(named) + (f" and {rest} more" if rest > 0 else "")
