"""The pieces of a variant, for `inspect graph`: a table, and a self-contained picture (SVG or HTML).

Must not import torch. All text is escaped and truncated, and the page's Content-Security-Policy forbids it to load or
run anything. Pieces with the same identity have the same colour; splitting pieces have none and a dashed outline.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from cgtool.cli.columns import Styled, show_rows
from cgtool.cli.pages import document
from cgtool.cli.text import count_text, cut, plain
from cgtool.plan.shapes import shape_text
from cgtool.store.layout import short
from cgtool.toolkit.inspect.graph import variant_words

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.plan.pieces import TensorMeta
    from cgtool.toolkit.inspect.graph import GraphReport, Piece

_WIDTH, _BOX, _GAP, _LEFT, _LINE, _HEAD = 760, 74, 18, 20, 19, 58
#: The hues of consecutive colours differ by the golden angle, so that neighbours are always distinct.
_GOLDEN_ANGLE = 137.508
_FEW_OPS, _FEW_SHAPES = 4, 8
#: Tensors of a piece that the table shows if none of them has a dynamic dimension.
_FEW = 3
#: Dtypes are abbreviated as in torch's graphs.
_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
#: Characters that fit the width, of normal text and of the title.
_MOST_CHARACTERS, _MOST_OF_MODEL = 90, 36

_STYLE = """
svg { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #8c959f; --page: #fff; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --soft: #9da7b1; --line: #6e7681; --page: #0d1117; } }
.page { fill: var(--page); } text { font: 14px system-ui, sans-serif; fill: var(--ink); }
.title { font-size: 17px; font-weight: 600; } .soft { fill: var(--soft); font-size: 13px; }
.name { font-weight: 600; } .arrow { stroke: var(--line); stroke-width: 1.5; }
.split { fill: none; stroke: var(--line); stroke-dasharray: 6 4; stroke-width: 1.5; }
.piece { fill-opacity: .22; stroke-width: 1.5; }
"""

_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 1.5rem auto; padding: 0 1rem; max-width: 50rem; background: #fff; }
@media (prefers-color-scheme: dark) { body { background: #0d1117; } }
svg { width: 100%; height: auto; }
"""


def show_graph(output: Output, report: GraphReport) -> None:
    """Print the pieces of one variant of an entry."""
    manifest = report.manifest
    name = f"{manifest.model} {short(manifest.hash)} rank {manifest.rank} {manifest.prefix}"
    output.line(name, style="bold")
    number, shown = report.variant, report.variants[report.variant]
    count = len(report.variants)
    output.line(
        f"variant {number} of {count}: {variant_words(shown)}" if count > 1 else f"one variant: {variant_words(shown)}"
    )
    between = "\n" if output.stdout.is_terminal else "; "
    shown_at: dict[str, int] = {}
    rows = []
    for row in report.pieces:
        twin = shown_at.setdefault(row.step.graph, row.step.piece)
        rows.append(_piece_cells(row, between=between, twin=None if twin == row.step.piece else twin))
    show_rows(output, (">piece", "runs", "identity", ">ops", "inputs", "outputs", "shapes"), rows, whole=True)
    if count > 1:
        output.line(
            "Variants: " + "; ".join(f"{i} {variant_words(variant)}" for i, variant in enumerate(report.variants))
        )
    output.line(f"Stitched program: {report.code_path}", whole=True)


def _piece_cells(row: Piece, *, between: str, twin: int | None) -> tuple[object, ...]:
    """Return the cells of a piece; the tensors are left out if they are those of an earlier equal piece, its `twin`."""
    return (
        row.step.piece if row.step.piece >= 0 else "-",
        Styled(between.join(op.removeprefix("torch.ops.") for op in row.ops), "yellow")
        if row.step.splitting
        else "compiled",
        Styled(short(row.step.graph), "dim" if row.step.splitting else "cyan"),
        sum(row.ops.values()),
        _tensors_text(row.graph.inputs, between) if twin is None else f"as piece {twin}",
        _tensors_text(row.graph.results, between) if twin is None else "",
        ", ".join(shape_text(compiled.shape) for compiled in row.rows) or ("-" if row.step.splitting else "none"),
    )


def _tensors_text(tensors: tuple[TensorMeta, ...], between: str) -> str:
    """Format dtypes and shapes: "2 x f32[s0,64]"; if some shapes are dynamic, static ones are only counted."""
    dynamic = [tensor for tensor in tensors if not all(isinstance(dim, int) for dim in tensor.shape)]
    shown = dynamic or tensors[:_FEW]
    groups: list[tuple[str, int]] = []
    for tensor in shown:
        text = f"{_dtype_text(tensor.dtype)}[{','.join(str(dim).replace(' ', '') for dim in tensor.shape)}]"
        if groups and groups[-1][0] == text:
            groups[-1] = (text, groups[-1][1] + 1)
        else:
            groups.append((text, 1))
    lines = [text if count == 1 else f"{count} x {text}" for text, count in groups]
    rest = len(tensors) - len(shown)
    return between.join([*lines, f"{rest} {'static' if dynamic else 'more'}"] if rest else lines) or "-"


def _dtype_text(dtype: str) -> str:
    letters = dtype.rstrip("0123456789")
    return _DTYPES[letters] + dtype[len(letters) :] if letters in _DTYPES else dtype


def html_of(report: GraphReport) -> str:
    """Return the picture of a variant's pieces as an HTML page."""
    return document(_title(report), _PAGE_STYLE, svg_of(report))


def svg_of(report: GraphReport) -> str:
    """Return the picture of a variant's pieces as SVG."""
    colours = _colours(report)
    height = _HEAD + len(report.pieces) * (_BOX + _GAP) + _GAP
    unique = len(colours)
    splitting = sum(piece.step.splitting for piece in report.pieces)
    facts = (
        f"{variant_words(report.variants[report.variant])}: {count_text(len(report.pieces), 'piece')}, {splitting} "
        f"splitting, {unique} unique, one colour each"
    )
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{_safe(_title(report))}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        _text(_LEFT, 26, _title(report), "title"),
        _text(_LEFT, 47, facts, "soft"),
    ]
    for number, piece in enumerate(report.pieces):
        top = _HEAD + number * (_BOX + _GAP)
        if number:
            middle = _WIDTH // 2
            parts.append(f'<line class="arrow" x1="{middle}" x2="{middle}" y1="{top - _GAP}" y2="{top}"/>')
        parts.append(_box(piece, top, colours.get(piece.step.graph)))
    return "\n".join([*parts, "</svg>\n"])


def _box(piece: Piece, top: int, colour: str | None) -> str:
    style = 'class="split"'
    if colour is not None and not piece.step.splitting:
        style = f'class="piece" fill="{colour}" stroke="{colour}"'
    name = f"piece {piece.step.piece}" if piece.step.piece >= 0 else "sizes"
    shapes = _few([shape_text(row.shape) for row in piece.rows], _FEW_SHAPES) or "no shape yet"
    first = f"{name} · " + ("splitting, not compiled" if piece.step.splitting else f"compiled for {shapes}")
    tensors = " → ".join(_tensors_text(of, ", ") for of in (piece.graph.inputs, piece.graph.results))
    ops = _few([op.removeprefix("torch.ops.") for op in piece.ops], _FEW_OPS)
    count = count_text(sum(piece.ops.values()), "op")
    lines = [
        _text(_LEFT + 14, top + 22, first, "name"),
        _text(_LEFT + 14, top + 22 + _LINE, f"{short(piece.step.graph)} · {count}: {ops}", ""),
        _text(_LEFT + 14, top + 22 + 2 * _LINE, tensors, "soft"),
    ]
    box = f'<rect {style} x="{_LEFT}" y="{top}" width="{_WIDTH - 2 * _LEFT}" height="{_BOX}" rx="7"/>'
    return f"<g>{box}{''.join(lines)}</g>"


def _colours(report: GraphReport) -> dict[str, str]:
    """Return identity → colour of the compiled pieces, in order of first appearance."""
    identities = dict.fromkeys(piece.step.graph for piece in report.pieces if not piece.step.splitting)
    return {
        identity: f"hsl({round(210 + number * _GOLDEN_ANGLE) % 360}, 65%, 50%)"
        for number, identity in enumerate(identities)
    }


def _few(texts: list[str], most: int) -> str:
    return ", ".join(texts if len(texts) <= most + 1 else [*texts[:most], f"… ({len(texts)})"])


def _title(report: GraphReport) -> str:
    name = report.manifest
    return f"{cut(plain(report.manifest.model), _MOST_OF_MODEL)} {short(name.hash)} rank {name.rank} {name.prefix}"


def _text(x: int, y: int, text: str, css_class: str) -> str:
    attribute = f' class="{css_class}"' if css_class else ""
    return f'<text x="{x}" y="{y}"{attribute}>{_safe(text)}</text>'


def _safe(text: str) -> str:
    return escape(cut(plain(text), _MOST_CHARACTERS))
