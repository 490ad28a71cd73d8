"""What a plan says once is read back as it was, and what is outside the grammar is refused as it is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgtool.errors import ArtifactError
from cgtool.plan.grammar import decode, encode
from cgtool.plan.pieces import GraphRows, Graphs, Node, PieceGraph, TensorMeta, join_constants
from cgtool.plan.records import TextRows, Texts
from cgtool.plan.writing import TextTable, graph_rows

ROWS = TensorMeta(dtype="float32", shape=("s0", 4), stride=(4, 1), device="cpu")


@given(st.lists(st.text(alphabet="ab.[]|", min_size=1)))
def test_texts_round_trip(texts):
    table = TextTable()
    numbers = [table.number(text) for text in texts]
    read = Texts(decode(encode(table.rows()), TextRows))
    assert [read.whole[number] for number in numbers] == texts


@pytest.mark.parametrize(
    ("parents", "ends"),
    [((0,), ("a",)), ((-1, 2, 0), ("a", "b", "c")), ((-2,), ("a",)), ((-1,), ())],
)
def test_texts_with_invalid_parents_are_refused(parents, ends):
    with pytest.raises(ValueError, match=r"text|zip"):
        Texts(TextRows(parents=parents, ends=ends))


def test_texts_that_expand_too_far_are_refused():
    with pytest.raises(ValueError, match="characters"):
        Texts(TextRows(parents=(-1, *range(9_999)), ends=("a" * 10_000,) * 10_000))


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


def test_graphs_round_trip_and_share_frames():
    given_ = {one.identity(): one for one in GRAPHS}
    rows = decode(encode(graph_rows(given_)), GraphRows)
    read = Graphs(rows)
    assert len(read) == len(GRAPHS)
    assert dict(read) == given_
    # Three calls of attention share a frame; attributes and dimensions are not extracted as constants.
    assert len(rows.frames) == len(GRAPHS) - 3
    assert len({read.parts_of(GRAPHS[index].identity())[0] for index in range(3)}) == 1
    assert read.parts_of(GRAPHS[1].identity())[2] == ({"s": "layers.1"}, 3, {"f": "0.5"})
    assert read.parts_of(GRAPHS[5].identity())[2] == ()


def test_graphs_that_do_not_match_their_identity_are_refused():
    rows = graph_rows({one.identity(): one for one in GRAPHS[:2]})
    first, second = rows.members
    for members, why in (
        ((first, replace(second, frame=5)), "has no frame"),
        ((first, first), "twice"),
        ((first, replace(second, constants=first.constants)), "was changed"),
        ((first, replace(second, constants=())), "was changed"),
    ):
        with pytest.raises(ValueError, match=why):
            Graphs(replace(rows, members=members))
    with pytest.raises(ValueError, match="was changed"):
        Graphs(replace(rows, frames=(replace(rows.frames[0], aliases=((0, 0),)),)))


def test_a_hole_without_a_constant_is_refused():
    with pytest.raises(ArtifactError, match="Constant 3"):
        join_constants(graph(Node(kind="function", target="f", args=("%0", {"hole": 3}), kwargs={})), (1, 2, 3))
