"""Lines that a trace went through: read from the graph's comments, compared with another graph and with a file."""

from __future__ import annotations

from cgtool.toolkit.diff.traced import TracedLine, between_graphs, in_file_now, traced_lines

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


def test_lines_are_compared_in_the_order_of_the_file():
    old = (line(9, "b = 2"), line(3, "a = 1"))
    new = (line(3, "a = 1"), line(9, "b = 2"))
    assert between_graphs("toy", old, new).sentence == ""


def test_lines_that_only_moved_are_no_change():
    assert between_graphs("toy", (line(3, "a = 1"),), (line(8, "a = 1"),)).sentence == ""


def test_lines_of_other_files_are_left_out():
    changed = between_graphs(
        "pkg.toy", (line(3, "a"), line(1, "x", file="b.py")), (line(3, "a"), line(1, "y", file="b.py"))
    )
    assert (changed.sentence, changed.detail) == ("", ())


def test_the_file_of_a_package_is_its_init():
    old, new = (line(1, "x = 1", file="__init__.py"),), (line(1, "x = 2", file="__init__.py"),)
    assert between_graphs("pkg.models", old, new).sentence == "__init__.py, line 1, in forward: `x = 1` is `x = 2` now"


def test_a_line_that_is_gone_or_new_is_named_as_such_with_how_many_more():
    one, two, three = line(1, "a"), line(2, "b"), line(3, "c")
    assert between_graphs("toy", (one, two, three), (one,)).sentence == (
        "toy.py, line 2, in forward: `b` is gone, and 1 more line"
    )
    assert between_graphs("toy", (one,), (one, two, three, line(4, "d"))).sentence == (
        "toy.py, line 2, in forward: `b` is new, and 2 more lines"
    )


def test_a_traced_line_that_a_file_lacks_is_named_with_the_one_that_is_most_like_it():
    changed = in_file_now(
        "toy", (line(2, "y = x + 1"), line(3, "return y")), "def f(x):\n    y = x + 2\n    return y\n"
    )
    assert changed.sentence == "toy.py, line 2, in forward: `y = x + 1` is `y = x + 2` now"
    assert changed.detail == ("- toy.py:2, in forward: y = x + 1", "+ toy.py:2: y = x + 2")


def test_a_traced_line_that_a_file_lacks_altogether_is_gone():
    changed = in_file_now("toy", (line(2, "y = x + 1"),), "pass\n")
    assert changed.sentence == "toy.py, line 2, in forward: `y = x + 1` is gone"


def test_a_file_that_has_all_traced_lines_tells_of_none():
    changed = in_file_now("toy", (line(2, "y = x + 1"),), "# a comment\n\ny = x + 1\n")
    assert (changed.sentence, changed.known) == ("", True)
    assert not in_file_now("toy", (), "anything").known
