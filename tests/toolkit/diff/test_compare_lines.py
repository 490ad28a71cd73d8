"""Diffs of lines: what is shown of a change, and that long lists stay quick."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from cgtool.toolkit.diff.records import line_diff, matched


def test_a_change_is_shown_with_two_lines_around_it():
    old = [f"line {i}" for i in range(10)]
    new = [*old[:5], "other", *old[6:]]
    assert line_diff(old, new) == (
        "  line 3", "  line 4", "- line 5", "+ other", "  line 6", "  line 7",
    )  # fmt: skip


def test_changes_far_apart_are_parted():
    old = [str(i) for i in range(20)]
    new = ["x", *old[1:19], "y"]
    assert line_diff(old, new) == ("- 0", "+ x", "  1", "  2", "...", "  17", "  18", "- 19", "+ y")


def test_equal_lists_have_no_diff():
    assert line_diff(["a", "b"], ["a", "b"]) == ()
    assert line_diff([], []) == ()


def test_a_long_diff_ends_with_what_is_left_out():
    diff = line_diff([], [str(i) for i in range(100)])
    assert len(diff) == 61
    assert diff[-1] == "... 40 more lines"


@given(st.lists(st.sampled_from("ab"), max_size=12), st.lists(st.sampled_from("ab"), max_size=12))
def test_matched_lines_are_equal_and_in_order(old, new):
    pairs = matched(old, new)
    assert all(old[left] == new[right] for left, right in pairs)
    assert pairs == sorted(set(pairs))
    assert len({left for left, _ in pairs}) == len(pairs) == len({right for _, right in pairs})


def test_lists_that_have_little_in_common_are_not_aligned_for_ever():
    old = [f"{i % 7} mul" for i in range(6000)]
    new = [f"{i * i % 5} mul" for i in range(6000)]
    began = time.perf_counter()
    assert line_diff(["same", *old], ["same", *new])[0] == "  0 mul"
    assert time.perf_counter() - began < 2
