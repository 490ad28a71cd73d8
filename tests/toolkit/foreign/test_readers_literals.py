"""Untrusted literals and JSON: the output of `pprint` is read, and nothing else reaches Python's parser."""

from __future__ import annotations

import ast
import json
import pprint

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgtool.plan.shapes import shape_text
from cgtool.toolkit.foreign import formats
from cgtool.toolkit.foreign.formats import MAX_BYTES, MAX_DEPTH, FormatError, parse_json, parse_literal
from cgtool.toolkit.foreign.tree import display_text
from cgtool.toolkit.foreign.vllm import IndexRow, parse_index

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@settings(max_examples=40)
@given(PLAIN, st.sampled_from([20, 80]))
def test_the_output_of_pprint_is_read_back(value, width):
    assert parse_literal(pprint.pformat(value, indent=4, width=width).encode()) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "it is empty", id="nothing"),
        pytest.param(" \n", "truncated", id="space"),
        pytest.param("{((1, 2), 0, 'a'): ('b', 'c'", "truncated", id="torn after a text"),
        pytest.param("{((1, 2), 0, 'a'): ('b', 'c", "line 1 has 'c", id="torn within a text"),
        pytest.param("{}}", "truncated", id="one bracket too many"),
        pytest.param("(]", "not a complete Python literal", id="mismatched brackets"),
        pytest.param("__import__('os').system('touch HERE')", "has __import__", id="a call"),
        pytest.param("{'a': open('HERE', 'w')}", "has open(", id="a nested call"),
        pytest.param("()()", "has ()", id="a call without a name"),
        pytest.param("[0][0]", "has [0]", id="a subscript"),
        pytest.param("1-1", "has -1", id="a sum"),
        pytest.param("1 if True else 0", "has if True", id="a keyword"),
        pytest.param("f'{open}'", "has f'{open}'", id="an f-string"),
        pytest.param("# a comment\n{}", "line 1 has # a comment", id="a comment"),
        pytest.param("{}\n{}", "line 2 has {}", id="two literals"),
        pytest.param("'\\d'", r"has '\d'", id="an escape that repr never writes"),
        pytest.param("'a\0b'", r"has 'a\x00b'", id="a null byte"),
        pytest.param("'\\U00110000'", "not a complete Python literal", id="an invalid code point"),
        pytest.param("{[]: 1}", "not a complete Python literal", id="an unhashable key"),
        pytest.param("9" * 19, "has 9999", id="a long number"),
        pytest.param("1.5", "has 1.5", id="a fraction"),
        pytest.param("...", "has ...", id="an ellipsis"),
        pytest.param("[" * 200_000, f"nested more than {MAX_DEPTH} deep", id="deep lists"),
        pytest.param("-" * 200_000 + "1", "has ----", id="deep signs"),
        pytest.param("()" * 100_000, "has ()()", id="chained calls"),
        pytest.param("{" + "1," * 500 + "}", "more than 1000 tokens", id="many tokens"),
        pytest.param("'" + "a" * MAX_BYTES + "'", f"the limit of {MAX_BYTES}", id="giant"),
    ],
)
def test_other_text_is_refused_with_the_reason(text, message, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_TOKENS", 1000)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError) as caught:
        parse_literal(text.encode())
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300
    assert list(tmp_path.iterdir()) == []


def test_untrusted_text_is_shown_on_one_line_and_cut_in_the_middle():
    assert display_text("a\x1b[2J\nb\u202e") == "a\\x1b[2J\\nb\\u202e"
    assert display_text(f"<{'x' * 10_000}>") == f"<{'x' * 199}…{'x' * 199}>"


def test_invalid_utf_8_is_refused():
    for parse in (parse_literal, parse_json):
        with pytest.raises(FormatError, match="not UTF-8 text"):
            parse(b"'\xff'")


@given(st.text(alphabet="{}[]()',:0-1aN \\n\"", max_size=40))
def test_text_of_literal_characters_is_read_or_refused(text):
    try:
        value = parse_literal(text.encode())
    except FormatError:
        return
    assert value == ast.literal_eval(text.strip())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "it is empty", id="nothing"),
        pytest.param('{"a": ', "not valid JSON", id="torn"),
        pytest.param('{"a": NaN}', "not valid JSON", id="NaN"),
        pytest.param('{"a": 1e999}', "not valid JSON .Number out of range", id="out of range"),
        pytest.param("[" * 100_000, "not valid JSON", id="deep and torn"),
        pytest.param("[" * 40 + "]" * 40, f"nested more than {MAX_DEPTH} deep", id="deep"),
        pytest.param("9" * 5000, "not valid JSON", id="a long number"),
    ],
)
def test_json_outside_of_the_limits_is_refused(text, message):
    with pytest.raises(FormatError, match=message):
        parse_json(text.encode())


def test_json_within_the_limits_is_read():
    value = {"a": [1, 2.5, None, {"b": "ü"}]}
    assert parse_json(json.dumps(value).encode()) == value
    at_most = parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert json.dumps(at_most) == "[" * MAX_DEPTH + "]" * MAX_DEPTH


def test_both_formats_of_an_index_row_are_read():
    old = parse_index(b"{(None, 0, 'inductor'): ('fkey', '/a/c.py'), (8, 2, 'eager'): ('x', '/y')}")
    assert (old.form, old.problems) == ("shapes", [])
    assert old.rows == [
        IndexRow(shape={}, piece_index=0, compiler="inductor", name="fkey", path="/a/c.py", cache_key=None),
        IndexRow(shape={"num_tokens": (8, 8)}, piece_index=2, compiler="eager", name="x", path="/y", cache_key=None),
    ]
    new = parse_index(
        b"{((1, 16), 3, 'inductor_standalone'): {'graph_handle': ('n', '/a/n'), 'cache_key': 'k'},"
        b" ((4, 4), 3, 'inductor_standalone'): {'graph_handle': ('m', '/a/m'), 'cache_key': None}}"
    )
    assert (new.form, new.problems) == ("ranges", [])
    assert [(shape_text(row.shape), row.piece_index, row.name, row.cache_key) for row in new.rows] == [
        ("num_tokens=1-16", 3, "n", "k"),
        ("num_tokens=4", 3, "m", None),
    ]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("1: ('a', 'b')", id="a key of one"),
        pytest.param("(None, 0): ('a', 'b')", id="a key of two"),
        pytest.param("(None, -1, 'c'): ('a', 'b')", id="a negative piece"),
        pytest.param("(None, True, 'c'): ('a', 'b')", id="a piece that is not a number"),
        pytest.param("((8, 1), 0, 'c'): ('a', 'b')", id="a reversed range"),
        pytest.param("('8', 0, 'c'): ('a', 'b')", id="a shape of text"),
        pytest.param("(99999999999999999, 0, 'c'): ('a', 'b')", id="a shape out of range"),
        pytest.param("(None, 0, 'c'): ('a',)", id="half a handle"),
        pytest.param("(None, 0, 'c'): (1, 'b')", id="a name that is not text"),
        pytest.param("(None, 0, 'c'): {'graph_handle': None}", id="no handle"),
        pytest.param("(None, 0, 'c'): {'graph_handle': ('a', 'b'), 'cache_key': 1}", id="a key that is not text"),
    ],
)
def test_a_row_of_an_unknown_format_is_skipped_and_reported(row):
    index = parse_index(f"{{{row}, (None, 0, 'good'): ('a', 'b')}}".encode())
    assert [found.compiler for found in index.rows] == ["good"]
    (problem,) = index.problems
    assert problem.startswith("a row of the index has an unknown format and was skipped: (")


def test_an_index_that_is_not_a_dictionary_is_refused():
    with pytest.raises(FormatError, match="not a dictionary"):
        parse_index(b"[1]")
