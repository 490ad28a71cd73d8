"""Literals and JSON of strangers: what `pprint` writes is read, and nothing else reaches the parser."""

from __future__ import annotations

import ast
import json
import pprint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgtool.plan.shapes import shape_text
from cgtool.toolkit.foreign.formats import (
    MOST_BYTES,
    MOST_DEPTH,
    MOST_TOKENS,
    FormatError,
    parse_json,
    parse_literal,
)
from cgtool.toolkit.foreign.tree import shown
from cgtool.toolkit.foreign.vllm import IndexRow, parse_index

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from([20, 80]))
def test_what_pprint_writes_comes_back_equal(value, width):
    assert parse_literal(pprint.pformat(value, indent=4, width=width).encode()) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "zero bytes", id="nothing"),
        pytest.param(" \n", "ends too early", id="space"),
        pytest.param("{((1, 2), 0, 'a'): ('b', 'c'", "ends too early", id="torn after a text"),
        pytest.param("{((1, 2), 0, 'a'): ('b', 'c", "line 1 goes on with 'c", id="torn within a text"),
        pytest.param("{}}", "ends too early", id="one bracket too many"),
        pytest.param("(]", "no whole Python literal", id="brackets that do not match"),
        pytest.param("__import__('os').system('touch HERE')", "goes on with __import__", id="a call"),
        pytest.param("{'a': open('HERE', 'w')}", "goes on with open(", id="a call inside"),
        pytest.param("()()", "goes on with ()", id="a call without a name"),
        pytest.param("[0][0]", "goes on with [0]", id="a subscript"),
        pytest.param("1-1", "goes on with -1", id="a sum"),
        pytest.param("1 if True else 0", "goes on with if True", id="a word"),
        pytest.param("f'{open}'", "goes on with f'{open}'", id="a text with code"),
        pytest.param("# a comment\n{}", "line 1 goes on with # a comment", id="a comment"),
        pytest.param("{}\n{}", "line 2 goes on with {}", id="two literals"),
        pytest.param("'\\d'", r"goes on with '\d'", id="an escape that repr never writes"),
        pytest.param("'a\0b'", r"goes on with 'a\x00b'", id="a zero byte"),
        pytest.param("'\\U00110000'", "no whole Python literal", id="no character of Unicode"),
        pytest.param("{[]: 1}", "no whole Python literal", id="a key that has no hash"),
        pytest.param("9" * 19, "goes on with 9999", id="a number as long as the text"),
        pytest.param("1.5", "goes on with 1.5", id="a fraction"),
        pytest.param("...", "goes on with ...", id="an ellipsis"),
        pytest.param("[" * 200_000, f"nested more than {MOST_DEPTH} deep", id="deep lists"),
        pytest.param("-" * 200_000 + "1", "goes on with ----", id="deep signs"),
        pytest.param("()" * 100_000, "goes on with ()()", id="deep calls"),
        pytest.param("{" + "1," * (MOST_TOKENS // 2) + "}", f"more than {MOST_TOKENS} tokens", id="many tokens"),
        pytest.param("'" + "a" * MOST_BYTES + "'", f"{MOST_BYTES} are the limit", id="giant"),
    ],
)
def test_anything_else_is_refused_with_what_is_wrong(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError) as caught:
        parse_literal(text.encode())
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300
    assert list(tmp_path.iterdir()) == []


def test_a_strangers_text_is_shown_on_one_line_and_cut_in_its_middle():
    assert shown("a\x1b[2J\nb\u202e") == "a\\x1b[2J\\nb\\u202e"
    assert shown(f"<{'x' * 10_000}>") == f"<{'x' * 199}…{'x' * 199}>"


def test_bytes_that_are_no_text_are_refused():
    for parse in (parse_literal, parse_json):
        with pytest.raises(FormatError, match="no text in UTF-8"):
            parse(b"'\xff'")


@given(st.text(alphabet="{}[]()',:0-1aN \\n\"", max_size=40))
def test_no_text_of_these_letters_does_more_than_be_read_or_refused(text):
    try:
        value = parse_literal(text.encode())
    except FormatError:
        return
    assert value == ast.literal_eval(text.strip())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "zero bytes", id="nothing"),
        pytest.param('{"a": ', "no whole JSON", id="torn"),
        pytest.param('{"a": NaN}', "no whole JSON", id="no number"),
        pytest.param('{"a": 1e999}', "no whole JSON .Number out of range", id="a number beyond all"),
        pytest.param("[" * 100_000, "no whole JSON", id="deep and torn"),
        pytest.param("[" * 40 + "]" * 40, f"nested more than {MOST_DEPTH} deep", id="deep"),
        pytest.param("9" * 5000, "no whole JSON", id="a number as long as the text"),
    ],
)
def test_json_outside_of_the_limits_is_refused(text, words):
    with pytest.raises(FormatError, match=words):
        parse_json(text.encode())


def test_json_within_the_limits_is_read():
    value = {"a": [1, 2.5, None, {"b": "ü"}]}
    assert parse_json(json.dumps(value).encode()) == value
    at_most = parse_json(b"[" * MOST_DEPTH + b"]" * MOST_DEPTH)
    assert json.dumps(at_most) == "[" * MOST_DEPTH + "]" * MOST_DEPTH


def test_both_forms_of_an_index_row_are_read():
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
        pytest.param("(None, -1, 'c'): ('a', 'b')", id="a piece below nothing"),
        pytest.param("(None, True, 'c'): ('a', 'b')", id="a piece that is no number"),
        pytest.param("((8, 1), 0, 'c'): ('a', 'b')", id="a range that ends before it begins"),
        pytest.param("('8', 0, 'c'): ('a', 'b')", id="a shape of text"),
        pytest.param("(99999999999999999, 0, 'c'): ('a', 'b')", id="a shape beyond all"),
        pytest.param("(None, 0, 'c'): ('a',)", id="half a handle"),
        pytest.param("(None, 0, 'c'): (1, 'b')", id="a name that is no text"),
        pytest.param("(None, 0, 'c'): {'graph_handle': None}", id="no handle"),
        pytest.param("(None, 0, 'c'): {'graph_handle': ('a', 'b'), 'cache_key': 1}", id="a key that is no text"),
    ],
)
def test_a_row_of_another_form_is_skipped_and_named_and_the_rest_is_read(row):
    index = parse_index(f"{{{row}, (None, 0, 'good'): ('a', 'b')}}".encode())
    assert [found.compiler for found in index.rows] == ["good"]
    (problem,) = index.problems
    assert problem.startswith("a row of the index was skipped, for it has no known form: (")


def test_an_index_that_is_no_dictionary_is_refused():
    with pytest.raises(FormatError, match="no dictionary"):
        parse_index(b"[1]")
