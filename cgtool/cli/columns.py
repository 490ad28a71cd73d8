"""Tables: rows of plain text in columns.

Must not import torch. Every cell is escaped by `plain` and truncated. On a terminal, rich draws the table; a pipe, and
a table of hundreds of rows, gets plain lines, which are fast to print by the thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len

from cgtool.cli.text import cut, plain

if TYPE_CHECKING:
    from cgtool.cli.output import Output

#: Tables with more rows are printed as plain lines: rich measures each row several times.
MOST_DRAWN = 200
_GAP = "  "


class Styled(NamedTuple):
    """A cell with a rich style, used on a terminal."""

    value: object
    style: str


def show_rows(output: Output, columns: Sequence[str], rows: Iterable[Sequence[object]], *, whole: bool = False) -> None:
    """Print a table; with `whole`, cells are not truncated and may have several lines.

    A heading that begins with ">" marks a right-aligned column. The first cell of a row has a style; others have one if
    they are `Styled`.
    """
    safe: dict[str, str] = {}  # most cells occur in many rows

    def cell_text(cell: object) -> str:
        text = str(cell.value if isinstance(cell, Styled) else cell)
        if text not in safe:
            safe[text] = plain(text, lines=True) if whole else cut(plain(text))
        return safe[text]

    rows = list(rows)
    cells = [[cell_text(cell) for cell in row] for row in rows]
    if output.stdout.is_terminal and len(cells) <= MOST_DRAWN:
        styles = [[cell.style if isinstance(cell, Styled) else "" for cell in row] for row in rows]
        _draw(output, columns, cells, styles)
    else:
        output.line("\n".join(_lines(columns, cells)), whole=True)


def _draw(
    output: Output, columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[Sequence[str]]
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        if column.startswith(">"):
            table.add_column(column[1:], justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    for (first, *rest), (_, *looks) in zip(rows, styles, strict=True):
        table.add_row(
            Text(first, style="cyan"), *(Text(cell, style=look) for cell, look in zip(rest, looks, strict=True))
        )
    output.show(table)


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    whole = [[column.removeprefix(">") for column in columns], *rows]
    widths = [max(map(_width, set(column))) for column in zip(*whole, strict=True)]
    right = [column.startswith(">") for column in columns]
    return [_GAP.join(map(_padded, row, widths, right)).rstrip() for row in whole]


def _padded(cell: str, width: int, right: bool) -> str:
    if cell.isascii():
        return cell.rjust(width) if right else cell.ljust(width)
    space = " " * (width - _width(cell))
    return space + cell if right else cell + space


def _width(cell: str) -> int:
    return len(cell) if cell.isascii() else cell_len(cell)
