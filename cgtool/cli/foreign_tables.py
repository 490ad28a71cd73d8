"""What another system's cache holds, as people read it. Must not import torch.

Everything that a cache says goes through `plain` (in `show_rows`, `Output.line` and `Output.note`), never into markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgtool.cli.columns import show_rows
from cgtool.cli.inspect_tables import shapes_text
from cgtool.cli.text import ago_text, count_text, cut, plain, size_text
from cgtool.plan.shapes import shape_order, shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cgtool.cli.output import Output
    from cgtool.toolkit.foreign.inspect_cache import ForeignReport
    from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignEntry
    from cgtool.toolkit.inspect.cache import CacheOptions

#: How many problems and warnings people are shown; programs get all.
_MOST_SAID = 20
_MOST_LETTERS = 600

_SYSTEMS = {
    "vllm": "vLLM's cache",
    "atom": "ATOM's cache",
    "torch_inductor": "torch's own cache",
    "triton": "Triton's cache",
    "mega_cache": "a mega-cache of torch",
    "compiled_artifact": "a compiled artifact of torch",
}

#: Heading, and what stands below it; the columns of terminals that are as wide as this.
_Column = tuple[str, "Callable[[ForeignEntry, float], object]"]
_COLUMNS: tuple[tuple[int, _Column], ...] = (
    (0, ("entry", lambda entry, _: cut(plain(entry.name), 24))),
    (0, ("kind", lambda entry, _: entry.kind)),
    (0, ("ranks", lambda entry, _: " ".join(entry.ranks) or "-")),
    (90, ("holds", lambda entry, _: _held_by(entry))),
    (115, ("shapes", lambda entry, _: _shapes_of(entry.artifacts))),
    (0, (">artifacts", lambda entry, _: len(entry.artifacts))),
    (0, (">size", lambda entry, _: size_text(entry.size_bytes))),
    (115, ("created", lambda entry, now: ago_text(entry.created, now))),
    (150, ("read", lambda entry, now: ago_text(entry.last_used, now))),
    (150, ("deletable", lambda entry, _: "yes" if entry.deletable else "no")),
    (0, (">problems", lambda entry, _: sum(1 for _ in entry.all_problems()))),
)


def show_foreign(output: Output, asked: CacheOptions) -> bool:
    """Print what `inspect cache` was asked of a cache that another system wrote.

    Args:
        output: Where to.
        asked: The command's options.

    Returns:
        Whether there was one; False where cgtool wrote what lies there, or no known system did.

    Raises:
        UsageError: A filter or the order is not for such a cache.
        CacheError: The cache went away while it was read.
    """
    if asked.path is None:
        return False
    from cgtool.toolkit.foreign.inspect_cache import inspect_foreign  # not for the default cache, which is cgtool's

    report = inspect_foreign(asked.path, filters=asked.filters, sort=asked.sort, limit=asked.limit)
    if report is None:
        return False
    if output.as_json:
        output.json(report.to_json())
    else:
        _show(output, report)
    return True


def _show(output: Output, report: ForeignReport) -> None:
    cache = report.cache
    show_notes(output, cache.warnings, "Warning")
    columns = [column for width, column in _COLUMNS if output.stdout.width >= width]
    if report.shown:
        rows = ([cell(entry, report.now) for _, cell in columns] for entry in report.shown)
        show_rows(output, [heading for heading, _ in columns], rows)
    if len(report.shown) == 1 and report.shown[0].artifacts:
        show_artifacts(output, report.shown[0].artifacts)
    problems = [f"{entry.name}: {problem}" for entry in report.shown for problem in entry.all_problems()]
    show_notes(output, problems, "Problem")
    output.line(_total(report))
    output.line(cache.deletion, style="dim")


def show_artifacts(output: Output, artifacts: Iterable[ForeignArtifact]) -> None:
    """Print a table of artifacts."""
    headings = ["artifact", "what", "rank", "shape", ">piece", "target", ">size", "pickle"]
    rows = (
        [
            artifact.path.rpartition("/")[2],
            artifact.what,
            artifact.rank or "-",
            "-" if artifact.shape is None else shapes_text([artifact.shape]),
            "-" if artifact.piece_index is None else artifact.piece_index,
            artifact.target or "-",
            size_text(artifact.size_bytes),
            "yes" if artifact.holds_pickle else "no",
        ]
        for artifact in artifacts
    )
    show_rows(output, headings, rows)


def _held_by(entry: ForeignEntry) -> str:
    """The prefixes of a model, or the name and the target of a kernel."""
    facts = entry.factors if entry.kind == "kernel" and isinstance(entry.factors, dict) else {}
    targets = {artifact.target for artifact in entry.artifacts if artifact.what == "kernel_binary" and artifact.target}
    return " ".join([*entry.prefixes, *([str(facts["name"])] if "name" in facts else []), *sorted(targets)]) or "-"


def _shapes_of(artifacts: Iterable[ForeignArtifact]) -> str:
    shapes = {shape_text(artifact.shape): artifact.shape for artifact in artifacts if artifact.shape is not None}
    return shapes_text(sorted(shapes.values(), key=shape_order)) or "-"


def show_notes(output: Output, sentences: Iterable[str], word: str) -> None:
    """Print what is to be noted, beside the output: some of it."""
    listed = list(sentences)
    for sentence in listed[:_MOST_SAID]:
        output.note(f"{word}: {cut(plain(sentence), _MOST_LETTERS)}", style="yellow")
    if len(listed) > _MOST_SAID:
        output.note(f"{word}: and {len(listed) - _MOST_SAID} more, which --json shows.", style="yellow")


def _total(report: ForeignReport) -> str:
    cache, count = report.cache, len(report.cache.entries)
    matching = "" if report.matching == count else f"{report.matching} of "
    shown = "" if len(report.shown) == report.matching else f"{len(report.shown)} shown of "
    version = "" if cache.version is None else f" ({cache.version})"
    entries = count_text(count, "entry", "entries")
    problems = f"; {count_text(report.num_problems, 'problem')}" if report.num_problems else ""
    return (
        f"{_SYSTEMS[cache.system]}{version}: {shown}{matching}{entries} in {cache.root}, "
        f"{size_text(cache.size_bytes)} on the disk{problems}"
    )
