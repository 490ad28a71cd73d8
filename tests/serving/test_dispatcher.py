"""The dispatcher compared with tables written by hand from vLLM's rules."""

from __future__ import annotations

import time

import pytest

from cgtool.config_values import CUDAGraphMode
from cgtool.errors import UsageError
from cgtool.serving.dispatcher import CudagraphDispatcher
from cgtool.serving.forward_context import BatchDescriptor

pytestmark = pytest.mark.torch

#: Captured sizes 1, 2, 4, 8, at most 4 sequences. For each mode, the graph for batches of 0 to 9 tokens: "." is NONE,
#: "p8" a PIECEWISE graph of 8 tokens, "f8/4" a FULL graph of 8 tokens and 4 sequences for any batch, "u4/4" a FULL
#: graph for uniform decode batches only.
ONE_TOKEN = {
    "NONE": {
        "mixed": ". . . . . . . . . .",
        "uniform": ". . . . . . . . . .",
    },
    "PIECEWISE": {
        "mixed": ". p1 p2 p4 p4 p8 p8 p8 p8 .",
        "uniform": ". p1 p2 p4 p4 p8 p8 p8 p8 .",
    },
    "FULL": {
        "mixed": ". f1/1 f2/2 f4/4 f4/4 f8/4 f8/4 f8/4 f8/4 .",
        "uniform": ". f1/1 f2/2 f4/4 f4/4 f8/4 f8/4 f8/4 f8/4 .",
    },
    "FULL_DECODE_ONLY": {
        "mixed": ". . . . . . . . . .",
        "uniform": ". u1/1 u2/2 u4/4 u4/4 . . . . .",
    },
    "FULL_AND_PIECEWISE": {
        "mixed": ". p1 p2 p4 p4 p8 p8 p8 p8 .",
        "uniform": ". u1/1 u2/2 u4/4 u4/4 p8 p8 p8 p8 .",
    },
}
#: The same for 0 to 13 tokens with two speculative tokens: decode steps of 3, captured sizes 1, 2, 3, 6, 8, 12, at most
#: 3 sequences. Graphs of uniform batches have 3 or 6 tokens (8 is not a whole number of sequences, 12 is too many).
THREE_TOKENS = {
    "NONE": {
        "mixed": ". . . . . . . . . . . . . .",
        "uniform": ". . . . . . . . . . . . . .",
    },
    "PIECEWISE": {
        "mixed": ". p1 p2 p3 p6 p6 p6 p8 p8 p12 p12 p12 p12 .",
        "uniform": ". p1 p2 p3 p6 p6 p6 p8 p8 p12 p12 p12 p12 .",
    },
    "FULL": {
        "mixed": ". f1/1 f2/2 f3/3 f6/3 f6/3 f6/3 f8/3 f8/3 f12/3 f12/3 f12/3 f12/3 .",
        "uniform": ". f1/1 f2/2 f3/3 f6/3 f6/3 f6/3 f8/3 f8/3 f12/3 f12/3 f12/3 f12/3 .",
    },
    "FULL_DECODE_ONLY": {
        "mixed": ". . . . . . . . . . . . . .",
        "uniform": ". u3/1 u3/1 u3/1 u6/2 u6/2 u6/2 . . . . . . .",
    },
    "FULL_AND_PIECEWISE": {
        "mixed": ". p1 p2 p3 p6 p6 p6 p8 p8 p12 p12 p12 p12 .",
        "uniform": ". u3/1 u3/1 u3/1 u6/2 u6/2 u6/2 p8 p8 p12 p12 p12 p12 .",
    },
}
SETTINGS = {
    1: (ONE_TOKEN, {"sizes": (1, 2, 4, 8), "max_num_seqs": 4}),
    3: (THREE_TOKENS, {"sizes": (1, 2, 3, 6, 8, 12), "max_num_seqs": 3, "uniform_query_len": 3}),
}
#: For each set of captured counts, the count used for 0 to 5 active adapters; "-" means no graph (NONE).
LORA_COUNTS = {(0,): "0 - - - - -", (0, 1, 2, 4): "0 1 2 4 4 -", (1, 2, 4): "1 1 2 4 4 -"}


def read(cell, tokens, loras):
    """Return the decision of a table cell; `loras` is the captured count."""
    if cell == ".":
        return CUDAGraphMode.NONE, BatchDescriptor(tokens)
    adapters = {"has_lora": loras > 0, "num_active_loras": loras}
    size, _, reqs = cell[1:].partition("/")
    if cell[0] == "p":
        return CUDAGraphMode.PIECEWISE, BatchDescriptor(int(size), **adapters)
    return CUDAGraphMode.FULL, BatchDescriptor(int(size), int(reqs), cell[0] == "u", **adapters)


@pytest.mark.parametrize("lora_counts", list(LORA_COUNTS), ids=str)
@pytest.mark.parametrize("kind", ["mixed", "uniform"])
@pytest.mark.parametrize("mode", list(ONE_TOKEN))
@pytest.mark.parametrize("query_len", [1, 3])
def test_every_batch_gets_the_decision_in_the_table(query_len, mode, kind, lora_counts):
    table, options = SETTINGS[query_len]
    dispatcher = CudagraphDispatcher(CUDAGraphMode[mode], lora_counts=lora_counts, **options)
    for active, served in enumerate(LORA_COUNTS[lora_counts].split()):
        for tokens, cell in enumerate(table[mode][kind].split()):
            decision = dispatcher.dispatch(tokens, uniform=kind == "uniform", num_active_loras=active)
            expected = read(".", tokens, 0) if served == "-" else read(cell, tokens, int(served))
            assert decision == expected, (tokens, active)


@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        ("NONE", ""),
        ("PIECEWISE", "p8 p4 p2 p1"),
        ("FULL", "f8/4 f4/4 f2/2 f1/1"),
        ("FULL_DECODE_ONLY", "u4/4 u2/2 u1/1"),
        ("FULL_AND_PIECEWISE", "p8 p4 p2 p1 u4/4 u2/2 u1/1"),
    ],
)
def test_keys_are_in_capture_order(mode, keys):
    dispatcher = CudagraphDispatcher(CUDAGraphMode[mode], (1, 2, 4, 8), max_num_seqs=4)
    assert list(dispatcher.keys()) == [read(cell, 0, 0) for cell in keys.split()]


@pytest.mark.parametrize("mode", list(CUDAGraphMode))
@pytest.mark.parametrize("query_len", [1, 3])
def test_every_dispatched_graph_is_among_the_keys(mode, query_len):
    dispatcher = CudagraphDispatcher(mode, lora_counts=(0, 2), **SETTINGS[query_len][1])
    keys = set(dispatcher.keys())
    decisions = {
        dispatcher.dispatch(tokens, uniform=uniform, num_active_loras=loras)
        for tokens in range(14)
        for uniform in (False, True)
        for loras in range(3)
    }
    assert {decision for decision in decisions if decision[0] is not CUDAGraphMode.NONE} == keys


def test_cascade_attention_uses_piecewise_if_captured_else_none():
    both = CudagraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, (4,), max_num_seqs=4)
    assert both.dispatch(3, uniform=True, most=CUDAGraphMode.PIECEWISE) == (CUDAGraphMode.PIECEWISE, BatchDescriptor(4))
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY):
        only = CudagraphDispatcher(mode, (4,), max_num_seqs=4)
        assert only.dispatch(3, uniform=True, most=CUDAGraphMode.PIECEWISE) == (CUDAGraphMode.NONE, BatchDescriptor(3))


def test_a_rank_without_graphs_keeps_other_ranks_from_using_graphs():
    dispatcher = CudagraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, (4,), max_num_seqs=4)
    assert dispatcher.dispatch(4, uniform=True, most=CUDAGraphMode.NONE) == (CUDAGraphMode.NONE, BatchDescriptor(4))


def test_without_padding_only_exact_sizes_have_a_graph():
    dispatcher = CudagraphDispatcher(CUDAGraphMode.PIECEWISE, (2, 4), max_num_seqs=4, enable_padding=False)
    assert [dispatcher.dispatch(tokens)[0].name for tokens in range(6)] == [
        *("NONE", "NONE", "PIECEWISE", "NONE", "PIECEWISE", "NONE")
    ]


def test_decode_sizes_may_differ_from_those_of_mixed_batches():
    dispatcher = CudagraphDispatcher(
        CUDAGraphMode.FULL_AND_PIECEWISE, (64, 128), max_num_seqs=8, uniform_query_len=2, decode_sizes=(2, 4, 5, 16, 32)
    )
    assert dispatcher.decode_sizes == (2, 4, 16)
    assert dispatcher.dispatch(6, uniform=True) == (CUDAGraphMode.FULL, BatchDescriptor(16, 8, uniform=True))
    assert dispatcher.dispatch(6) == (CUDAGraphMode.PIECEWISE, BatchDescriptor(64))
    assert dispatcher.dispatch(18, uniform=True) == (CUDAGraphMode.PIECEWISE, BatchDescriptor(64))


def test_a_disabled_dispatcher_sends_no_batch_to_graphs():
    dispatcher = CudagraphDispatcher(CUDAGraphMode.FULL, (4,), max_num_seqs=4)
    dispatcher.enabled = False
    assert dispatcher.dispatch(4)[0] is CUDAGraphMode.NONE


@pytest.mark.parametrize(
    "wrong", [{"sizes": (0, 1)}, {"uniform_query_len": 0}, {"lora_counts": ()}, {"lora_counts": (-1,)}]
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(UsageError, match="1 or more"):
        CudagraphDispatcher(CUDAGraphMode.FULL, **{"sizes": (1,), "max_num_seqs": 4, **wrong})


def test_a_decision_takes_two_microseconds_at_most():
    dispatcher = CudagraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, range(8, 513, 8), max_num_seqs=256)
    best = min(_secs(dispatcher) for _ in range(20))
    assert best / 1000 < 2e-6


def _secs(dispatcher):
    start = time.perf_counter()
    for tokens in range(1, 1001):
        dispatcher.dispatch(tokens % 512, uniform=True)
    return time.perf_counter() - start
