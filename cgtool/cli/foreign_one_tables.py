"""What `inspect entry`, `artifact`, `graph` and `key` found in another system's cache, for people. No torch here.

Everything that a cache says goes through `plain` (in `show_rows`, `Output.line` and `Output.note`), never into markup.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cgtool.cli.foreign_tables import show_artifacts, show_notes
from cgtool.cli.inspect_one_tables import listed, show_facts, show_kernels, show_key, show_source
from cgtool.cli.text import count_text, cut, indices_text, plain, size_text
from cgtool.plan.shapes import shape_order, shape_text

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.plan.shapes import Shape
    from cgtool.toolkit.foreign.inspect_artifact import ForeignArtifactReport, ForeignGraphReport
    from cgtool.toolkit.foreign.inspect_entry import ForeignEntryReport, ForeignKeyReport

_MOST_LETTERS = 200


def show_foreign_entry(output: Output, report: ForeignEntryReport) -> None:
    """Print what an entry holds, and what such a cache does not record."""
    entry = report.entry
    output.line(f"{_short(entry.name)}", style="bold", whole=True)
    parts = [entry.kind, count_text(len(entry.artifacts), "artifact"), size_text(entry.size_bytes)]
    parts += [f"rank {' '.join(entry.ranks)}"] * bool(entry.ranks)
    parts += [f"{count_text(len(entry.prefixes), 'part')}: {' '.join(entry.prefixes)}"] * bool(entry.prefixes)
    output.line(_short(", ".join(parts)))
    for line in _coverage(report):
        output.line(line)
    if entry.artifacts:
        output.line()
        show_artifacts(output, entry.artifacts)
    show_notes(output, entry.all_problems(), "Problem")
    output.line(report.not_recorded, style="dim")


def _coverage(report: ForeignEntryReport) -> Iterator[str]:
    """Yield which pieces serve which shapes, on which rank, and which shapes some of them lack."""
    pieces: dict[tuple[str, str, int], dict[str, Shape]] = {}
    for one in report.entry.artifacts:
        if one.piece_index is not None and one.shape is not None and one.size_bytes:
            place = one.rank, one.prefix, one.piece_index
            pieces.setdefault(place, {})[shape_text(one.shape)] = one.shape
    groups: dict[tuple[str, str, str], list[int]] = {}
    for (rank, prefix, piece), shapes in sorted(pieces.items()):
        words = ", ".join(shape_text(shape) for shape in sorted(shapes.values(), key=shape_order))
        groups.setdefault((rank, prefix, words), []).append(piece)
    yield from listed(
        "Compiled:",
        [
            f"{_place(rank, prefix)}{'piece' if len(numbers) == 1 else 'pieces'} {indices_text(numbers)} for {words}"
            for (rank, prefix, words), numbers in groups.items()
        ],
    )
    yield from listed(
        "Holes:",
        [
            f"{_place(hole.rank, hole.prefix)}piece {hole.piece_index} for {shape_text(hole.shape)}"
            for hole in report.holes
        ],
    )


def _place(rank: str, prefix: str) -> str:
    where = " ".join([*([f"rank {rank}"] if rank else []), *([prefix] if prefix else [])])
    return f"{where}, " if where else ""


def show_foreign_key(output: Output, report: ForeignKeyReport) -> None:
    """Print what a system wrote of an entry's key, and what it did not."""
    show_key(output, report)
    output.line(report.not_recorded, style="dim")


def show_foreign_artifact(output: Output, report: ForeignArtifactReport) -> None:
    """Print what an artifact holds."""
    artifact, contents = report.artifact, report.contents
    output.line(_short(f"{report.entry.name}/{artifact.path}"), style="bold", whole=True)
    parts = [artifact.what, size_text(artifact.size_bytes)]
    parts += [f"piece {artifact.piece_index}"] * (artifact.piece_index is not None)
    parts += [f"for {shape_text(artifact.shape)}"] if artifact.shape is not None else []
    parts += [f"rank {artifact.rank}"] * bool(artifact.rank) + [artifact.prefix] * bool(artifact.prefix)
    parts += [f"for {artifact.target}"] * bool(artifact.target)
    parts += ["loading it unpickles"] * artifact.holds_pickle
    output.line(_short(", ".join(parts)))
    if report.facts:
        show_facts(output, "Kernel", report.facts)
    if contents.compiler:
        output.line(f"Compiler: {_short(contents.compiler)}")
    held = [*artifact.members, *(f"{name} ({size_text(size)})" for name, size in contents.members)]
    for line in listed("Holds:", held):
        output.line(line)
    show_kernels(output, report.kernels)
    show_notes(output, [*artifact.problems, *contents.warnings], "Problem")
    for source in contents.sources:
        output.line()
        show_source(output, source.text, source.language)


def show_foreign_graph(output: Output, report: ForeignGraphReport) -> None:
    """Print the graph that a system wrote for people."""
    output.note(f"The whole graph, not cut into pieces, from {report.path}")
    show_source(output, report.text, "python")


def _short(text: str) -> str:
    return cut(plain(text), _MOST_LETTERS)
