"""Shapes: their text, optional names, and the orders of listings and dispatch."""

from __future__ import annotations

import random

import pytest

from cgtool.plan.shapes import dispatch_order, is_size, of_sizes, parse_shape, shape_matches, shape_order, shape_text

IN_ORDER = ["general", "batch=1-16", "num_tokens=2-64", "batch=1:seq=2-64", "batch=4", "num_tokens=8", "seq=8"]


@pytest.mark.parametrize("text", IN_ORDER)
def test_the_text_of_a_shape_round_trips(text):
    assert shape_text(parse_shape(text)) == text


def test_equal_shapes_have_one_text():
    assert shape_text({"b": (1, 1), "a": (2, 3)}) == shape_text({"a": (2, 3), "b": (1, 1)}) == "a=2-3:b=1"
    assert of_sizes({"a": 8}) == parse_shape("a=8-8") == parse_shape("a=8")


@pytest.mark.parametrize(
    "text", ["", "generic", "-1", "8:9", "a=8:9", "a=8:a=9", "a=", "=8", "a=1-2-3", "9-2", "a b=8", "a=8\n", "٣"]
)
def test_invalid_text_is_refused(text):
    with pytest.raises(ValueError, match="is not a shape"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("shape", "asked", "meant"),
    [
        ("num_tokens=8", "8", True),
        ("num_tokens=8", "8-8", True),
        ("num_tokens=2-64", "2-64", True),
        ("num_tokens=8", "num_tokens=8", True),
        ("num_tokens=8", "seq=8", False),
        ("batch=8:seq=8", "8", False),
        ("batch=1:seq=8", "seq=8:batch=1", True),
        ("general", "general", True),
        ("general", "8", False),
    ],
)
def test_the_name_of_an_only_dimension_is_optional(shape, asked, meant):
    assert shape_matches(parse_shape(shape), parse_shape(asked)) is meant


def test_a_size_fixes_all_dimensions_that_it_names():
    sizes = [text for text in IN_ORDER if is_size(parse_shape(text))]
    assert sizes == ["batch=4", "num_tokens=8", "seq=8"]


def test_listings_have_the_general_shape_first_then_ranges_then_sizes():
    shuffled = random.Random(1).sample(IN_ORDER, len(IN_ORDER))
    listed = [shape_text(shape) for shape in sorted(map(parse_shape, shuffled), key=shape_order)]
    assert [text for text in listed if "-" in text] == ["batch=1:seq=2-64", "batch=1-16", "num_tokens=2-64"]
    assert (listed[0], listed[4:]) == ("general", ["batch=4", "num_tokens=8", "seq=8"])


def test_dispatch_prefers_the_most_specific_shape():
    texts = ["general", "a=2-64", "a=8", "a=8:b=2-64", "a=8:b=2", "a=2-9:b=2-9"]
    preferred = [shape_text(shape) for shape in sorted(map(parse_shape, texts), key=dispatch_order)]
    assert preferred == ["a=8:b=2", "a=8:b=2-64", "a=8", "a=2-9:b=2-9", "a=2-64", "general"]
