"""The forms in which users can name a splitting op."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - what everyone calls it
from split_reference import OPS, capture

from cgtool.errors import SplitError, UnmatchedSplittingOpError, UsageError
from cgtool.ops import register_splitting_op
from cgtool.split.splitter import split_graph

pytestmark = pytest.mark.torch


def x() -> torch.Tensor:
    return torch.arange(24.0).reshape(6, 4)


def model(a):
    b = OPS.mix(a * 2, a)
    q = b.view(1, 1, 6, 4)
    c = F.scaled_dot_product_attention(q, q, q)
    d = torch.ops.aten.mul.Tensor(c, c)
    return F.silu(d).softmax(-1) @ a.mm(a.t()).view(1, 1, 6, 6)[..., :4, :4]


@pytest.fixture(scope="module")
def graph():
    return capture(model, x())


def cut_at(graph, *names) -> list[str]:
    result = split_graph(graph, splitting_ops=names)
    return [
        node.target.rpartition(".")[2] if not node.target.startswith("torch.ops") else node.target.split(".")[3]
        for step in result.steps
        if step.splitting
        for node in result.graphs[step.graph].nodes
        if node.target
    ]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("toysplit::mix", "mix"),
        ("toysplit.mix", "mix"),
        ("torch.ops.toysplit.mix", "mix"),
        ("toysplit::mix.default", "mix"),
        ("toysplit.mix.default", "mix"),
        ("torch.nn.functional.scaled_dot_product_attention", "scaled_dot_product_attention"),
        ("torch._C._nn.scaled_dot_product_attention", "scaled_dot_product_attention"),
        ("aten::scaled_dot_product_attention", "scaled_dot_product_attention"),
        ("aten.scaled_dot_product_attention", "scaled_dot_product_attention"),
        ("aten::mul.Tensor", "mul"),
        ("aten.mul.Tensor", "mul"),
        ("torch.nn.functional.silu", "silu"),
        ("aten::silu", "silu"),
        ("aten::mm", "mm"),
        ("torch.Tensor.mm", "mm"),
        ("aten::softmax", "softmax"),
        ("aten::matmul", "matmul"),
        ("_operator.matmul", "matmul"),
    ],
)
def test_every_form_of_a_name_matches_its_op(graph, name: str, op: str) -> None:
    assert op in cut_at(graph, name)


def test_a_missing_overload_does_not_match(graph) -> None:
    with pytest.raises(UnmatchedSplittingOpError):
        split_graph(graph, splitting_ops=["toysplit::mix.other"])
    with pytest.raises(UnmatchedSplittingOpError):
        split_graph(graph, splitting_ops=["torch.Tensor.silu"])


def test_none_matches_known_ops(graph) -> None:
    result = split_graph(graph, splitting_ops=None)
    assert [step.splitting for step in result.steps] == [False, True, False]
    # has three names, one of which is reported
    assert result.splitting_ops == ("torch.nn.functional.scaled_dot_product_attention",)


def test_none_matches_registered_ops_and_ignores_missing_ones(monkeypatch) -> None:
    monkeypatch.setattr("cgtool.ops._registered", {})
    register_splitting_op("toysplit::mix")
    register_splitting_op("toysplit::absent")
    assert split_graph(capture(lambda a: OPS.mix(a, a) + 1, x()), splitting_ops=None).splitting_ops == (
        "toysplit::mix",
    )


def test_an_empty_list_does_not_split(graph) -> None:
    assert [step.splitting for step in split_graph(graph, splitting_ops=[]).steps] == [False]


def test_matched_names_are_canonical(graph) -> None:
    result = split_graph(graph, splitting_ops=["toysplit.mix", "torch.nn.functional.silu"])
    assert result.splitting_ops == ("torch.nn.functional.silu", "toysplit::mix")
    again = split_graph(graph, splitting_ops=result.splitting_ops)
    assert again == result


def test_the_error_for_an_unmatched_name_lists_custom_ops_first(graph) -> None:
    with pytest.raises(UnmatchedSplittingOpError) as caught:
        split_graph(graph, splitting_ops=["toysplit::mixx"])
    assert isinstance(caught.value, SplitError)
    assert isinstance(caught.value, UsageError)
    message = str(caught.value)
    assert "'toysplit::mixx'" in message
    assert "Did you mean toysplit::mix" in message
    assert caught.value.actual[0] == "toysplit::mix"
    assert caught.value.actual[1].startswith("torch.nn.functional.")


def test_the_list_of_ops_is_truncated() -> None:
    names = ["sin", "cos", "tan", "exp", "log", "abs", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "floor", "ceil"]
    names += ["round", "trunc", "neg", "erf", "erfc", "expm1", "log1p", "log2", "log10", "sinh", "cosh"]

    def many(a):
        for name in names:
            a = getattr(torch, name)(a)
        return a

    with pytest.raises(UnmatchedSplittingOpError, match=r"and 4 more"):
        split_graph(capture(many, x()), splitting_ops=["no::op"])
