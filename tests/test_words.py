"""Rendering of literals, sources and guards for people."""

from __future__ import annotations

import pytest

from cgtool.plan.records import source_words
from cgtool.plan.rendering import changed_words, expected_words, spell


@pytest.mark.parametrize(
    ("literal", "said"),
    [
        (None, "None"),
        (True, "True"),
        (3, "3"),
        ("it's", '"it\'s"'),
        (["f", "1e-06"], "1e-06"),
        (["t", 1, ["f", "2.0"]], "(1, 2.0)"),
        (["l", "a"], "['a']"),
        (["size", 1, 2], "Size(1, 2)"),
        (["set", 1], "{1}"),
        (["d", ["a", 1], ["b", ["l"]]], "{'a': 1, 'b': []}"),
        (["function", "toy:f", "0123456789"], "toy:f (code 01234567)"),
        (["function", "torch:cat", ""], "torch:cat"),
        (["enum", "toy:Mode", "ONE"], "toy:Mode.ONE"),
        (["slice", None, 3, None], ":3:"),
        (["range", 0, 3, 1], "range(0, 3, 1)"),
        (["dtype", "float32"], "float32"),
        (["e"], "..."),
    ],
)
def test_literals_are_rendered_as_python(literal, said):
    assert spell(literal) == said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("self", "the model"),
        ("self.layers.0.eps", "layers.0.eps"),
        ("arg:x", "x"),
        ("free:w", "w"),
        ("global:toy.models:SCALE", "toy.models.SCALE"),
        ("self|type.forward", "self's type.forward"),
        ("state:autocast", "autocast"),
    ],
)
def test_sources_are_rendered_as_attribute_paths(source, said):
    assert source_words(source) == said


@pytest.mark.parametrize(
    ("kind", "old", "new", "said"),
    [
        pytest.param("value", ["f", "1e-06"], ["f", "1e-05"], "a.b was 1e-06 and is 1e-05 now", id="value"),
        pytest.param("type", "m:A", "m:B", "a.b was of type m:A and is of type m:B now", id="type"),
        pytest.param("code", "0" * 64, "1" * 64, "the code of a.b has changed", id="code"),
        pytest.param(
            "value", ["function", "m:f", "00"], ["function", "m:f", "11"], "the code of a.b has changed", id="function"
        ),
        pytest.param("hasattr:c", True, False, "a.b had an attribute c before; that has changed", id="hasattr"),
        pytest.param('contains:"k"', True, False, 'a.b had the key "k" before; that has changed', id="contains"),
        pytest.param(
            "absent:c", True, False, "a.b.c was not set on the object itself before; that has changed", id="absent"
        ),
        pytest.param(
            "same:self.d", True, False, "a.b and d were one object before; that has changed", id="same"
        ),
        pytest.param(
            "apart:self.d", True, False, "a.b and d had separate memory before; that has changed", id="apart"
        ),
        pytest.param("hooks", 0, 1, "a.b had no hooks and has 1 now", id="hooks"),
        pytest.param("empty", True, False, "a.b was empty before; that has changed", id="empty"),
        pytest.param(
            "keys", ["x"], ["x", "y"], "a.b was a dict with the keys 'x' and is a dict with the keys 'x', 'y' now",
            id="keys",
        ),
    ],
)  # fmt: skip
def test_a_changed_guard_is_described_in_a_sentence(kind, old, new, said):
    assert changed_words("self.a.b", kind, old, new) == said


@pytest.mark.parametrize(
    ("kind", "value"),
    [("value", ["t", ["function"]]), ("value", {"a": 1}), ("length", 3), ("keys", 7), ("tensor", []), ("strange", [1])],
)
def test_malformed_values_are_rendered_unchanged(kind, value):
    assert expected_words(kind, value)


def test_a_long_value_is_truncated():
    assert len(expected_words("value", "x" * 10_000)) == 201
