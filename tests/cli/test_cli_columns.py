"""Tables in a pipe: aligned columns, whatever the cells contain."""

from __future__ import annotations

import sys

import pytest

from cgtool.cli.columns import Styled, show_rows
from cgtool.cli.output import Output


def shown(capsys: pytest.CaptureFixture[str], columns: tuple[str, ...], *rows: tuple[object, ...]) -> list[str]:
    show_rows(Output(), columns, rows)
    sys.stdout.flush()
    return capsys.readouterr().out.splitlines()


def test_figures_are_right_aligned_and_text_is_left_aligned(capsys):
    lines = shown(capsys, ("name", ">size", "used"), ("a", 1, "now"), ("longer", 12345, "never"))
    assert lines == ["name     size  used", "a           1  now", "longer  12345  never"]


def test_wide_characters_take_two_columns(capsys):
    lines = shown(capsys, ("name", ">n"), ("模型", 1), ("abcd", 2), (">模", "模"))
    assert lines == ["name   n", "模型   1", "abcd   2", ">模   模"]


def test_cells_are_escaped_to_one_line_and_truncated(capsys):
    lines = shown(capsys, ("name", "x"), ("a\nb\x1b[2J\u202e", 1), ("y" * 10_000, 2), ("[bold]z[/]", 3))
    assert [line.split()[0] for line in lines] == ["name", "a\\nb\\x1b[2J\\u202e", "y" * 59 + "…", "[bold]z[/]"]
    assert {len(line) for line in lines} == {63}


def test_a_table_without_rows_has_only_its_headings(capsys):
    assert shown(capsys, ("name", ">size")) == ["name  size"]


def test_styles_are_dropped_in_a_pipe_and_whole_cells_are_not_truncated(capsys):
    show_rows(Output(), ("a", "b"), [("x", Styled("y" * 70, "red"))], whole=True)
    sys.stdout.flush()
    assert capsys.readouterr().out.splitlines()[1] == "x  " + "y" * 70
