"""What is known of a piece before a compile, and the op that a failed compile names."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import piece_ops  # noqa: F401 - registers the custom ops that pieces below call
import refused_ops  # noqa: F401 - as above
from piece_cases import X, call, graph, method, tensor

from cgtool.compiler import fitness
from cgtool.compiler.adaptors.interface import op_named_in

pytestmark = pytest.mark.torch

SQUARE = tensor(8, 8)
EXPERTS = [tensor(8, 16, dtype="bfloat16"), tensor(2, 16, 16, dtype="bfloat16"), tensor(2, dtype="int32")]
GROUPED = graph(EXPERTS, [call("torch._grouped_mm", "%0", "%1", offs="%2"), method("relu", "%3")], ["%4"])


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("error: 'aoti_torch_cuda__grouped_mm' was not declared in this scope", "_grouped_mm"),
        ("error: use of undeclared identifier 'aoti_torch_cpu_foo_v2'", "foo_v2"),
        ("/tmp/x.so: undefined symbol: aoti_torch_cuda_mm_out", "mm_out"),
        ("Unsupported input type as_complex for extern kernel expop::complexed argument 1.", "expop::complexed"),
        ("LoweringException: NotImplementedError: no\n  target: user.op.default\n  args[0]: 1", "user::op.default"),
        ("the C++ compiler failed on what Inductor wrote for the piece: out of cheese", None),
    ],
)
def test_an_error_names_the_op_at_fault(text, op):
    assert op_named_in(text) == op


@pytest.mark.parametrize(
    ("op", "found"),
    [
        ("_grouped_mm", {("function", "torch._grouped_mm")}),
        ("aten::_grouped_mm.default", {("function", "torch._grouped_mm")}),
        ("relu_out", {("method", "relu")}),
        ("aten::relu", {("method", "relu")}),
        ("aten::mm", set()),
    ],
)
def test_calls_are_found_by_the_ops_they_decompose_into(op, found):
    assert fitness.fitness_of(GROUPED).calls_to(op) == found


def test_ops_that_draw_random_numbers_are_split_out():
    calls = [
        call("torch.nn.functional.dropout", "%0", {"f": "0.5"}, training=True),
        call("torch.nn.functional.dropout1d", "%1", training=False),
        call("torch.rand_like", "%2"),
    ]
    found = fitness.fitness_of(graph([X], calls, ["%3"]))
    assert found.eager_reason is None
    assert found.split_out.keys() == {("function", "torch.nn.functional.dropout"), ("function", "torch.rand_like")}


def test_an_adaptive_pool_of_a_dynamic_size_is_split_out():
    calls = [call("torch.nn.functional.adaptive_avg_pool1d", "%0", 4), method("sum", "%1", 0)]
    for image, found in ((tensor(2, 3, "s0"), {("function", "torch.nn.functional.adaptive_avg_pool1d")}), (X, set())):
        assert fitness.fitness_of(graph([image], calls, ["%2"])).split_out.keys() == found


def test_an_aten_op_needs_a_c_function(monkeypatch):
    assert fitness.fitness_of(GROUPED).uncallable() == set()
    monkeypatch.setattr(fitness, "_has_shim", lambda name, device: name != "at::_grouped_mm")
    assert fitness.fitness_of(GROUPED).uncallable() == {("function", "torch._grouped_mm")}


def test_declared_c_functions_are_found_in_torchs_headers():
    assert fitness._has_shim("at::mm_out", "cpu")
    assert not fitness._has_shim("at::mm_in", "cpu")


def test_an_op_with_a_supported_schema_is_callable():
    piece = graph([SQUARE], [call("torch.ops.cgtool_user.transposed", "%0")], ["%1"])
    assert fitness.fitness_of(piece).uncallable() == set()


def test_an_op_with_an_unsupported_schema_is_uncallable():
    op = "torch.ops.cgtool_refused.nested.default"
    piece = graph([SQUARE], [method("relu", "%0"), call(op, "%1", [[1], [3]])], ["%2"])
    assert fitness.fitness_of(piece).uncallable() == {("function", op)}


def test_a_piece_with_gaps_in_an_output_runs_eagerly():
    gaps = tensor("s0", 8, stride=(32, 2))
    found = fitness.fitness_of(graph([X], [call("torch.sin", "%0")], ["%1"], results=(gaps,)))
    assert "which leave gaps" in found.eager_reason
