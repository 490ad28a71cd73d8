"""What a plan says is said in the words in which the runtime says it of live objects."""

from __future__ import annotations

import pytest

from cgtool.plan.records import Guard
from cgtool.toolkit.diff.words import changed_words, value_words


@pytest.mark.parametrize(
    ("kind", "old", "new", "said"),
    [
        pytest.param("value", ["f", "1e-06"], ["f", "1e-05"], "a.b was 1e-06 and is 1e-05 now", id="value"),
        pytest.param("type", "m:A", "m:B", "a.b was of type m:A and is of type m:B now", id="type"),
        pytest.param("code", "0" * 64, "1" * 64, "the code of a.b has changed", id="code"),
        pytest.param(
            "value", ["function", "m:f", "00"], ["function", "m:f", "11"], "the code of a.b has changed", id="function"
        ),
        pytest.param("hasattr:c", True, False, "a.b had an attribute c and does not now", id="hasattr"),
        pytest.param('contains:"k"', False, True, 'a.b did not have the key "k" and has now', id="contains"),
        pytest.param(
            "absent:c", True, False, "a.b.c is set on the object itself now and was otherwise before", id="absent"
        ),
        pytest.param(
            "same:self.d", True, False, "a.b and d are two objects now and were otherwise before", id="same"
        ),
        pytest.param(
            "apart:self.d", True, False, "a.b and d are one object now and were otherwise before", id="apart"
        ),
        pytest.param("hooks", 0, 1, "a.b was with no hooks and is with 1 hooks now", id="hooks"),
        pytest.param("empty", True, False, "a.b was empty and is not empty now", id="empty"),
        pytest.param(
            "keys", ["x"], ["x", "y"], "a.b was a dict with the keys 'x' and is a dict with the keys 'x', 'y' now",
            id="keys",
        ),
    ],
)  # fmt: skip
def test_a_guard_that_changed_is_one_sentence(kind, old, new, said):
    assert changed_words(Guard(source="self.a.b", kind=kind, expected=old), new) == said


@pytest.mark.parametrize(
    ("kind", "value"),
    [("value", ["t", ["function"]]), ("value", {"a": 1}), ("length", 3), ("keys", 7), ("tensor", []), ("strange", [1])],
)
def test_what_a_stranger_wrote_outside_of_the_grammar_is_shown_as_it_stands(kind, value):
    assert value_words(kind, value)


def test_a_long_value_has_an_end():
    assert len(value_words("value", "x" * 10_000)) == 201
