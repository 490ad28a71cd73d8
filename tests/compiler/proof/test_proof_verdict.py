"""Right artifacts pass, and every kind of wrong artifact is caught."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import proof_doubles
import pytest
import torch
from piece_cases import CASES, OTHERWISE_LAID, X, call, graph, method, tensor, with_results

from cgtool.compiler.proof import judge, prove
from cgtool.compiler.proof.prove import prove_artifact
from cgtool.errors import ProofMismatchError
from cgtool.runtime.op_by_op import piece_function

pytestmark = pytest.mark.torch

TWO_OUTPUTS = graph(
    [X, tensor(8, 8)],
    [call("torch._C._nn.linear", "%0", "%1"), call("torch.sin", "%0"), call("torch.nn.functional.silu", "%2")],
    ["%4", "%3"],
)
WRITING = graph([X, X], [method("mul_", "%0", {"f": "3.0"}), call("torch.add", "%2", "%1")], ["%3"])


def prove_double(word, piece):
    piece = with_results(piece)
    return prove_artifact(json.dumps(word).encode(), adaptor="double", graph=piece)


@pytest.mark.parametrize("name", CASES)
def test_a_right_artifact_of_every_piece_passes(name):
    piece = with_results(CASES[name].piece)
    record = prove_artifact(piece.canonical(), adaptor="eager", graph=piece)
    assert record.proved, record.reason
    assert len(record.shapes) == (2 if piece.symbols else 1)
    if piece.symbols:
        smallest, largest = record.shapes[0], record.shapes[-1]
        assert smallest["s0"] < largest["s0"]
        assert smallest["s0"] == (4 if piece.facts else 2)


def test_an_output_of_equal_elements_may_have_a_common_rounding_error():
    tolerance = replace(judge.Tolerance.of(torch.float32, takes_steps=False, has_reference=True), usual=4e-5)
    same, different = torch.full((8193,), 30.0), torch.linspace(20, 40, 8193)
    judge.check_numbers(same * 1.0001, same, same.double(), tolerance=tolerance)
    with pytest.raises(judge.WrongError, match=r"1\.000100 times"):
        judge.check_numbers(different * 1.0001, different, different.double(), tolerance=tolerance)


def test_the_test_adaptor_passes_when_it_spoils_nothing():
    assert prove_double("right", TWO_OUTPUTS).proved
    assert prove_double("right", WRITING).proved


@pytest.mark.parametrize(
    ("word", "piece", "message"),
    [
        pytest.param("a factor of 1.01", TWO_OUTPUTS, "output 0", id="a factor of 1.01"),
        pytest.param("other strides", TWO_OUTPUTS, "strides", id="other strides"),
        pytest.param("another dtype", TWO_OUTPUTS, "dtype torch.float64", id="another dtype"),
        pytest.param("one element", TWO_OUTPUTS, "output 0", id="one element"),
        pytest.param("swapped", TWO_OUTPUTS, "output 0", id="swapped"),
        pytest.param("a missing output", TWO_OUTPUTS, "returns 1 outputs", id="a missing output"),
        pytest.param("a NaN", TWO_OUTPUTS, "NaN", id="a NaN"),
        pytest.param("an input written", TWO_OUTPUTS, "leaves input 0", id="an input written"),
        pytest.param("no tensor", TWO_OUTPUTS, "NoneType", id="no tensor"),
        pytest.param("an error", TWO_OUTPUTS, "expected 8 and got 9", id="an error"),
        pytest.param("an input not written", WRITING, "leaves input 0", id="an input not written"),
    ],
)
def test_a_wrong_artifact_is_caught(word, piece, message):
    with pytest.raises(ProofMismatchError, match=message) as caught:
        prove_double(word, piece)
    assert "s0 = " in str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_common_factor_is_caught_in_every_precision(dtype):
    piece = graph(
        [tensor("s0", 64, dtype=dtype), tensor(64, 64, dtype=dtype)],
        [
            call("torch._C._nn.linear", "%0", "%1"),
            call("torch.nn.functional.silu", "%2"),
            call("torch._C._nn.linear", "%3", "%1"),
        ],
        ["%4"],
    )
    assert prove_double("right", piece).proved
    with pytest.raises(ProofMismatchError):
        prove_double("a factor of 1.01", piece)


def test_rounding_is_accepted_if_float64_gives_no_reference():
    piece = graph(
        [tensor("s0", 64, dtype="bfloat16"), tensor(64, 64, dtype="bfloat16")],
        [
            call("torch._C._nn.linear", "%0", "%1"),
            call("torch.nn.functional.silu", "%2"),
            call("torch._C._nn.linear", "%3", "%1"),
            method("view", "%0", {"dtype": "int16"}),  # float64 has other bytes
        ],
        ["%4", "%5"],
    )
    assert prove_double("otherwise rounded", piece).proved
    for word in ("a factor of 1.01", "one row"):
        with pytest.raises(ProofMismatchError, match="output 0"):
            prove_double(word, piece)


def test_strides_are_judged_by_the_trace_and_not_by_eager():
    with pytest.raises(ProofMismatchError, match=r"strides \(96, 16, 4, 1\), and the trace \(96, 1, 24, 6\)"):
        prove_artifact(b'"right"', adaptor="double", graph=OTHERWISE_LAID)  # just what eager gives
    assert prove_artifact(b'"as promised"', adaptor="double", graph=OTHERWISE_LAID).proved
    assert prove_artifact(OTHERWISE_LAID.canonical(), adaptor="eager", graph=OTHERWISE_LAID).proved
    with pytest.raises(ProofMismatchError, match="output 0"):
        prove_artifact(b'"promised and wrong"', adaptor="double", graph=OTHERWISE_LAID)


def test_a_wrong_integer_is_caught():
    piece = graph([tensor("s0", 8, dtype="int64")], [call("torch.add", "%0", 1)], ["%1"])
    assert prove_double("right", piece).worst_error == 0
    with pytest.raises(ProofMismatchError, match="differs in 1 of"):
        prove_double("one element", piece)


@pytest.mark.parametrize(("descending", "is_right"), [(False, True), (True, False)])
def test_a_sort_may_choose_only_the_order_of_equal_elements(monkeypatch, descending, is_right):
    count = 60
    inputs = [tensor(count, dtype="int64"), tensor(count, 8)]

    def taken(nodes, sort, places):
        last = 2 + len(nodes)
        given = [*nodes, call("_operator.getitem", sort, 0), call("_operator.getitem", "%1", places)]
        return with_results(graph(inputs, given, [f"%{last}", places, f"%{last + 1}"], symbols=()))

    sort = call("torch.sort", "%0")
    piece = taken([sort, call("_operator.getitem", "%2", 1)], "%2", "%3")
    back_to_front = [
        method("flip", "%0", 0),
        call("torch.sort", "%2", stable=True, descending=descending),
        call("_operator.getitem", "%3", 1),
        call("_operator.sub", count - 1, "%4"),
    ]
    other = taken(back_to_front, "%3", "%5")
    monkeypatch.setattr(prove, "open_artifact", lambda *_: piece_function(other))
    if is_right:
        assert prove_artifact(b"", adaptor="eager", graph=piece).proved
    else:
        with pytest.raises(ProofMismatchError, match="output 0"):
            prove_artifact(b"", adaptor="eager", graph=piece)


def test_a_piece_that_cannot_run_is_unproved_with_the_reason():
    piece = graph([tensor("s0", 8), tensor("s0", dtype="bool")], [call("torch.linalg.cholesky", "%0")], ["%2"])
    record = prove_artifact(piece.canonical(), adaptor="eager", graph=piece)
    assert not record.proved
    assert "cholesky" in record.reason
    assert record.verdict == "unknown"


def test_a_piece_that_runs_out_of_memory_may_be_proved_later(monkeypatch):
    from cgtool.compiler.proof import prove

    def no_memory(*_args, **_options):
        raise MemoryError

    monkeypatch.setattr(prove, "draw", no_memory)
    piece = graph([tensor("s0", 8)], [call("torch.neg", "%0")], ["%1"])
    record = prove_artifact(piece.canonical(), adaptor="eager", graph=piece)
    assert record.verdict == "later"
    assert "memory" in record.reason


def test_an_artifact_that_cannot_be_opened_is_a_mismatch():
    piece = with_results(TWO_OUTPUTS)
    with pytest.raises(ProofMismatchError, match="cannot be opened"):
        prove_artifact(b"{", adaptor="eager", graph=piece)


def test_an_output_in_the_memory_of_an_input_is_caught(monkeypatch):
    monkeypatch.setitem(proof_doubles.SPOILED, "shared", proof_doubles._in_the_memory_of_an_input)
    piece = graph([X], [call("torch.add", "%0", {"f": "0.0"})], ["%1"])
    with pytest.raises(ProofMismatchError, match="in the memory of input 0"):
        prove_double("shared", piece)


def test_proofs_are_reproducible():
    first, second = (prove_double("right", TWO_OUTPUTS) for _ in range(2))
    assert (first.shapes, first.worst_error) == (second.shapes, second.worst_error)
    assert first.worst_error > 0


def test_scalars_and_empty_tensors_are_proved():
    piece = graph(
        [tensor("s0", 4), tensor()],
        [call("_operator.mul", "%0", "%1"), call("torch.sum", "%2")],
        ["%2", "%3"],
        symbols=(("s0", 0, 9),),
    )
    record = prove_double("right", piece)
    assert record.shapes[0] == {"s0": 0}
    assert any(sizes["s0"] > 1 for sizes in record.shapes)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(("error", "is_right"), [(9e-5, True), (5e-3, False)])
def test_sequential_sums_may_drift(error, is_right):
    exact = torch.linspace(1, 2, 4)
    found = exact * (1 + error)
    tolerance = judge.Tolerance.of(torch.float32, takes_steps=False, has_reference=False)
    with pytest.raises(judge.WrongError):
        judge.check_numbers(found, exact, exact, tolerance=tolerance)
    with nullcontext() if is_right else pytest.raises(judge.WrongError):
        judge.check_numbers(found, exact, exact, tolerance=tolerance.with_sums(32769, torch.float32))
