"""The pieces of a graph compute the same results as the whole graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - what everyone calls it
from split_reference import OPS, capture, check_split
from torch._higher_order_ops import while_loop
from torch.utils.checkpoint import checkpoint

from cgtool.graph.expressions import evaluate
from cgtool.split.splitter import split_graph

pytestmark = pytest.mark.torch


def x() -> torch.Tensor:
    return torch.arange(24.0).reshape(6, 4) / 7


def larger() -> torch.Tensor:
    return torch.arange(44.0).reshape(11, 4) / 5


def plain(a):
    b = OPS.mix(a.sin(), a)
    return b.cos()


def several_outputs(a):
    b = a * 2
    c = OPS.mix(b, a)
    return b, c + 1, a, c, b


def output_is_an_input(a):
    OPS.mix(a, a)
    return a, a + 1


def tuples(a):
    left, right = torch.chunk(a, 2, 1)
    values, indices = torch.topk(a, 2)
    one, two, three, four = (a * 2).unbind(1)
    first, rest = torch.split(a.relu(), [1, 3], dim=1)
    c = OPS.mix(a, a)
    return c[:, :2] + left + right, values, indices, one * two + three * four, first, rest


def tuple_of_a_splitting_op(a):
    one, two = OPS.pair(a + 1)
    return one * 2, two - 1


def whole_bundle_crosses(a):
    parts = torch.chunk(a, 2, 1)
    c = OPS.mix(a, a)
    return torch.cat(parts, 1) + c


def sizes(a):
    n = a.shape[0]
    b = a.reshape(-1, 2)
    flat = a.view(n * 4)
    c = OPS.mix(a, a)
    z = torch.zeros(n * 2 + 1)
    d = c.reshape(n // 1, 2, 2).view(-1)
    return d + flat, z + (n - 1), n, n * 3 + 1, b


def sizes_of_floats(a):
    c = OPS.mix(a, a)
    return c * (a.shape[0] / 3.0) * (a.shape[0] ** 0.5)


def size_given_to_the_op(a):
    return OPS.scale(a + 1, a.shape[0] * 2) - 1


def written_in_place(a):
    b = a + 1
    b.add_(1)
    OPS.bump_(b)
    b.mul_(2)
    return b, b.sum()


def input_is_written(a):
    a.add_(1)
    c = OPS.mix(a, a)
    a.mul_(2)
    return c, a


def setitem(a):
    b = a * 1
    b[0] = 7
    c = OPS.mix(b, b)
    b[1] = c[0]
    b[:, 1:3] += 1
    return b, c


def copy_into(a):
    buffer = torch.empty_like(a)
    c = OPS.mix(a, a)
    buffer.copy_(c)
    torch.add(a, 1, out=c)
    return buffer, c


def out_buffer(a):
    out = torch.empty_like(a)
    OPS.fill(a * 2, out)
    return out + 1


def out_buffer_through_a_view(a):
    out = torch.empty(a.shape[0], 4)
    OPS.fill((a * 2).view(-1, 2, 2), out.view(-1, 2, 2))
    return out + 1


def view_written_later(a):
    b = a + 1
    flat = b.view(-1)
    OPS.mix(a, a)
    flat.add_(1)
    return b * 2, flat


def unbound_parts_written_later(a):
    one, two, three, four = (a * 2).unbind(1)
    OPS.bump_(two)
    three.mul_(two)
    OPS.bump_(one)
    return one + two, three + four


def list_of_tensors_written(a):
    b, c = a + 1, a + 2
    OPS.bump_all_([b, c])
    return b * c


def inplace_keyword(a):
    b = a - 1
    c = F.relu(b, inplace=True)
    d = OPS.mix(b, c)
    return d + b, F.silu(b, True) + 0


def several_in_a_row(a):
    b = OPS.mix(a, a)
    c = OPS.mix(b, a)
    return OPS.mix(c, b)


def only_views_between(a):
    b = OPS.mix(a, a)
    c = OPS.mix(b.t().reshape(-1, 4), a)
    return c.view(-1)


def no_output_op_last(a):
    b = a + 1
    OPS.bump_(a)
    return b


def mixed_precision(a):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = a @ a.t()
        c = OPS.mix(b, b)
        d = c @ a
        with torch.autocast("cpu", enabled=False):
            e = a @ a.t()
            f = OPS.mix(e, e)
            g = f @ a
        h = d @ g.t()
    return d, g, h, a @ a.t()


TABLE = torch.tensor([1.0, 2.0, 3.0, 4.0])


def constants(a):
    c = OPS.mix(a, a)
    return c + torch.tensor([1.0, 2.0, 3.0, 4.0]), a * 2


def attributes(a):
    b = a.T.contiguous()
    c = OPS.mix(b, b)
    return c.mT + a, a.dtype == torch.float32


def dead_ends(a):
    a.sin()
    OPS.mix(a, a)
    a.cos()
    return (a + 1,)


def a_body_is_run_where_it_stands(a):
    def body(b):
        c = OPS.mix(b.sin(), b)
        return c * torch.arange(4.0), b + b.shape[0]

    left, right = checkpoint(body, a, use_reentrant=False)
    view = left.view(-1)
    OPS.mix(right, right)
    view.mul_(2)
    return left, right, view


def a_body_within_a_body(a):
    def inner(b):
        return OPS.mix(b, b).cos()

    def outer(b):
        return checkpoint(inner, b, use_reentrant=False) + 1

    return checkpoint(outer, a * 2, use_reentrant=False) * 3


def views_of_an_input_are_returned(a):
    b = a.view(-1)
    c = OPS.mix(a, a)
    return b, a[1:], c[0], a.t()


def branches(a):
    def inner(b):
        return torch.cond(b.mean() > 0.5, lambda c: c * b.shape[0], lambda c: c.sin(), (b,)), b.sum()

    first, second = torch.cond(OPS.mix(a, a).sum() > 100, inner, lambda b: (b - 1, b.mean()), (a,))
    return OPS.mix(first, a) + second


def a_loop(a):
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, b: i < 3, lambda i, b: (i + 1, OPS.mix(b, b)), (start, a * 2))


def a_mapped_function(a):
    b = OPS.mix(a, a)
    shifted = torch.vmap(lambda row: row + torch.vmap(lambda one: one * 2)(row))(b)
    return OPS.mix(shifted, b), shifted[0]


def a_mapped_view_is_written_to_later(a):
    b = a * 2
    view = torch.vmap(lambda row: row[1:])(b)
    c = OPS.mix(a, a)
    view.mul_(3)
    return b, c, OPS.mix(view, view)


def a_mapped_write(a):
    b = a * 2
    c = OPS.mix(b, b)
    torch.vmap(lambda row: row.mul_(3))(b)
    return b, OPS.mix(c, b)


def a_gradient(a):
    def loss(b):
        return (OPS.mix(a, a) * b.sin()).sum()

    gradient, value = torch.func.grad_and_value(loss)(a)
    return OPS.mix(gradient, a), value


def a_jacobian(a):
    return torch.func.jacrev(lambda b: (b * a[0]).sum(0))(a[:2]) + OPS.mix(a, a)[0]


FUNCTIONS = [
    value
    for name, value in list(globals().items())
    if getattr(value, "__code__", None) and value.__module__ == __name__ and name not in {"x", "larger"}
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_pieces_match_the_graph_at_one_size(function) -> None:
    check_split(function, x())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_pieces_match_the_graph_at_every_size(function) -> None:
    check_split(function, x(), dynamic=[(0, 0)], others=[(larger(),), (larger()[:9],)])


def test_sizes_missing_in_a_piece_come_from_donors() -> None:
    def function(ids, weight):
        b, s, _ = ids.shape
        flat = ids.reshape(b * s, 4) @ weight
        flat = OPS.mix(flat, flat)
        # The tensors of this piece are [b * s, 4], so b and s come from a donor.
        return (flat @ weight).view(b, s, 4), b * s

    result = check_split(
        function,
        torch.rand(3, 5, 4),
        torch.rand(4, 4),
        dynamic=[(0, 0), (0, 1)],
        others=[(torch.rand(2, 7, 4), torch.rand(4, 4))],
    )
    last = result.graphs[result.steps[-1].graph]
    assert last.inputs[-1].shape == ("s0", "s1", 4)
    assert result.steps[-1].inputs[-1] in (0, 1)  # an input of the graph


def test_equal_sizes_are_one_symbol() -> None:
    def function(a, b):
        return OPS.mix(a, a) + b

    result = check_split(function, x(), x(), dynamic=[(0, 0), (1, 0)], others=[(larger(), larger())])
    assert list(result.symbol_names.values()) == ["s0"]


def test_a_piece_has_the_relations_of_the_trace() -> None:
    def function(a):
        return OPS.mix(a, a).view(-1, 3, 4) + 1

    result = check_split(function, x(), dynamic=[(0, 0)], others=[(torch.rand(9, 4),)])
    facts = result.graphs[result.steps[-1].graph].facts
    assert all(evaluate(fact, {"s0": 9}) for fact in facts)
    assert not all(evaluate(fact, {"s0": 7}) for fact in facts)


def test_a_graph_without_splitting_ops_is_one_piece() -> None:
    result = check_split(plain, x(), splitting_ops=[])
    assert [step.splitting for step in result.steps] == [False]
    assert result.splitting_ops == ()


def test_adjacent_splitting_ops_are_one_piece() -> None:
    assert [step.splitting for step in check_split(several_in_a_row, x()).steps] == [True]


def test_views_and_buffers_alone_form_no_piece() -> None:
    assert [step.splitting for step in check_split(only_views_between, x()).steps] == [True]

    def buffer_between(a):
        b = OPS.mix(a, a)
        out = torch.empty_like(b)
        OPS.fill(b, out)
        return out.view(-1)

    assert [step.splitting for step in check_split(buffer_between, x()).steps] == [True]


def test_a_single_write_is_a_piece() -> None:
    def function(a):
        b = OPS.mix(a, a)
        b.add_(1)
        return OPS.mix(b, a)

    assert [step.splitting for step in check_split(function, x()).steps] == [True, False, True]


def test_pieces_take_and_return_tensors_only() -> None:
    for function in (sizes, tuples, sizes_of_floats):
        result = check_split(function, x(), dynamic=[(0, 0)])
        for graph in result.graphs.values():
            assert len(graph.results) == len(graph.outputs)
            assert all(ref.startswith("%") for ref in graph.outputs)


def test_each_piece_enters_and_leaves_autocast() -> None:
    result = check_split(mixed_precision, x())
    for graph in result.graphs.values():
        targets = [node.target or "" for node in graph.nodes]
        assert sum(t.endswith("_enter_autocast") for t in targets) == sum(t.endswith("_exit_autocast") for t in targets)
    splitting = [result.graphs[step.graph] for step in result.steps if step.splitting]
    assert all(any((n.target or "").endswith("_enter_autocast") for n in graph.nodes) for graph in splitting)


def test_the_graph_is_not_changed() -> None:
    graph_module = capture(whole_bundle_crosses, x())
    before = graph_module.print_readable(print_output=False)
    split_graph(graph_module, splitting_ops=["toysplit::mix"])
    assert graph_module.print_readable(print_output=False) == before


def test_mutated_inputs_are_listed() -> None:
    def function(a, b, c):
        b.add_(1)
        c[0] = OPS.mix(a, a)[0]
        return a + b

    result = check_split(function, x(), x(), x())
    assert result.mutated_inputs == tuple(result.mutated_inputs)
    assert len(result.mutated_inputs) == 2
