"""Reports as people read them: tables and the lines around them.

Must not import torch. Strings of a model or of a cache folder go through `plain` and into a `Text`, never into markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from cgtool.cli.text import count_text, indices_text, plain, secs_text, size_text
from cgtool.plan.shapes import shape_text
from cgtool.store.layout import short

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgtool.cli.output import Output
    from cgtool.plan.pieces import TensorMeta
    from cgtool.toolkit.inspect.graph import GraphReport, PieceRow
    from cgtool.toolkit.warm import WarmReport

#: How many reasons people are shown; programs get all.
MOST_REASONS = 8

#: How many tensors of a piece are shown where none of them has an open dimension.
_FEW = 3

#: Types as torch prints them in its own graphs.
_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def show_warm(output: Output, report: WarmReport, model: str) -> None:
    """Print what was compiled and the line that starts from it."""
    for note in report.notes:
        output.note(f"Note: {note}", style="yellow")
    if report.reasons:
        reasons = _most_telling(report.reasons)
        listed = f" {reasons[0]}" if len(reasons) == 1 else "".join(f"\n  - {reason}" for reason in reasons)
        output.note(f"Compiled because:{listed}", style="dim")
    output.line(_warm_summary(report, model), style="bold")
    if report.entry is not None:
        output.line(_entry_summary(report.entry))
        output.show(_artifacts_table(report.entry))
    output.line("Start from it in Python:", style="bold")
    output.line(f"  import cgtool; model = {report.load_call}", whole=True)
    output.line("Try it from this folder:", style="bold")
    output.line(f"  {report.start}", whole=True)


def show_check(output: Output, report: WarmReport, model: str) -> None:
    """Print whether the cache serves a model, and why not."""
    for note in report.notes:
        output.note(f"Note: {note}", style="yellow")
    if report.hit:
        output.line(f"{model} is warm: the cache at {report.root} serves it.")
        return
    output.line(f"{model} is not warm. Run the same command without --check to make it so. Reasons:")
    for reason in _most_telling(report.reasons or ("The cache does not hold it.",)):
        output.line(f"  - {reason}")


def show_graph(output: Output, report: GraphReport) -> None:
    """Print the pieces of one variant of an entry."""
    output.line(f"{report.model} {short(report.name.hash)} rank {report.name.rank} {report.name.prefix}", style="bold")
    number, shown = report.variant, report.variants[report.variant]
    count = len(report.variants)
    output.line(f"variant {number} of {count}: {shown.describe()}" if count > 1 else f"one variant: {shown.describe()}")
    table = _table(">piece", "runs", "identity", ">ops", "inputs", "outputs", "shapes")
    shown_at: dict[str, int] = {}
    for row in report.pieces:
        twin = shown_at.setdefault(row.identity, row.index)
        between = "\n" if output.stdout.is_terminal else "; "
        table.add_row(*_piece_cells(row, between=between, twin=None if twin == row.index else twin))
    output.show(table)
    if count > 1:
        output.line("Variants: " + "; ".join(f"{i} {variant.describe()}" for i, variant in enumerate(report.variants)))
    output.line(f"The whole graph as Python: {report.code_path}", whole=True)


def _most_telling(reasons: tuple[str, ...]) -> tuple[str, ...]:
    rest = len(reasons) - MOST_REASONS
    return reasons if rest <= 1 else (*reasons[:MOST_REASONS], f"and {rest} more, which --json shows")


def _warm_summary(report: WarmReport, model: str) -> str:
    if report.hit:
        return (
            f"{model} was warm already: {count_text(report.reused, 'artifact')} in place, nothing traced or compiled."
        )
    return (
        f"Warmed {model}: {report.compiled} compiled in {secs_text(report.compile_secs)}, {report.reused} reused, "
        f"traced in {secs_text(report.trace_secs)}."
    )


def _entry_summary(entry: Mapping[str, Any]) -> str:
    pieces, splitting, unique = entry["pieces"], entry["splitting_pieces"], entry["unique_pieces"]
    return (
        f"{entry['model']} {short(entry['hash'])} rank {entry['rank']} {entry['prefix']}: "
        f"{count_text(pieces, 'piece')}, {splitting} splitting, {unique} unique, "
        f"{size_text(entry['size_bytes'])} with {entry['adaptor']}"
    )


def _artifacts_table(entry: Mapping[str, Any]) -> Table:
    table = _table("pieces", "shape", ">shared by", "artifact", ">seconds", ">size")
    for artifact in entry["artifacts"]:
        table.add_row(
            _text(indices_text(artifact["piece_index"])),
            _text(shape_text(artifact["shape"])),
            _text(len(artifact["piece_index"])),
            _text(short(artifact["digest"]), "cyan"),
            _text(f"{artifact['compile_secs']:.2f}"),
            _text(size_text(artifact["size_bytes"])),
        )
    return table


def _piece_cells(row: PieceRow, *, between: str, twin: int | None) -> tuple[Text, ...]:
    """The cells of one piece; of a piece that equals an earlier one, its `twin`, the tensors are not said again."""
    return (
        _text(row.index if row.index >= 0 else "-"),
        _text(_ops_text(row, between), "yellow" if row.splitting else ""),
        _text(short(row.identity), "dim" if row.splitting else "cyan"),
        _text(row.num_ops),
        _text(_tensors_text(row.inputs, between) if twin is None else f"as piece {twin}"),
        _text(_tensors_text(row.outputs, between) if twin is None else ""),
        _text(", ".join(shape_text(shape) for shape in row.shapes) or ("-" if row.splitting else "nothing")),
    )


def _ops_text(row: PieceRow, between: str) -> str:
    return between.join(op.removeprefix("torch.ops.") for op in row.ops) if row.splitting else "compiled"


def _tensors_text(tensors: tuple[TensorMeta, ...], between: str) -> str:
    """The types and shapes of tensors: "2 x f32[s0,64]"; where some are open, those of fixed shape are only counted."""
    opened = [tensor for tensor in tensors if not _is_fixed(tensor)]
    telling = opened or tensors[:_FEW]
    groups: list[tuple[str, int]] = []
    for tensor in telling:
        words = f"{_dtype_text(tensor.dtype)}[{','.join(str(dim).replace(' ', '') for dim in tensor.shape)}]"
        if groups and groups[-1][0] == words:
            groups[-1] = (words, groups[-1][1] + 1)
        else:
            groups.append((words, 1))
    lines = [words if count == 1 else f"{count} x {words}" for words, count in groups]
    rest = len(tensors) - len(telling)
    return between.join([*lines, f"{rest} {'fixed' if opened else 'more'}"] if rest else lines) or "-"


def _is_fixed(tensor: TensorMeta) -> bool:
    return all(isinstance(dim, int) for dim in tensor.shape)


def _dtype_text(dtype: str) -> str:
    letters = dtype.rstrip("0123456789")
    return _DTYPES[letters] + dtype[len(letters) :] if letters in _DTYPES else dtype


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        if column.startswith(">"):
            table.add_column(column[1:], justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def _text(value: object, style: str = "") -> Text:
    return Text(plain(value, lines=True), style=style)
