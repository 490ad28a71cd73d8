"""Detection of the arguments that a call writes to."""

# ruff: noqa: PLW0108 - these lambdas give Dynamo or torch a separate call
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - what everyone calls it
from split_reference import OPS, capture

from cgtool.split.memory import read_memory, written_by
from cgtool.split.nodes import kind_of

pytestmark = pytest.mark.torch


def x() -> torch.Tensor:
    return torch.arange(24.0).reshape(6, 4)


def statistics() -> torch.Tensor:
    return torch.zeros(4)


WRITES = {
    "method": (lambda a, b: a.add_(b), "a"),
    "named method": (lambda a, b: a.copy_(b), "a"),
    "function": (lambda a, b: torch.relu_(a), "a"),
    "out": (lambda a, b: torch.sin(b, out=a), "a"),
    "setitem": (lambda a, b: a.__setitem__(0, b[0]), "a"),
    "overload": (lambda a, b: torch.ops.aten.mul_.Tensor(a, b), "a"),
    "packet": (lambda a, b: torch.ops.aten.mul_(a, b), "a"),
    "custom op": (lambda a, b: OPS.fill(b, a), "a"),
    "custom op by keyword": (lambda a, b: OPS.fill(x=b, out=a), "a"),
    "list of tensors": (lambda a, b: OPS.bump_all_([a, b]), "ab"),
    "inplace keyword": (lambda a, b: F.relu(a, inplace=True), "a"),
    "inplace by position": (lambda a, b: F.relu(a, True), "a"),
    "foreach": (lambda a, b: torch._foreach_add_([a], [b]), "a"),
    "index_put_": (lambda a, b: a.index_put_((torch.tensor([0]),), b[:1]), "a"),
    "plain add": (lambda a, b: a + b, ""),
    "plain function": (lambda a, b: torch.add(a, b), ""),
    "plain method": (lambda a, b: a.add(b), ""),
    "plain packet": (lambda a, b: torch.ops.aten.add(a, b), ""),
    "plain custom op": (lambda a, b: OPS.mix(a, b), ""),
    "sort has an out form too": (lambda a, b: torch.sort(a + b), ""),
    "and_": (lambda a, b: (a > 1) & (b > 1), ""),
    "silu": (lambda a, b: F.silu(a) + b, ""),
    "layer norm": (lambda a, b: F.layer_norm(a, (4,)) + b, ""),
    "dropout": (lambda a, b: F.dropout(a, 0.5, False) + b, ""),
}


def written_arguments(function, *args) -> str:
    def called(a, b):
        function(a, b)
        return a + b

    graph_module = capture(called, *(args or (x(), x())))
    found = {
        leaf.meta.get("argument")
        for node in graph_module.graph.nodes
        if node.op != "output"
        for leaf in written_by(node)
    }
    return "".join(sorted(name for name in found if name))


@pytest.mark.parametrize("case", WRITES)
def test_writes_are_detected(case: str) -> None:
    function, expected = WRITES[case]
    assert written_arguments(function) == expected


def test_augmented_assignments_are_writes() -> None:
    def function(a, b):
        a += b
        a *= 2

    assert written_arguments(function) == "a"


def test_running_statistics_are_written_in_training_only() -> None:
    def train(a, b):
        F.batch_norm(a, b, torch.ones(4), training=True)

    def evaluate(a, b):
        F.batch_norm(a, b, torch.ones(4), training=False)

    assert written_arguments(train, x(), statistics()) == "b"
    assert written_arguments(evaluate, x(), statistics()) == ""


def test_the_version_counter_reveals_writes() -> None:
    def function(ids, weight):
        # Renormalizes rows of the weight in place, which neither schema nor name shows.
        return F.embedding(ids, weight, max_norm=1.0)

    graph_module = capture(function, torch.tensor([1, 2]), x())
    memory = read_memory({node: kind_of(node) for node in graph_module.graph.nodes if node.op != "output"})
    (writers,) = memory.writers.values()
    assert [writer.target for writer in writers] == [F.embedding]
