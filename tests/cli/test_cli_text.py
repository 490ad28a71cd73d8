"""Escaping of untrusted text, formatting of sizes and times, and tables in a pipe."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgtool.cli import text
from cgtool.cli.columns import Styled, show_rows
from cgtool.cli.output import Output
from cgtool.cli.progress import line_of
from cgtool.events import Event


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        pytest.param("Llama 3", "Llama 3", id="plain"),
        pytest.param("größe 模型", "größe 模型", id="letters"),
        pytest.param("\x1b[31mred", "\\x1b[31mred", id="escape"),
        pytest.param("a\rb\nc", "a\\rb\\nc", id="line ends"),
        pytest.param("abc\u202edef", "abc\\u202edef", id="right to left"),
        pytest.param("\x9b2J", "\\x9b2J", id="C1"),
        pytest.param("\udc80", "\\udc80", id="lone surrogate"),
        pytest.param("[bold]x[/]", "[bold]x[/]", id="markup stays text"),
    ],
)
def test_plain_escapes_what_a_terminal_would_interpret(given, shown):
    assert text.plain(given) == shown


@given(st.text())
def test_plain_is_always_printable(anything):
    assert text.plain(anything).isprintable()


@given(st.text())
def test_plain_with_lines_has_only_printable_text_and_line_ends(anything):
    assert text.plain(anything, lines=True).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("given", "shown"), [("", ""), ("a" * 60, "a" * 60), ("a" * 61, "a" * 59 + "…"), ("b" * 10_000, "b" * 59 + "…")]
)
def test_long_text_is_truncated_with_an_ellipsis(given, shown):
    assert text.cut(given) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (10**400, "1 ZiB or more"),
    ],
)
def test_sizes(count, shown):
    assert text.size_text(count) == shown


@pytest.mark.parametrize(
    ("secs", "shown"), [(None, "-"), (0.034, "0.03 s"), (12.34, "12.3 s"), (125.4, "2 min 5 s"), (100, "1 min 40 s")]
)
def test_seconds(secs, shown):
    assert text.secs_text(secs) == shown


@pytest.mark.parametrize(
    ("indices", "shown"),
    [
        ([3], "3"),
        ([0, 8], "0, 8"),
        ([2, 4, 6], "2-6 by 2"),
        ([4, 2, 3], "2-4"),
        ([0, 1, 5], "0, 1, 5"),
        (range(2, 160, 2), "2-158 by 2"),
        ([0, 1, 3, 4, 6, 7, 9, 10, 12], "0, 1, 3, 4, 6, 7, … (9)"),
    ],
)
def test_piece_indices(indices, shown):
    assert text.indices_text(indices) == shown


@pytest.mark.parametrize(
    ("stamp", "shown"),
    [
        (None, "never"),
        ("1970-01-01T00:00:00Z", "1 d ago"),
        ("1970-01-01T23:00:00Z", "1 h ago"),
        ("1970-01-01T23:57:00Z", "3 min ago"),
        ("1970-01-01T23:59:30Z", "just now"),
        ("1970-01-02T00:00:09Z", "just now"),
        ("what", "never"),
    ],
)
def test_relative_times(stamp, shown):
    assert text.ago_text(stamp, 86400.0) == shown


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (Event(phase="trace", message="prefill"), "trace: prefill"),
        (Event(phase="compile", message="piece 2", done=3, total=9, secs=4.06), "compile 3/9: piece 2 (4.1 s)"),
        (Event(phase="note", message="a\x1b[2Jb"), "note: a\\x1b[2Jb"),
    ],
)
def test_an_event_is_one_plain_line(event, shown):
    assert line_of(event) == shown


def test_a_long_list_ends_with_the_number_of_further_items():
    reasons = tuple(f"reason {number}" for number in range(20))
    shown = text.first(reasons, 8)
    assert tuple(shown[:-1]) == reasons[:8]
    assert shown[-1] == "and 12 more (shown by --json)"
    assert text.first(reasons[:9], 8) == [*reasons[:9]]


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
