"""What `inspect entry`, `artifact` and `key` found, as people read it.

Must not import torch. Strings of a model or of a cache folder go through `plain`, never into markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cgtool.cli.columns import show_rows
from cgtool.cli.text import count_text, cut, indices_text, plain, size_text
from cgtool.plan.shapes import shape_text
from cgtool.store.layout import short
from cgtool.toolkit.inspect.entry import place_name
from cgtool.toolkit.inspect.key import leaves

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.store.compiled_code import Kernel
    from cgtool.store.records import Row
    from cgtool.toolkit.coverage import Place
    from cgtool.toolkit.foreign.inspect_entry import ForeignKeyReport
    from cgtool.toolkit.inspect.artifact import ArtifactReport
    from cgtool.toolkit.inspect.entry import EntryReport
    from cgtool.toolkit.inspect.key import KeyReport

#: How many holes, fallbacks, uses or guards people are shown; programs get all.
_MOST_LINES = 20
#: How much of one value people are shown.
_MOST_CHARACTERS = 200
_UNKNOWN = "unknown"


def show_entry(output: Output, report: EntryReport) -> None:
    """Print what an entry is compiled for."""
    for warning in report.warnings:
        output.note(f"Warning: {warning}", style="yellow")
    first = report.manifests[0]
    output.line(f"{cut(plain(first.model))} {short(report.hash)}", style="bold")
    several = len({manifest.rank for manifest in report.manifests}) > 1
    by_part: dict[tuple[str, int], list[tuple[int, Place]]] = {}
    for number, place in enumerate(report.coverage.places):
        by_part.setdefault((place.prefix, place.variant), []).append((number, place))
    for (prefix, variant), places in by_part.items():
        manifest = next(one for one in report.manifests if one.prefix == prefix and variant < len(one.variants))
        counts = manifest.variants[variant]
        fixed = "".join(f", {cut(plain(name))}={size}" for name, size in counts.fixed.items())
        output.line()
        output.line(
            f"{prefix}, variant {variant} ({cut(plain(counts.name))}{fixed}): {count_text(counts.pieces, 'piece')}, "
            f"{counts.splitting_pieces} splitting, {counts.unique_pieces} unique, {manifest.adaptor}"
        )
        _coverage_table(output, report, places, manifest.adaptor, several=several)
    for line in _remarks(report):
        output.line(line)


def _coverage_table(
    output: Output, report: EntryReport, places: Sequence[tuple[int, Place]], adaptor: str, *, several: bool
) -> None:
    """Print shapes against pieces; those of one rank whose cells are the same share a column, and so do such ranks."""
    missing = {(place_name(hole), shape_text(hole.shape)) for hole in report.coverage.holes}
    texts = {shape_text(shape): shape for shape in report.coverage.shapes}
    columns: dict[tuple[str, ...], dict[int, list[int]]] = {}
    for number, place in places:
        by_shape = {shape_text(row.shape): row for row in report.rows.get(place_name(place), ())}
        cells = tuple(
            "HOLE"
            if (place_name(place), text) in missing
            else _cell(by_shape.get(text), adaptor, served=(number, text) in report.coverage.covered)
            for text in texts
        )
        columns.setdefault(cells, {}).setdefault(place.rank, []).append(place.piece_index)
    headings, shown = ["shape"], list(columns)
    for by_rank in columns.values():
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, pieces in by_rank.items():
            groups.setdefault(tuple(sorted(pieces)), []).append(rank)
        headings.append("; ".join(_heading(pieces, ranks, several=several) for pieces, ranks in groups.items()))
    rows = [
        [shape_text(shape), *(cells[at] for cells in shown)]
        for at, shape in enumerate(texts.values())
        if any(cells[at] for cells in shown)
    ]
    show_rows(output, headings, rows)


def _heading(pieces: Sequence[int], ranks: Sequence[int], *, several: bool) -> str:
    where = f"rank {indices_text(ranks)} " if several else ""
    return f"{where}{'piece' if len(pieces) == 1 else 'pieces'} {indices_text(pieces)}"


def _cell(row: Row | None, adaptor: str, *, served: bool) -> str:
    if row is None:
        return "as it stands" if served else ""
    words = "proved" if row.artifact.proved else "not proved"
    other = "" if row.adaptor == adaptor else f" ({row.adaptor})"
    return f"{words}{other}" + (f", {count_text(len(row.artifact.guards), 'guard')}" if row.artifact.guards else "")


def _remarks(report: EntryReport) -> Iterator[str]:
    """Yield what stands below the tables: sums, holes, fallbacks, what is not proved."""
    coverage = report.coverage
    rows = [row for found in report.rows.values() for row in found]
    sizes = {row.artifact.digest: row.artifact.size_bytes for row in rows}
    yield ""
    yield f"{count_text(len(sizes), 'artifact')} for {count_text(len(rows), 'row')}, {size_text(sum(sizes.values()))}"
    holes = [
        f"piece {hole.piece_index} for {shape_text(hole.shape)} (variant {hole.variant}, rank {hole.rank}, "
        f"{hole.prefix})"
        for hole in coverage.holes
    ]
    holes += [
        f"{count_text(one.count, 'piece')} of variant {one.variant} without artifacts (rank {one.rank}, {one.prefix})"
        for one in coverage.unknown
    ]
    yield from listed("Holes, which warming the model again fills:", holes)
    if not holes and not report.warnings:
        yield "No holes: every piece has every shape."
    fallbacks = [
        f"piece {fallback.piece_index} for {shape_text(fallback.shape)} (variant {fallback.variant}, rank "
        f"{manifest.rank}, {manifest.prefix}) by {fallback.adaptor}: {fallback.reason}"
        for manifest in report.manifests
        for fallback in manifest.fallbacks
    ]
    yield from listed("Served by another adaptor:", fallbacks)
    gaps: dict[str, int] = {}
    for row in rows:
        if row.artifact.proof_gap:
            gaps[row.artifact.proof_gap] = gaps.get(row.artifact.proof_gap, 0) + 1
    yield from listed("Not proved:", [f"{count_text(times, 'row')}: {gap}" for gap, times in gaps.items()])


def show_key(output: Output, report: KeyReport | ForeignKeyReport) -> None:
    """Print every factor and the leaves of its value."""
    output.line(cut(plain(report.hash), _MOST_CHARACTERS), style="bold", whole=True)
    lines: list[str] = []
    for factor in report.factors:
        lines.append(f"{_one_line(factor.name)}  ({short(factor.hash)})")
        lines += [f"  {_leaf(path, value)}" for path, value in leaves(factor.value)]
    if lines:
        output.line("\n".join(lines), whole=True)


def show_artifact(output: Output, report: ArtifactReport) -> None:
    """Print what an artifact holds."""
    for warning in report.warnings:
        output.note(f"Warning: {warning}", style="yellow")
    contents = report.contents
    output.line(f"{report.digest}.{report.kind}", style="bold", whole=True)
    count = _UNKNOWN if report.num_kernels is None else str(report.num_kernels)
    proved = any(use.row.artifact.proved for use in report.uses)
    output.line(f"{size_text(contents.size_bytes)}, {count} kernels, {'proved' if proved else 'not proved'}")
    show_facts(output, "Target", report.target)
    show_facts(output, "Compiler", report.compiler)
    if contents.members:
        output.line()
        show_rows(output, ("member", ">size"), [(name, size_text(size)) for name, size in contents.members])
    show_kernels(output, contents.kernels)
    for line in _uses(report):
        output.line(line)
    for source in contents.sources:
        output.line()
        show_source(output, source.text, source.language)


def show_kernels(output: Output, kernels: Sequence[Kernel]) -> None:
    """Print a table of kernels, if there are any."""
    if kernels:
        output.line()
        rows = [
            (one.name, _figure(one.registers), _figure(one.shared_bytes), _figure(one.constant_bytes))
            for one in kernels
        ]
        show_rows(output, ("kernel", ">registers", ">shared bytes", ">constant bytes"), rows)


def _uses(report: ArtifactReport) -> Iterator[str]:
    places: dict[tuple[str, ...], list[int]] = {}
    guards: dict[str, None] = {}
    for use in report.uses:
        row, name = use.row, use.name
        where = f"{short(name.hash)} rank {name.rank} {name.prefix}", f"variant {row.variant}", shape_text(row.shape)
        places.setdefault(where, []).append(row.piece_index)
        guards.update(dict.fromkeys(row.artifact.guards))
    served = [
        f"{where}, {variant}, {'piece' if len(pieces) == 1 else 'pieces'} {indices_text(pieces)} for {shape}"
        for (where, variant, shape), pieces in places.items()
    ]
    yield ""
    yield from listed("Serves:", served) if served else ["No manifest names it."]
    yield from listed("Relies on:", guards)


def show_facts(output: Output, title: str, facts: Mapping[str, Any]) -> None:
    """Print the leaves of some facts below a title; "unknown" where there are none."""
    if not facts:
        output.line(f"{title}: {_UNKNOWN}")
        return
    lines = [f"  {_leaf(path, value)}" for path, value in leaves(dict(facts))]
    output.line("\n".join([f"{title}:", *lines]), whole=True)


def show_source(output: Output, text: str, language: str) -> None:
    """Print text that a stranger wrote: highlighted on a terminal, else as it is, without what a terminal obeys."""
    shown = plain(text, lines=True)
    if output.stdout.is_terminal:
        from rich.syntax import Syntax  # pygments, which a pipe does without

        output.show(Syntax(shown, language, theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        output.line(shown, whole=True)


def listed(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield a title and some of the lines below it; nothing where there are none."""
    given = list(lines)
    if given:
        yield title
        yield from (f"  {_one_line(line)}" for line in given[:_MOST_LINES])
    if len(given) > _MOST_LINES:
        yield f"  and {len(given) - _MOST_LINES} more, which --json shows"


def _leaf(path: str, value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value)
    return f"{_one_line(path)}: {_one_line(shown)}" if path else _one_line(shown)


def _one_line(text: str) -> str:
    return cut(plain(text), _MOST_CHARACTERS)


def _figure(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)
