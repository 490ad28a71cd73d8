"""What a plan says, as a person would write it."""

from __future__ import annotations

import pytest

from cgtool.plan.rendering import source_words, spell


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
def test_a_literal_is_said_as_people_write_it(literal, said):
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
def test_a_source_is_said_as_people_write_it(source, said):
    assert source_words(source) == said
