"""Diffs of lines, their speed on long lists, and the source lines that a trace went through."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from cgtool.toolkit.diff.records import TracedLine, between_graphs, in_file_now, line_diff, match_lines, traced_lines


def test_a_change_has_two_lines_of_context():
    old = [f"line {i}" for i in range(10)]
    new = [*old[:5], "other", *old[6:]]
    assert line_diff(old, new) == (
        "  line 3", "  line 4", "- line 5", "+ other", "  line 6", "  line 7",
    )  # fmt: skip


def test_distant_changes_are_separated():
    old = [str(i) for i in range(20)]
    new = ["x", *old[1:19], "y"]
    assert line_diff(old, new) == ("- 0", "+ x", "  1", "  2", "...", "  17", "  18", "- 19", "+ y")


def test_equal_lists_have_no_diff():
    assert line_diff(["a", "b"], ["a", "b"]) == ()
    assert line_diff([], []) == ()


def test_a_long_diff_ends_with_the_number_of_omitted_lines():
    diff = line_diff([], [str(i) for i in range(100)])
    assert len(diff) == 61
    assert diff[-1] == "... 40 more lines"


@settings(max_examples=50)
@given(st.lists(st.sampled_from("ab"), max_size=12), st.lists(st.sampled_from("ab"), max_size=12))
def test_matched_lines_are_equal_and_in_order(old, new):
    pairs = match_lines(old, new)
    assert all(old[left] == new[right] for left, right in pairs)
    assert pairs == sorted(set(pairs))
    assert len({left for left, _ in pairs}) == len(pairs) == len({right for _, right in pairs})


def test_long_lists_with_little_in_common_are_compared_quickly():
    old = [f"{i % 7} mul" for i in range(6000)]
    new = [f"{i * i % 5} mul" for i in range(6000)]
    began = time.process_time()
    assert line_diff(["same", *old], ["same", *new])[0] == "  0 mul"
    assert time.process_time() - began < 2


GRAPH = """
    # toy.py:30, in helper: return x * 2
    mul = _operator.mul(x, 2)
    # toy.py:12, in forward: y = helper(x)
    # toy.py:12, in forward: y = helper(x)
    # other.py:3, in f: return {"a": x}  # with: colons
    # ---- piece 1 ----
    # torch.py
"""


def line(number: int, code: str, *, file: str = "toy.py", function: str = "forward") -> TracedLine:
    return TracedLine(file=file, line=number, function=function, code=code)


def test_a_graph_quotes_each_line_once():
    assert traced_lines(GRAPH) == (
        line(30, "return x * 2", function="helper"),
        line(12, "y = helper(x)"),
        line(3, 'return {"a": x}  # with: colons', file="other.py", function="f"),
    )


def test_lines_that_only_moved_are_unchanged():
    old = (line(9, "b = 2"), line(3, "a = 1"))
    new = (line(3, "a = 1"), line(12, "b = 2"))
    assert between_graphs("toy", old, new).sentence == ""


def test_lines_of_other_files_are_ignored():
    changed = between_graphs(
        "pkg.toy", (line(3, "a"), line(1, "x", file="b.py")), (line(3, "a"), line(1, "y", file="b.py"))
    )
    assert (changed.sentence, changed.detail) == ("", ())


def test_the_file_of_a_package_is_its_init():
    old, new = (line(1, "x = 1", file="__init__.py"),), (line(1, "x = 2", file="__init__.py"),)
    assert between_graphs("pkg.models", old, new).sentence == "__init__.py, line 1, in forward: `x = 1` is `x = 2` now"


def test_the_first_removed_or_added_line_is_shown_with_the_number_of_others():
    one, two, three = line(1, "a"), line(2, "b"), line(3, "c")
    assert between_graphs("toy", (one, two, three), (one,)).sentence == (
        "toy.py, line 2, in forward: `b` is gone, and 1 more line"
    )
    assert between_graphs("toy", (one,), (one, two, three, line(4, "d"))).sentence == (
        "toy.py, line 2, in forward: `b` is new, and 2 more lines"
    )


def test_a_removed_traced_line_is_shown_with_the_most_similar_new_line():
    changed = in_file_now(
        "toy", (line(2, "y = x + 1"), line(3, "return y")), "def f(x):\n    y = x + 2\n    return y\n"
    )
    assert changed.sentence == "toy.py, line 2, in forward: `y = x + 1` is `y = x + 2` now"
    assert changed.detail == ("- toy.py:2, in forward: y = x + 1", "+ toy.py:2: y = x + 2")


def test_a_removed_traced_line_without_a_similar_one_is_gone():
    changed = in_file_now("toy", (line(2, "y = x + 1"),), "pass\n")
    assert changed.sentence == "toy.py, line 2, in forward: `y = x + 1` is gone"


def test_a_file_with_all_traced_lines_has_no_changes():
    changed = in_file_now("toy", (line(2, "y = x + 1"),), "# a comment\n\ny = x + 1\n")
    assert (changed.sentence, changed.known) == ("", True)
    assert not in_file_now("toy", (), "anything").known
