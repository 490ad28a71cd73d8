"""The tables of `inspect`: a cache, an entry, a key or an artifact, of cgtool or of another system.

Must not import torch. Untrusted text (from models and caches) is escaped by `plain` (in `show_rows`, `Output.line` and
`Output.note`) and never interpreted as markup. Long values are truncated; `--json` has them in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cgtool.cli.columns import show_rows
from cgtool.cli.text import ago_text, count_text, cut, first, indices_text, plain, secs_text, size_text
from cgtool.plan.shapes import distinct_shapes, of_sizes, shape_text
from cgtool.store.layout import short
from cgtool.toolkit.inspect.artifact import ArtifactReport
from cgtool.toolkit.inspect.entry import EntryReport, leaves
from cgtool.toolkit.listing import CacheListing

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgtool.cli.output import Output
    from cgtool.plan.shapes import Shape
    from cgtool.store.compiled_code import Kernel
    from cgtool.store.records import Row
    from cgtool.toolkit.coverage import Place
    from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignEntry
    from cgtool.toolkit.inspect.artifact import ForeignArtifactReport
    from cgtool.toolkit.inspect.cache import CacheReport
    from cgtool.toolkit.inspect.entry import ForeignEntryReport, KeyReport

#: Shapes named in a cell.
_FEW_SHAPES = 4
#: Characters shown of a value.
_MOST_CHARACTERS = 200
_UNKNOWN = "unknown"

_SYSTEMS = {
    "vllm": "vLLM's cache",
    "atom": "ATOM's cache",
    "torch_inductor": "torch's own cache",
    "triton": "Triton's cache",
    "mega_cache": "a mega-cache of torch",
    "compiled_artifact": "a compiled artifact of torch",
}

_Column = tuple[int, str, "Callable[[Any, float], object]"]
#: The terminal width from which a column is shown (a pipe shows all), its heading, and the function for its cells.
_COLUMNS: tuple[_Column, ...] = (
    (0, "hash", lambda entry, _: short(entry.manifest.hash)),
    (0, "model", lambda entry, _: entry.manifest.model),
    (0, ">rank", lambda entry, _: entry.manifest.rank),
    (0, "prefix", lambda entry, _: entry.manifest.prefix),
    (115, "adaptor", lambda entry, _: entry.manifest.adaptor),
    (150, "shapes", lambda entry, _: _shapes_text(entry.shapes)),
    (0, ">pieces", lambda entry, _: entry.manifest.variants[0].pieces),
    (0, ">unique", lambda entry, _: entry.manifest.variants[0].unique_pieces),
    (115, ">artifacts", lambda entry, _: len(entry.artifact_files)),
    (0, ">size", lambda entry, _: size_text(entry.size_bytes)),
    (115, ">unshared", lambda entry, _: size_text(entry.unshared_bytes)),
    (150, ">saved", lambda entry, _: secs_text(entry.saved_secs)),
    (150, "created", lambda entry, now: ago_text(entry.manifest.created, now)),
    (0, "used", lambda entry, now: ago_text(entry.usage.last_used, now)),
    (115, ">hits", lambda entry, _: entry.usage.hits),
)
_FOREIGN_COLUMNS: tuple[_Column, ...] = (
    (0, "entry", lambda entry, _: cut(plain(entry.name), 24)),
    (0, "kind", lambda entry, _: entry.kind),
    (0, "ranks", lambda entry, _: " ".join(entry.ranks) or "-"),
    (90, "holds", lambda entry, _: _contents_text(entry)),
    (115, "shapes", lambda entry, _: _shapes_text(_shapes_of(entry.artifacts)) or "-"),
    (0, ">artifacts", lambda entry, _: len(entry.artifacts)),
    (0, ">size", lambda entry, _: size_text(entry.size_bytes)),
    (115, "created", lambda entry, now: ago_text(entry.created, now)),
    (150, "read", lambda entry, now: ago_text(entry.last_used, now)),
    (150, "deletable", lambda entry, _: "yes" if entry.deletable else "no"),
    (0, ">problems", lambda entry, _: sum(1 for _ in entry.all_problems())),
)


def show_cache(output: Output, report: CacheReport) -> None:
    """Print the entries of a cache."""
    cache, figures = report.cache, report.figures
    count, passing = figures["num_entries"], figures["matching"]
    output.notes("Warning", map(plain, cache.warnings))
    if isinstance(cache, CacheListing) and not count:
        output.line(f"The cache at {report.where} is empty. Fill it with: cgtool warm MODEL")
        return
    shown = "" if len(report.shown) == passing else f"{len(report.shown)} shown of "
    matching = "" if passing == count else f"{passing} of "
    entries = f"{shown}{matching}{count_text(count, 'entry', 'entries')} in {report.where}"
    if isinstance(cache, CacheListing):
        _show_entries(output, _COLUMNS, report)
        part = f"{size_text(figures['matching_bytes'])} of " if matching else ""
        saved_secs = figures["saved_secs"]
        saved = f"; hits saved {secs_text(saved_secs)} of compile time" if saved_secs else ""
        unshared = size_text(figures["unshared_bytes"])
        output.line(f"{entries}, {part}{size_text(cache.size_bytes)} on disk; {unshared} without sharing{saved}")
        return
    _show_entries(output, _FOREIGN_COLUMNS, report)
    if len(report.shown) == 1 and report.shown[0].artifacts:
        _show_artifacts(output, report.shown[0].artifacts)
    problems = [f"{entry.name}: {problem}" for entry in report.shown for problem in entry.all_problems()]
    output.notes("Problem", map(plain, problems))
    version = "" if cache.version is None else f" ({cache.version})"
    problems_text = f"; {count_text(figures['num_problems'], 'problem')}" if figures["num_problems"] else ""
    output.line(f"{_SYSTEMS[cache.system]}{version}: {entries}, {size_text(cache.size_bytes)} on disk{problems_text}")
    output.line(cache.deletion, style="dim")


def _show_entries(output: Output, columns: Iterable[_Column], report: CacheReport) -> None:
    fitting = [(heading, cell) for width, heading, cell in columns if output.stdout.width >= width]
    if report.shown:
        rows = ([cell(entry, report.now) for _, cell in fitting] for entry in report.shown)
        show_rows(output, [heading for heading, _ in fitting], rows)


def _show_artifacts(output: Output, artifacts: Iterable[ForeignArtifact]) -> None:
    rows = (
        [
            artifact.path.rpartition("/")[2],
            artifact.what,
            artifact.rank or "-",
            "-" if artifact.shape is None else shape_text(artifact.shape),
            "-" if artifact.piece_index is None else artifact.piece_index,
            artifact.target or "-",
            size_text(artifact.size_bytes),
            "yes" if artifact.holds_pickle else "no",
        ]
        for artifact in artifacts
    )
    show_rows(output, ["artifact", "what", "rank", "shape", ">piece", "target", ">size", "pickle"], rows)


def _contents_text(entry: ForeignEntry) -> str:
    """Return the prefixes of a model, or the name and target of a kernel."""
    targets = {artifact.target for artifact in entry.artifacts if artifact.what == "kernel_binary" and artifact.target}
    names = [str(entry.kernel["name"])] if "name" in entry.kernel else []
    return " ".join([*entry.prefixes, *names, *sorted(targets)]) or "-"


def _shapes_of(artifacts: Iterable[ForeignArtifact]) -> tuple[Shape, ...]:
    return distinct_shapes(artifact.shape for artifact in artifacts if artifact.shape is not None)


def _shapes_text(shapes: Sequence[Shape]) -> str:
    """Format shapes: "general, 8", "general, 8, 16, 24, … (9)"."""
    texts = [shape_text(shape) for shape in shapes[: _FEW_SHAPES + 1]]
    return ", ".join(texts if len(shapes) <= len(texts) else [*texts[:-1], f"… ({len(shapes)})"])


def show_entry(output: Output, report: EntryReport | ForeignEntryReport) -> None:
    """Print the coverage of an entry, or the contents of another system's entry."""
    if isinstance(report, EntryReport):
        _show_coverage(output, report)
        return
    entry = report.entry
    output.line(_one_line(entry.name), style="bold", whole=True)
    parts = [entry.kind, count_text(len(entry.artifacts), "artifact"), size_text(entry.size_bytes)]
    parts += [f"rank {' '.join(entry.ranks)}"] * bool(entry.ranks)
    parts += [f"{count_text(len(entry.prefixes), 'part')}: {' '.join(entry.prefixes)}"] * bool(entry.prefixes)
    output.line(_one_line(", ".join(parts)))
    pieces: dict[tuple[str, str, int], list[ForeignArtifact]] = {}
    for one in entry.artifacts:
        if one.piece_index is not None and one.size_bytes:
            pieces.setdefault((one.rank, one.prefix, one.piece_index), []).append(one)
    groups: dict[tuple[str, str, str], list[int]] = {}
    for (rank, prefix, piece), artifacts in sorted(pieces.items()):
        if shapes := _shapes_of(artifacts):
            groups.setdefault((rank, prefix, ", ".join(map(shape_text, shapes))), []).append(piece)
    compiled = [
        f"{_where(rank, prefix)}{_pieces_text(numbers)} for {shape_names}"
        for (rank, prefix, shape_names), numbers in groups.items()
    ]
    holes = [
        f"{_where(hole.rank, hole.prefix)}piece {hole.piece_index} for {shape_text(hole.shape)}"
        for hole in report.holes
    ]
    for line in (*_listed("Compiled:", compiled), *_listed("Holes:", holes)):
        output.line(line)
    if entry.artifacts:
        output.line()
        _show_artifacts(output, entry.artifacts)
    output.notes("Problem", map(plain, entry.all_problems()))
    output.line(report.not_recorded, style="dim")


def _where(rank: str, prefix: str) -> str:
    where = " ".join([*([f"rank {rank}"] if rank else []), *([prefix] if prefix else [])])
    return f"{where}, " if where else ""


def _pieces_text(pieces: Sequence[int]) -> str:
    return f"{'piece' if len(pieces) == 1 else 'pieces'} {indices_text(pieces)}"


def _show_coverage(output: Output, report: EntryReport) -> None:
    output.notes("Warning", map(plain, report.warnings))
    first = report.manifests[0]
    output.line(f"{cut(plain(first.model))} {short(report.hash)}", style="bold")
    several = len({manifest.rank for manifest in report.manifests}) > 1
    by_part: dict[tuple[str, int], list[Place]] = {}
    for place in report.coverage.places:
        by_part.setdefault((place.prefix, place.variant), []).append(place)
    for (prefix, variant), places in by_part.items():
        manifest = next(one for one in report.manifests if one.prefix == prefix and variant < len(one.variants))
        counts = manifest.variants[variant]
        fixed = "".join(f", {cut(plain(name))}={size}" for name, size in counts.fixed.items())
        output.line()
        output.line(
            f"{prefix}, variant {variant} ({cut(plain(counts.name))}{fixed}): {count_text(counts.pieces, 'piece')}, "
            f"{counts.splitting_pieces} splitting, {counts.unique_pieces} unique, {manifest.adaptor}"
        )
        _coverage_table(output, places, manifest.adaptor, several=several)
    for line in _remarks(report):
        output.line(line)


def _coverage_table(output: Output, places: Sequence[Place], adaptor: str, *, several: bool) -> None:
    """Print a row for each shape; pieces, and ranks, with equal cells share a column."""
    texts = [shape_text(shape) for shape in distinct_shapes(shape for place in places for shape in place.shapes)]
    columns: dict[tuple[str, ...], dict[int, list[int]]] = {}
    for place in places:
        cells = dict.fromkeys(map(shape_text, place.shapes), "not compiled" if place.serves_all else "")
        cells |= {shape_text(row.shape): _cell(row, adaptor) for row in place.rows}
        cells |= {shape_text(shape): "HOLE" for shape in place.missing}
        column = tuple(cells.get(text, "") for text in texts)
        columns.setdefault(column, {}).setdefault(place.rank, []).append(place.piece_index)
    headings = ["shape"]
    for by_rank in columns.values():
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, pieces in by_rank.items():
            groups.setdefault(tuple(sorted(pieces)), []).append(rank)
        parts = [
            f"rank {indices_text(ranks)} {_pieces_text(pieces)}" if several else _pieces_text(pieces)
            for pieces, ranks in groups.items()
        ]
        headings.append("; ".join(parts))
    rows = [[text, *(column[at] for column in columns)] for at, text in enumerate(texts)]
    show_rows(output, headings, [row for row in rows if any(row[1:])])


def _cell(row: Row, adaptor: str) -> str:
    proof = "proved" if row.artifact.proved else "not proved"
    other = "" if row.adaptor == adaptor else f" ({row.adaptor})"
    return f"{proof}{other}" + (f", {count_text(len(row.artifact.guards), 'guard')}" if row.artifact.guards else "")


def _remarks(report: EntryReport) -> Iterator[str]:
    """Yield the lines below the tables: totals, holes, fallbacks and proofs."""
    coverage = report.coverage
    rows = [row for place in coverage.places for row in place.rows]
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
    yield from _listed("Holes (warm the model again to fill them):", holes)
    if not holes and not report.warnings:
        yield "No holes: every piece covers every shape."
    fallbacks = [
        f"piece {fallback.piece_index} for {shape_text(fallback.shape)} (variant {fallback.variant}, rank "
        f"{manifest.rank}, {manifest.prefix}) by {fallback.adaptor}: {fallback.reason}"
        for manifest in report.manifests
        for fallback in manifest.fallbacks
    ]
    yield from _listed("Compiled by another adaptor:", fallbacks)
    gaps: dict[str, int] = {}
    for row in rows:
        if row.artifact.proof_gap:
            gaps[row.artifact.proof_gap] = gaps.get(row.artifact.proof_gap, 0) + 1
    not_proved = [f"{count_text(times, 'row')}: {gap}" for gap, times in gaps.items()]
    called = []
    for manifest in report.manifests:
        for number, variant in enumerate(manifest.variants):
            whose = f"variant {number} (rank {manifest.rank}, {manifest.prefix})"
            if variant.proof_gap:
                not_proved.append(f"the whole call of {whose}: {variant.proof_gap}")
            elif variant.proved_at:
                shapes = [shape_text(of_sizes(sizes)) for sizes in variant.proved_at if sizes]
                called.append(f"{whose}: {', '.join(shapes) or 'its one shape'}")
    yield from _listed("Whole calls that equal the model's own:", called)
    yield from _listed("Not proved:", not_proved)


def show_key(output: Output, report: KeyReport) -> None:
    """Print every factor and the leaves of its value, and what another system does not record."""
    output.line(_one_line(report.hash), style="bold", whole=True)
    lines: list[str] = []
    for factor in report.factors:
        lines.append(f"{_one_line(factor.name)}  ({short(factor.hash)})")
        lines += [f"  {_leaf(path, value)}" for path, value in leaves(factor.value)]
    if lines:
        output.line("\n".join(lines), whole=True)
    if report.not_recorded:
        output.line(report.not_recorded, style="dim")


def show_artifact(output: Output, report: ArtifactReport | ForeignArtifactReport) -> None:
    """Print the contents of an artifact and the pieces that use it."""
    contents = report.contents
    if isinstance(report, ArtifactReport):
        output.notes("Warning", map(plain, report.warnings))
        output.line(f"{report.digest}.{report.kind}", style="bold", whole=True)
        count = _UNKNOWN if report.num_kernels is None else str(report.num_kernels)
        proved = any(use.row.artifact.proved for use in report.uses)
        output.line(f"{size_text(contents.size_bytes)}, {count} kernels, {'proved' if proved else 'not proved'}")
        _show_facts(output, "Target", report.target)
        _show_facts(output, "Compiler", report.compiler)
        if contents.members:
            output.line()
            show_rows(output, ("member", ">size"), [(name, size_text(size)) for name, size in contents.members])
        _show_kernels(output, contents.kernels)
        for line in _uses(report):
            output.line(line)
    else:
        artifact = report.artifact
        output.line(_one_line(f"{report.entry.name}/{artifact.path}"), style="bold", whole=True)
        output.line(_one_line(", ".join(_artifact_facts(artifact))))
        if report.facts:
            _show_facts(output, "Kernel", report.facts)
        if contents.compiler:
            output.line(f"Compiler: {_one_line(contents.compiler)}")
        held = [*artifact.members, *(f"{name} ({size_text(size)})" for name, size in contents.members)]
        for line in _listed("Contains:", held):
            output.line(line)
        _show_kernels(output, report.kernels)
        output.notes("Problem", map(plain, [*artifact.problems, *contents.warnings]))
    for source in contents.sources:
        output.line()
        _show_source(output, source.text, source.language)


def _artifact_facts(artifact: ForeignArtifact) -> Iterator[str]:
    yield artifact.what
    yield size_text(artifact.size_bytes)
    if artifact.piece_index is not None:
        yield f"piece {artifact.piece_index}"
    if artifact.shape is not None:
        yield f"for {shape_text(artifact.shape)}"
    if artifact.rank:
        yield f"rank {artifact.rank}"
    if artifact.prefix:
        yield artifact.prefix
    if artifact.target:
        yield f"for {artifact.target}"
    if artifact.holds_pickle:
        yield "loading it unpickles"


def _show_kernels(output: Output, kernels: Sequence[Kernel]) -> None:
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
        f"{where}, {variant}, {_pieces_text(pieces)} for {shape}" for (where, variant, shape), pieces in places.items()
    ]
    yield ""
    yield from _listed("Used by:", served) if served else ["No manifest names it."]
    yield from _listed("Guards:", guards)


def _show_facts(output: Output, title: str, facts: Mapping[str, Any]) -> None:
    """Print the leaves of some facts below a title; "unknown" if there are none."""
    if not facts:
        output.line(f"{title}: {_UNKNOWN}")
        return
    lines = [f"  {_leaf(path, value)}" for path, value in leaves(dict(facts))]
    output.line("\n".join([f"{title}:", *lines]), whole=True)


def _show_source(output: Output, text: str, language: str) -> None:
    """Print untrusted source text, escaped; highlighted on a terminal."""
    shown = plain(text, lines=True)
    if output.stdout.is_terminal:
        from rich.syntax import Syntax  # lazy: imports pygments

        output.show(Syntax(shown, language, theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        output.line(shown, whole=True)


def _listed(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield a title and the first lines, indented; nothing if there are no lines."""
    shown = first(list(lines))
    if shown:
        yield title
        yield from (f"  {_one_line(line)}" for line in shown)


def _leaf(path: str, value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value)
    return f"{_one_line(path)}: {_one_line(shown)}" if path else _one_line(shown)


def _one_line(text: str) -> str:
    return cut(plain(text), _MOST_CHARACTERS)


def _figure(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)
