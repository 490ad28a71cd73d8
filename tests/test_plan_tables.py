"""What a plan says once is read back as it was, and what is outside the grammar is refused as it is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgtool.digests import canonical_json
from cgtool.pieces import Node, PieceGraph, TensorMeta
from cgtool.plan_tables import Graphs, Texts, TextTable, from_runs, to_runs, write_graphs

ROWS = TensorMeta(dtype="float32", shape=("s0", 4), stride=(4, 1), device="cpu")


@given(st.lists(st.integers(0, 40)))
def test_numbers_in_runs_are_the_same_numbers(numbers):
    assert from_runs(json.loads(json.dumps(to_runs(numbers))), 41) == numbers


def test_a_run_of_layers_is_short():
    assert to_runs(range(17, 737, 9)) == [[17, 9, 80]]


@pytest.mark.parametrize(
    "runs",
    [
        [41],
        [-1],
        [[0, 1, 42]],
        [[40, 1, 2]],
        [[3, -2, 4]],
        ["1"],
        [[1, 2]],
        [True, None],
        [[0, 0, 10**12]],
        [0.5],
        [[0.5, 0.25, 2]],
        [[0, 1.0, 2]],
        [[0, 1, True]],
    ],
)
def test_runs_that_count_past_the_table_are_refused(runs):
    with pytest.raises((ValueError, TypeError)):
        from_runs(runs, 41)


@given(st.lists(st.text(alphabet="ab.[]|", min_size=1)))
def test_texts_are_read_as_they_were_written(texts):
    table = TextTable()
    numbers = [table.number(text) for text in texts]
    read = Texts(json.loads(canonical_json(table.to_json())))
    assert [read.whole[number] for number in numbers] == texts


@pytest.mark.parametrize(
    "table",
    [
        {"parents": [0], "ends": ["a"]},
        {"parents": [-1, 2, 0], "ends": ["a", "b", "c"]},
        {"parents": [-1], "ends": [1]},
        {"parents": [-1], "ends": []},
        {"parents": ["0"], "ends": ["a"]},
    ],
)
def test_texts_that_lean_on_nothing_are_refused(table):
    with pytest.raises(ValueError, match=r"text|zip"):
        Texts(table)


def graph(*nodes):
    return PieceGraph(
        symbols=(), facts=(), inputs=(ROWS,), aliases=(), nodes=nodes, outputs=("%0",), results=(ROWS,), ops={}
    )


def attention(name, scale="0.5", **more):
    return Node(
        kind="function", target="torch.ops.a.b", args=("%0", {"s": name}, {"t": [3, {"f": scale}]}), kwargs=more
    )


GRAPHS = [
    graph(attention("layers.0")),
    graph(attention("layers.1")),
    graph(attention("layers.2", scale="0.25")),
    graph(attention("layers.2", hole=7)),
    graph(attention("layers.2", hole={"s": "x"})),
    graph(Node(kind="function", target="builtins.getattr", args=("%0", {"s": "shape"}), kwargs={})),
    graph(Node(kind="function", target="builtins.getattr", args=("%0", {"s": "dtype"}), kwargs={})),
    graph(Node(kind="size", target=None, args=("%0", 0), kwargs={})),
    graph(Node(kind="size", target=None, args=("%0", 1), kwargs={})),
    graph(Node(kind="function", target="f", args=("%0", True, None), kwargs={})),
]


def test_graphs_are_read_as_they_were_written():
    given_ = {one.identity(): one for one in GRAPHS}
    data = json.loads(canonical_json(write_graphs(given_)))
    read = Graphs(data)
    assert set(read) == set(given_)
    assert {identity: one.identity() for identity, one in read.items()} == {identity: identity for identity in given_}
    # Three calls of attention are one shape; what decides how a line reads, an attribute or a dimension, is no hole.
    assert len(data["shapes"]) == len(GRAPHS) - 3
    shapes = {read.shape_of(GRAPHS[index].identity())[0] for index in range(3)}
    assert len(shapes) == 1
    assert read.shape_of(GRAPHS[1].identity())[2] == ({"s": "layers.1"}, {"f": "0.5"})
    assert read.shape_of(GRAPHS[5].identity())[2] == ()


def test_a_graph_of_no_shape_is_refused():
    data = write_graphs({one.identity(): one for one in GRAPHS[:2]})
    data["members"][1][1] = 5
    with pytest.raises(ValueError, match="has no shape"):
        Graphs(data)
