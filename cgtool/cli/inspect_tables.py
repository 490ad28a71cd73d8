"""What `inspect` found, as people read it: entries of a cache.

Must not import torch. Strings of a model or of a cache folder go through `plain`, never into markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgtool.cli.columns import show_rows
from cgtool.cli.text import ago_text, count_text, secs_text, size_text
from cgtool.plan.shapes import shape_text
from cgtool.store.layout import short

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cgtool.cli.output import Output
    from cgtool.plan.shapes import Shape
    from cgtool.toolkit.inspect.cache import CacheReport
    from cgtool.toolkit.listing import EntryListing

#: How many shapes a cell names.
_FEW_SHAPES = 4
#: How many warnings people are shown; programs get all.
_MOST_WARNINGS = 20

#: Heading, and what stands below it; the columns of terminals that are as wide as this, a pipe being wider than any.
_Column = tuple[str, "Callable[[EntryListing, float], object]"]
_COLUMNS: tuple[tuple[int, _Column], ...] = (
    (0, ("hash", lambda entry, _: short(entry.manifest.hash))),
    (0, ("model", lambda entry, _: entry.manifest.model)),
    (0, (">rank", lambda entry, _: entry.manifest.rank)),
    (0, ("prefix", lambda entry, _: entry.manifest.prefix)),
    (115, ("adaptor", lambda entry, _: entry.manifest.adaptor)),
    (150, ("shapes", lambda entry, _: shapes_text(entry.shapes))),
    (0, (">pieces", lambda entry, _: entry.manifest.variants[0].pieces)),
    (0, (">unique", lambda entry, _: entry.manifest.variants[0].unique_pieces)),
    (115, (">artifacts", lambda entry, _: len(entry.artifact_files))),
    (0, (">size", lambda entry, _: size_text(entry.size_bytes))),
    (115, (">unshared", lambda entry, _: size_text(entry.unshared_bytes))),
    (150, (">saved", lambda entry, _: secs_text(entry.saved_secs))),
    (150, ("created", lambda entry, now: ago_text(entry.manifest.created, now))),
    (0, ("used", lambda entry, now: ago_text(entry.usage.last_used, now))),
    (115, (">hits", lambda entry, _: entry.usage.hits)),
)


def show_cache(output: Output, report: CacheReport) -> None:
    """Print a cache's entries."""
    listing = report.listing
    for warning in listing.warnings[:_MOST_WARNINGS]:
        output.note(f"Warning: {warning}", style="yellow")
    if len(listing.warnings) > _MOST_WARNINGS:
        output.note(f"Warning: and {len(listing.warnings) - _MOST_WARNINGS} more, which --json shows.", style="yellow")
    if not report.num_entries:
        output.line(f"The cache at {listing.root} is empty. Fill it with: cgtool warm MODEL")
        return
    columns = [column for width, column in _COLUMNS if output.stdout.width >= width]
    if listing.entries:
        rows = [[cell(entry, report.now) for _, cell in columns] for entry in listing.entries]
        show_rows(output, [heading for heading, _ in columns], rows)
    output.line(_total(report))


def _total(report: CacheReport) -> str:
    listing, matching = report.listing, report.matching
    shown = "" if len(listing.entries) == matching else f"{len(listing.entries)} shown of "
    if matching == report.num_entries:
        count = count_text(matching, "entry", "entries")
        line = f"{shown}{count} in {listing.root}, {size_text(listing.size_bytes)} on the disk"
    else:
        count = count_text(report.num_entries, "entry", "entries")
        line = (
            f"{shown}{matching} of {count} in {listing.root}, {size_text(report.matching_bytes)} of "
            f"{size_text(listing.size_bytes)} on the disk"
        )
    line += f"; without sharing {size_text(report.unshared_bytes)}"
    return line + (f"; hits saved {secs_text(report.saved_secs)} of compiling" if report.saved_secs else "")


def shapes_text(shapes: Sequence[Shape]) -> str:
    """Return shapes for people: "general, 8", "general, 8, 16, 24, … (9)"."""
    few = len(shapes) <= _FEW_SHAPES + 1
    words = [shape_text(shape) for shape in (shapes if few else shapes[:_FEW_SHAPES])]
    return ", ".join(words if few else [*words, f"… ({len(shapes)})"])
