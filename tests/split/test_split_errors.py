"""Errors for unsupported nodes have the user's line and a remedy."""

from __future__ import annotations

import pytest
import torch
from split_reference import OPS, capture
from torch._higher_order_ops.strict_mode import strict_mode

from cgtool.errors import SplitError
from cgtool.split.splitter import split_graph

pytestmark = pytest.mark.torch


def x() -> torch.Tensor:
    return torch.arange(24.0).reshape(6, 4)


def refused(function, *args, dynamic=(), config=None) -> str:
    patch = torch._dynamo.config.patch(**(config or {}))
    with patch:
        graph_module = capture(function, *(args or (x(),)), dynamic=dynamic)
    names = ["toysplit::mix"] if any("mix" in str(n.target) for n in graph_module.graph.nodes) else []
    with pytest.raises(SplitError) as caught:
        split_graph(graph_module, splitting_ops=names)
    return str(caught.value)


def test_the_error_for_a_higher_order_op_has_the_users_line() -> None:
    def function(a):
        return strict_mode(lambda b: b.sin(), (a,))

    message = refused(function)
    assert "strict_mode" in message
    assert "test_split_errors.py" in message
    assert "strict_mode(lambda b: b.sin(), (a,))" in message
    assert "custom op" in message


def test_the_error_for_a_call_in_a_branch_has_the_users_line() -> None:
    def function(a):
        return torch.cond(a.sum() > 0, lambda b: b.cos(), lambda b: strict_mode(lambda c: c.sin(), (b,)), (a,))

    message = refused(function)
    assert "strict_mode" in message
    assert "torch.cond(a.sum() > 0" in message


def test_the_error_for_an_unsupported_transform_has_the_users_line() -> None:
    def function(a):
        return torch.func.grad(lambda b: b[b > 0].sum())(a)

    message = refused(function, config={"capture_dynamic_output_shape_ops": True})
    assert "torch.func.grad(lambda b: b[b > 0].sum())(a)" in message
    assert "a data-dependent size" in message


def test_a_change_of_shape_visible_to_another_piece_is_refused() -> None:
    def function(a):
        b = a + 1
        c = OPS.mix(b, b)
        b.unsqueeze_(0)
        return c + b

    message = refused(function)
    assert "unsqueeze_" in message
    assert "b.unsqueeze_(0)" in message
    assert "without the underscore" in message


def test_a_change_of_shape_within_a_piece_is_allowed() -> None:
    def function(a):
        b = OPS.mix(a, a)
        c = (b + 1).unsqueeze_(0)
        return c * 2

    assert len(split_graph(capture(function, x()), splitting_ops=["toysplit::mix"]).steps) == 2


def test_a_data_dependent_number_used_after_a_write_is_refused() -> None:
    def function(a):
        b = a.sum()
        n = b.item()
        a = OPS.mix(a, a).relu()
        return b.add_(1), a * n

    message = refused(function, config={"capture_scalar_outputs": True})
    assert "item" in message
    assert "test_split_errors.py" in message


def test_returning_a_float_of_a_size_is_refused() -> None:
    graph_module = capture(lambda a: a * (a.shape[0] / 3), x(), dynamic=[(0, 0)])
    (ratio,) = (n for n in graph_module.graph.nodes if isinstance(n.meta.get("example_value"), torch.SymFloat))
    (output,) = graph_module.graph.find_nodes(op="output")
    output.args = ((*output.args[0], ratio),)
    with pytest.raises(SplitError, match="the model returns it") as caught:
        split_graph(graph_module, splitting_ops=[])
    assert "test_split_errors.py" in str(caught.value)


def test_a_second_device_is_refused() -> None:
    graph_module = capture(lambda a: OPS.mix(a, a) + 1, x())
    first, *_, last = (n for n in graph_module.graph.nodes if isinstance(n.meta.get("example_value"), torch.Tensor))
    for node, device in ((first, "cuda:0"), (last, "cuda:1")):
        value = node.meta["example_value"]
        with value.fake_mode:
            node.meta["example_value"] = torch.empty(6, 4, device=device)
    with pytest.raises(SplitError, match="second cuda device"):
        split_graph(graph_module, splitting_ops=["toysplit::mix"])


def test_a_graph_with_a_module_is_refused() -> None:
    graph_module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with pytest.raises(SplitError, match="runs a subgraph"):
        split_graph(graph_module, splitting_ops=[])
