"""A bench's report as people read it on a terminal. Must not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from cgtool.cli.text import plain, secs_text
from cgtool.toolkit.bench import words

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.bench.report import BenchReport

#: Columns of a terminal from which the tables hold more; a pipe is always wide.
_MEDIUM_COLUMNS, _FULL_COLUMNS = 110, 165


def show_bench(output: Output, report: BenchReport) -> None:
    """Print the tables of starts and steps, what failed, and the machine."""
    for note in report.notes:
        output.note(f"Note: {note}", style="yellow")
    output.line(f"Ways to start {report.model}: medians (quartiles), ratios [95 % bound]", style="bold")
    detail = _detail(output.stdout.width)
    columns = words.start_columns(report, detail=detail)
    _show(output, columns, [words.start_cells(report, way, detail=detail) for way in report.ways])
    columns = words.step_columns(report)
    if len(columns) > 1:
        output.line()
        output.line(words.step_caption(report), style="bold")
        _show(output, columns, [words.step_cells(report, way, detail=detail) for way in report.ways if way.steps])
    for line in words.failure_lines(report):
        output.line(line, style="red")
    output.line(f"{words.machine_line(report)}; took {secs_text(report.secs)}", style="dim")


def _detail(width: int) -> int:
    if width >= _FULL_COLUMNS:
        return words.FULL
    return words.MEDIUM if width >= _MEDIUM_COLUMNS else words.SHORT


def _show(output: Output, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold", min_width=min(len(column), 7))
    for row in rows:
        cells = [Text(plain(row[0]), style="cyan")]
        cells += [Text(plain(cell), style="bold red" if cell.startswith("DIFFER") else "") for cell in row[1:]]
        table.add_row(*cells)
    output.show(table)
