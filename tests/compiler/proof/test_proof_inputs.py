"""Drawn inputs are in range, have exact layouts and are reproducible; sizes satisfy the graph's facts."""

from __future__ import annotations

import pytest
import torch
from piece_cases import call, graph, method, size, tensor, with_results

from cgtool.compiler.proof._torch import Settled
from cgtool.compiler.proof.inputs import STYLES, draw
from cgtool.compiler.proof.judge import farther, left_open
from cgtool.compiler.proof.prove import limits_of, prove_artifact
from cgtool.compiler.proof.reference import leaves_open, lowest_dtype, takes_steps, widened
from cgtool.compiler.sizes import Limits, sizes_to_prove
from cgtool.runtime.op_by_op import piece_function

pytestmark = pytest.mark.torch

INDEX = tensor("s0", dtype="int64")
TABLE = tensor(8, 4)
LIMITS = Limits(num_bytes=1 << 20, num_flops=4e8)


def drawn(piece, sizes=None):
    return draw(piece, sizes or {"s0": 300}, device_index=None, style=STYLES[0])


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([call("torch.nn.functional.embedding", "%0", "%1")], id="embedding"),
        pytest.param([call("torch.ops.aten.embedding.default", "%1", "%0")], id="aten's embedding"),
        pytest.param([call("_operator.getitem", "%1", "%0")], id="indexing"),
        pytest.param([call("_operator.getitem", "%1", {"t": [{"ellipsis": 0}, "%0"]})], id="the last dimension"),
        pytest.param([call("torch.index_select", "%1", 1, "%0")], id="index_select"),
        pytest.param([method("index_select", "%1", dim=0, index="%0")], id="index_select by keyword"),
        pytest.param([call("torch.ops.aten.index.Tensor", "%1", [None, "%0"])], id="aten's index"),
        pytest.param([method("unsqueeze", "%0", 1), call("torch.gather", "%1", 0, "%2")], id="gather"),
        pytest.param([call("torch.nn.functional.one_hot", "%0", 5)], id="one_hot"),
        pytest.param([call("torch.add", "%0", 2), call("_operator.getitem", "%1", "%2")], id="plus two"),
        pytest.param([call("_operator.sub", "%0", 2), method("index_select", "%1", 0, "%2")], id="minus two"),
        pytest.param([call("_operator.sub", 7, "%0"), method("index_select", "%1", 0, "%2")], id="from the end"),
        pytest.param([call("_operator.floordiv", "%0", 4), call("_operator.getitem", "%1", "%2")], id="a quarter"),
        pytest.param(
            [
                method("view", "%0", -1, 1),
                method("to", "%2", {"dtype": "int32"}),
                call("_operator.getitem", "%1", "%3"),
            ],
            id="through a view and a cast",
        ),
        pytest.param([call("_operator.add", "%0", "%0"), call("_operator.getitem", "%1", "%2")], id="twice"),
    ],
)
def test_ops_that_take_an_index_run_on_drawn_integers(nodes):
    piece = with_results(graph([INDEX, TABLE], nodes, [f"%{len(nodes) + 1}"]))
    record = prove_artifact(piece.canonical(), adaptor="eager", graph=piece)
    assert record.proved, record.reason
    assert record.shapes[-1]["s0"] > 1000


def test_integers_lie_below_the_smallest_size_of_a_matrix():
    piece = graph([INDEX, TABLE], [call("torch.nn.functional.embedding", "%0", "%1")], ["%2"])
    assert sorted(set(drawn(piece).tensors()[0].tolist())) == [0, 1, 2, 3]


def test_written_indices_are_distinct():
    piece = graph(
        [INDEX, tensor(500, 4), tensor("s0", 4)],
        [call("_operator.setitem", "%1", "%0", "%2")],
        [],
    )
    index = drawn(piece).tensors()[0]
    assert index.max() < 500
    assert len(index.unique()) == 300


def test_a_write_by_index_is_proved_up_to_the_size_of_its_target():
    piece = graph([INDEX, tensor(500, 4), tensor("s0", 4)], [call("_operator.setitem", "%1", "%0", "%2")], ["%0"])
    piece = with_results(piece)
    record = prove_artifact(piece.canonical(), adaptor="eager", graph=piece)
    assert record.proved, record.reason
    assert 200 < record.shapes[-1]["s0"] <= 500


def test_scattered_indices_are_distinct_along_their_dimension():
    piece = graph(
        [tensor("s0", 6, dtype="int64"), tensor("s0", 9), tensor("s0", 6)],
        [method("scatter", "%1", 1, "%0", "%2")],
        ["%3"],
    )
    index = drawn(piece).tensors()[0]
    assert index.max() < 9
    assert all(len(row.unique()) == 6 for row in index)


def test_inputs_have_the_strides_and_storages_of_the_graph():
    piece = graph(
        [
            tensor("s0", 8, stride=[16, 1]),
            tensor(8, "s0", stride=[1, 8]),
            tensor("s0", 8, stride=[0, 1]),
            tensor("s0", 4, stride=[16, 1]),
        ],
        [],
        ["%0"],
        aliases=((0, 3),),
    )
    first, second, third, fourth = drawn(piece, {"s0": 5}).tensors()
    assert first.stride() == (16, 1)
    assert second.stride() == (1, 8)
    assert third.stride() == (0, 1)
    assert first.data_ptr() == fourth.data_ptr()
    copied = drawn(piece, {"s0": 5}).copy().tensors()
    assert copied[0].data_ptr() == copied[3].data_ptr() != first.data_ptr()
    wide = drawn(piece, {"s0": 5}).widened().tensors()
    assert [t.dtype for t in wide] == [torch.float64] * 4
    assert wide[0].data_ptr() == wide[3].data_ptr()
    assert torch.equal(wide[1], second.double())


def test_inputs_are_reproducible_and_differ_between_sizes():
    piece = graph([tensor("s0", 8), tensor("s0", dtype="bool")], [], ["%0"])
    first, again, other = (drawn(piece, {"s0": n}).tensors() for n in (9, 9, 10))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0][:9])
    assert first[0].abs().min() > 0
    assert set(first[1].tolist()) == {True, False}
    assert torch.rand(1) != torch.rand(1)


def test_a_large_input_has_no_equal_rows():
    values = drawn(graph([tensor(4096, 1024)], [], ["%0"], symbols=()), {}).tensors()[0]
    assert len(values[:, :4].unique(dim=0)) == 4096


def shapes(inputs, symbols, facts=(), guards=()):
    found = sizes_to_prove(graph(inputs, [], ["%0"], symbols=symbols, facts=facts), guards, LIMITS)
    return [tuple(sizes.values()) for sizes in found]


def test_sizes_are_the_smallest_and_the_largest():
    assert shapes([tensor("s0", 8)], (("s0", 2, 31),)) == [(2,), (31,)]
    assert shapes([tensor("s0", 8)], (("s0", 5, 5),)) == [(5,)]
    smallest, largest = shapes([tensor("s0", 8)], (("s0", 2, None),))
    assert smallest == (2,)
    assert LIMITS.num_bytes / 2 < largest[0] * 8 * 4 <= LIMITS.num_bytes
    assert largest[0] % 2


def test_sizes_satisfy_facts_and_guards():
    found = shapes([tensor("s0", 8)], (("s0", 2, None),), ["s0 % 8 == 0"], ("s0 * 8 < 2048",))
    assert found == [(8,), (248,)]
    pairs = shapes([tensor("s0", "s1")], (("s0", 2, None), ("s1", 2, None)), ["s1 == 3 * s0"])
    assert all(wide == 3 * narrow for narrow, wide in pairs)
    assert pairs[0] == (2, 6)
    assert pairs[-1][1] > 600


def test_a_bounded_size_reaches_its_bound_beside_an_unbounded_one():
    found = shapes([tensor("s0", "s1", 8)], (("s0", 2, None), ("s1", 2, 512)))
    assert found[0] == (2, 2)
    assert found[1][1] == 512
    assert found[1][0] > 30


def test_a_proof_does_not_only_use_empty_tensors():
    assert shapes([tensor("s0", 8)], (("s0", 0, 400),)) == [(0,), (67,), (400,)]
    assert shapes([tensor("s0", 8)], (("s0", 0, 40),)) == [(0,), (40,)]


def test_large_weights_keep_the_largest_size_small():
    found = shapes([tensor("s0", 4096), tensor(4096, 4096)], (("s0", 2, None),))
    assert 12 <= found[-1][0] <= 67


def test_attention_keeps_the_largest_size_small():
    compared = graph([tensor("s0", 8)], [call("torch._C._nn.scaled_dot_product_attention", "%0", "%0", "%0")], ["%1"])
    (_, apart), (_, largest) = (
        [sizes["s0"] for sizes in sizes_to_prove(piece, (), limits_of(piece))]
        for piece in (graph([tensor("s0", 8)], [call("torch.sin", "%0")], ["%1"]), compared)
    )
    assert largest**2 * 8 * 4 <= 4e8 < apart**2 * 8 * 4
    assert [sizes["s0"] for sizes in sizes_to_prove(compared, (), limits_of(graph([], [], []), compared))][
        -1
    ] == largest


def test_uninitialized_memory_is_filled_with_two_different_values():
    piece = graph([tensor("s0", 8)], [call("torch.empty_like", "%0"), call("torch.add", "%0", "%1")], ["%2", "%1"])
    assert leaves_open(piece)
    assert not leaves_open(graph([tensor("s0", 8)], [call("torch.sin", "%0")], ["%1"]))
    for other in (False, True):
        with Settled(other=other):
            first, second = piece_function(piece)([torch.ones(3, 8)])
        assert second.eq(0.0 if other else 1.0).all()
        assert torch.equal(first, second + 1)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", [torch.sort, torch.Tensor.argsort])
def test_equal_elements_are_sorted_in_two_orders_without_a_common_place(sort, dim, descending):
    values = torch.tensor([[3, 1, 3], [1, 1, 2], [3, 2, 2], [1, 0, 3], [2, 1, 3]])
    found = []
    for other in (False, True):
        with Settled(other=other):
            given = sort(values, dim=dim, descending=descending)
        found.append(given if isinstance(given, torch.Tensor) else given[1])
        assert torch.equal(values.gather(dim, found[-1]), values.sort(dim=dim, descending=descending).values)
    along = values.gather(dim, found[0])
    several = torch.stack(
        [(values == along.select(dim, at).unsqueeze(dim)).sum(dim) > 1 for at in range(along.shape[dim])]
    )
    assert torch.equal((found[0] != found[1]).movedim(dim, 0), several)


def test_left_open_ignores_rounding():
    one = torch.tensor([1.0, 2.0, float("nan"), float("inf")])
    assert left_open(one, one * (1 + 1e-7)) is None
    assert left_open(one, one + torch.tensor([0.0, 1e-3, 0.0, 0.0])).tolist() == [False, True, False, False]
    assert left_open(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [False, True]
    narrow = torch.tensor([1.0, 2.0, float("nan")]).to(torch.float8_e4m3fn)
    assert left_open(narrow, narrow.clone()) is None


def test_left_open_covers_whole_rows_if_the_piece_sorts():
    rows, others = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])
    assert left_open(rows, others).tolist() == [[False, False], [False, True]]
    assert left_open(rows, others, sorts=True).tolist() == [[False, False], [True, True]]
    one = torch.tensor([0.5, 0.25, 0.26, 0.9, float("nan")], dtype=torch.bfloat16)
    turned = torch.tensor([0.25, 0.5, 0.27, 0.9, float("nan")], dtype=torch.bfloat16)
    assert left_open(one, turned, sorts=True).tolist() == [True, True, True, False, False]


def test_farther_selects_the_result_with_the_larger_error():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    one, other = torch.tensor([1.0, 2.1]), torch.tensor([1.2, 2.0])
    torch.testing.assert_close(farther(one, other, exact), torch.tensor([1.2, 2.1]))
    narrow = [torch.tensor(numbers).to(torch.float8_e5m2) for numbers in ([1.0, 4.0], [3.0, 2.0])]
    assert farther(*narrow, exact).float().tolist() == [3.0, 4.0]
    assert farther(torch.tensor([1]), torch.tensor([2]), exact).tolist() == [1]


def test_a_widened_graph_has_no_float_but_float64():
    piece = graph(
        [tensor("s0", 8, dtype="bfloat16"), tensor(8, 8)],
        [
            method("float", "%0"),
            call("torch.amp.autocast_mode._enter_autocast", {"s": "cpu"}, {"dtype": "bfloat16"}, True, None),
            call("torch._C._nn.linear", "%2", "%1"),
            call("torch.amp.autocast_mode._exit_autocast", "%3"),
            method("to", "%4", {"dtype": "float16"}),
            size("%0", 0),
        ],
        ["%6"],
    )
    assert lowest_dtype(piece) == torch.bfloat16
    wide = widened(piece)
    [found] = piece_function(wide)([torch.ones(3, 8, dtype=torch.float64), torch.full((8, 8), 1 / 3).double()])
    assert found.dtype == torch.float64
    assert found[0, 0] == pytest.approx(8 * float(torch.tensor(1 / 3)), abs=1e-12)
    assert widened(graph([tensor("s0", 8)], [method("view", "%0", {"dtype": "int32"})], ["%1"])) is None


def test_only_floats_in_discontinuous_ops_take_steps():
    mask = [call("torch.gt", "%0", 0), call("torch.where", "%1", "%0", 0)]
    assert takes_steps(graph([tensor("s0", 8)], mask, ["%2"]))
    assert not takes_steps(graph([INDEX], mask, ["%2"]))
    assert not takes_steps(graph([tensor("s0", 8)], [call("torch.relu", "%0")], ["%1"]))
    assert takes_steps(graph([tensor("s0", 8)], [method("to", "%0", {"dtype": "int8"})], ["%1"]))
