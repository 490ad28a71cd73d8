"""The reports of `export` and `import` as people read them.

Must not import torch. Strings of a bundle go through `plain`, never into markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from cgtool.cli.text import count_text, plain, size_text
from cgtool.store.layout import short

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.bundle.export import ExportReport
    from cgtool.toolkit.bundle.import_ import ImportReport

#: A stranger may give a model a name of any length.
_NAME_CHARACTERS = 80


def show_export(output: Output, report: ExportReport) -> None:
    """Print what was written; to standard error where standard output took the bundle."""
    manifests = report.contents.manifests
    entries = count_text(len({manifest.hash for manifest in manifests}), "entry", "entries")
    packed = "" if report.form == "folder" else f", {size_text(report.written_bytes)} packed"
    signed = f", signed by {', '.join(map(short, report.signed_by))}" if report.signed_by else ""
    line = f"Wrote {entries} ({size_text(report.size_bytes)}{packed}{signed}) to {report.dest}"
    if report.dest == "-":
        output.note(line.removesuffix(" to -"))
        return
    table = _table("hash", "model", ">rank", "prefix", ">rows")
    for manifest in manifests:
        cells = (short(manifest.hash), _name(manifest.model), manifest.rank, manifest.prefix, len(manifest.rows))
        table.add_row(*map(_text, cells))
    output.show(table)
    output.line(line)
    if not report.signed_by:
        output.note("It is not signed: whoever imports it must say --trust. Sign with --sign KEY.", style="dim")


def show_import(output: Output, report: ImportReport) -> None:
    """Print what became of each entry."""
    for warning in report.warnings:
        output.note(f"Warning: {warning}", style="yellow")
    table = _table("hash", "model", ">rank", "prefix", "outcome", ">artifacts", ">size")
    for entry in report.entries:
        for manifest in entry.content.manifests:
            cells = (
                short(manifest.hash),
                _name(manifest.model),
                manifest.rank,
                manifest.prefix,
                entry.installed.outcome,
                len({row.artifact.digest for row in manifest.rows}),
                size_text(entry.size_bytes),
            )
            table.add_row(*map(_text, cells))
    output.show(table)
    count = count_text(len(report.entries), "entry", "entries")
    signed = f", signed by {short(report.signed_by)}" if report.signed_by else ""
    output.line(f"Imported {count} ({size_text(report.size_bytes)}{signed}) into {report.root}")


def _name(model: str) -> str:
    return model if len(model) <= _NAME_CHARACTERS else model[: _NAME_CHARACTERS - 1] + "…"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        if column.startswith(">"):
            table.add_column(column[1:], justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def _text(value: object) -> Text:
    return Text(plain(value))
