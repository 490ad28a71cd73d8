"""The wrapper on every graph backend: replays, refusals, copies and clearing."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from serving_models import HandPieces, step
from torch import nn

from cgtool.config_values import CUDAGraphMode
from cgtool.errors import GraphError, UsageError
from cgtool.host import counters
from cgtool.runtime.program import Piece
from cgtool.serving.forward_context import BatchDescriptor
from cgtool.serving.model import GraphedModel
from cgtool.serving.tensors import ModelTensors
from cgtool.serving.wrapper import CUDAGraphWrapper, Pools

pytestmark = pytest.mark.torch


@pytest.fixture
def wrap(backend):
    def make(function, mode="FULL", **options):
        options.setdefault("pools", Pools(backend))
        return CUDAGraphWrapper(function, CUDAGraphMode[mode], backend=backend, **options)

    return make


@pytest.fixture
def ones(device):
    return torch.ones(4, device=device)


def captured(wrapper, *args, size=4, mode="FULL"):
    with step(mode, size, capturing=True):
        return wrapper(*args)


def replayed(wrapper, *args, size=4, mode="FULL"):
    with step(mode, size):
        return wrapper(*args)


def test_a_capture_returns_the_result_and_a_replay_the_next_one(wrap, ones):
    wrapper = wrap(lambda x: x * 2 + 1)
    before = counters()
    assert captured(wrapper, ones).tolist() == [3, 3, 3, 3]
    ones.fill_(5)
    assert replayed(wrapper, ones).tolist() == [11, 11, 11, 11]
    assert wrapper.captured == (BatchDescriptor(4),)
    after = counters()
    assert (after["captures"] - before["captures"], after["replays"] - before["replays"]) == (1, 1)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
def test_under_another_mode_the_function_is_called(wrap, ones, mode):
    calls = []
    wrapper = wrap(lambda x: calls.append(1) or x * 2)
    captured(wrapper, ones)
    replayed(wrapper, ones)
    assert len(calls) == 1
    assert replayed(wrapper, ones, mode=mode).tolist() == [2, 2, 2, 2]
    assert len(calls) == 2


def test_a_request_does_not_capture(wrap, ones):
    wrapper = wrap(lambda x: x * 2)
    with pytest.raises(GraphError, match="no CUDA graph for BatchDescriptor"):
        replayed(wrapper, ones)
    assert wrapper.captured == ()


def test_a_pair_of_modes_is_not_a_wrapper_mode(wrap):
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        with pytest.raises(UsageError, match="must be PIECEWISE or FULL"):
            wrap(lambda x: x, mode)


def test_outputs_are_copied_so_that_later_replays_do_not_change_them(wrap, ones):
    wrapper = wrap(lambda x: {"double": x * 2, "both": (x, [x + 1, None, 7])})
    held = [captured(wrapper, ones)]
    for value in (2.0, 3.0):
        ones.fill_(value)
        held.append(replayed(wrapper, ones))
    assert [out["double"][0].item() for out in held] == [2, 4, 6]
    assert [out["both"][0][0].item() for out in held] == [1, 2, 3]
    assert [out["both"][1][0][0].item() for out in held] == [2, 3, 4]
    assert held[2]["both"][1][1:] == [None, 7]


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Answer:
    hidden: torch.Tensor
    pair: Pair
    note: str = "plain"


def test_outputs_keep_their_classes(wrap, ones):
    wrapper = wrap(lambda x: Answer(x * 2, Pair(x + 1, x + 2)))
    captured(wrapper, ones)
    ones.fill_(2)
    out = replayed(wrapper, ones)
    assert (type(out), type(out.pair), out.note) == (Answer, Pair, "plain")
    assert [out.hidden[0].item(), out.pair.left[0].item(), out.pair.right[0].item()] == [4, 3, 4]


def test_lent_outputs_are_the_graphs_tensors(wrap, ones):
    wrapper = wrap(lambda x: x * 2, lend_outputs=True)
    captured(wrapper, ones)
    lent = replayed(wrapper, ones)
    ones.fill_(2)
    assert replayed(wrapper, ones) is lent
    assert lent.tolist() == [4, 4, 4, 4]


def test_a_shared_pool_with_weak_outputs_corrupts_results(wrap, backend, device):
    x, pools = torch.ones(64, device=device), Pools(backend)
    first = wrap(lambda x: x * 2, lend_outputs=True, pools=pools)
    second = wrap(lambda x: x * 3, lend_outputs=True, pools=pools)
    captured(first, x)
    captured(second, x)
    lent = replayed(first, x)
    replayed(second, x)
    assert lent[0].item() == 3, "the output of one graph was overwritten by another's replay"


@pytest.mark.parametrize("lend", [True, False])
def test_a_graph_never_overwrites_the_outputs_of_another(backend, device, lend):
    model = GraphedModel(lambda x: x * 2 + 1, backend=backend, lend_outputs=lend)
    inputs = {size: torch.full((size,), float(size), device=device) for size in (256, 128, 64, 8)}
    for size, x in inputs.items():
        captured(model, x, size=size)
    held = {size: replayed(model, x, size=size) for size, x in inputs.items()}
    for size in (8, 256, 64, 128):
        replayed(model, inputs[size], size=size)
    assert {size: set(out.tolist()) for size, out in held.items()} == {size: {2.0 * size + 1} for size in inputs}


def test_shared_pools_hold_less_memory_than_separate_ones(backend, device):
    held = {}
    for lend in (False, True):
        model = GraphedModel(lambda x: (x * 2 + 1).relu(), backend=backend, lend_outputs=lend)
        for size in (1 << 20, 1 << 19, 1 << 18):
            captured(model, torch.ones(size >> 4, device=device), size=size)
        held[lend] = model.pools.held_bytes()
    assert 0 < held[False] < held[True]


def test_an_input_that_moved_is_refused_unless_inputs_are_copied(wrap, ones):
    wrapper = wrap(lambda x: x * 2)
    captured(wrapper, ones)
    with pytest.raises(GraphError, match="The address of tensor 0 of the model changed since capture"):
        replayed(wrapper, torch.full_like(ones, 5))
    copying = wrap(lambda x: x * 2, copied_inputs=None)
    assert captured(copying, ones).tolist() == [2, 2, 2, 2]
    assert replayed(copying, torch.full_like(ones, 5)).tolist() == [10, 10, 10, 10]
    assert ones.tolist() == [1, 1, 1, 1]
    with pytest.raises(GraphError, match="does not have the shape"):
        replayed(copying, torch.ones(1, device=ones.device))


def test_a_call_with_more_tensors_or_other_plain_arguments_is_refused(wrap, ones):
    wrapper = wrap(lambda x, scale=None: x * 2 if scale is None else x * scale)
    captured(wrapper, ones)
    with pytest.raises(GraphError, match="with 1 tensors but is called with 2"):
        replayed(wrapper, ones, ones)
    with pytest.raises(GraphError, match="arguments that are not tensors"):
        replayed(wrapper, ones, 3)


def test_debug_mode_checks_shapes_strides_and_dtypes_of_inputs(wrap, ones):
    for debug in (False, True):
        wrapper = wrap(lambda x: x * 2, debug=debug)
        captured(wrapper, ones)
        other = ones.view(2, 2)
        if debug:
            with pytest.raises(GraphError, match="does not have the shape, stride and dtype"):
                replayed(wrapper, other)
        else:
            replayed(wrapper, other)


def test_a_replaced_parameter_is_refused_and_an_in_place_write_is_seen(wrap, device):
    module = nn.Sequential(nn.Linear(4, 4, bias=False, device=device)).requires_grad_(requires_grad=False)
    x = torch.ones(1, 4, device=device)
    wrapper = wrap(module, weights=ModelTensors(module))
    captured(wrapper, x, size=1)
    module[0].weight.data.fill_(2)
    assert replayed(wrapper, x, size=1).tolist() == [[8, 8, 8, 8]]
    module[0].weight = nn.Parameter(torch.ones(4, 4, device=device), requires_grad=False)
    with pytest.raises(GraphError, match=r"^0\.weight was replaced after the model was captured"):
        replayed(wrapper, x, size=1)
    wrapper.clear()
    captured(wrapper, x, size=1)
    assert replayed(wrapper, x, size=1).tolist() == [[4, 4, 4, 4]]


def test_a_failed_capture_leaves_nothing_behind(wrap, ones):
    broken = [True]

    def function(x):
        y = x * 2
        return y + y.sum().item() if broken else y

    wrapper = wrap(function)
    collects = gc.isenabled()
    with pytest.raises(GraphError, match="Cannot capture the model for BatchDescriptor"):
        captured(wrapper, ones)
    assert wrapper.captured == ()
    assert gc.isenabled() is collects
    broken.clear()
    assert captured(wrapper, ones).tolist() == [2, 2, 2, 2]
    ones.fill_(3)
    assert replayed(wrapper, ones).tolist() == [6, 6, 6, 6]


def test_garbage_collection_is_paused_during_capture(wrap, ones):
    seen = []
    captured(wrap(lambda x: seen.append(gc.isenabled()) or x * 2), ones)
    assert seen == [False]
    assert gc.isenabled()


def test_outputs_of_unknown_types_cannot_be_captured(wrap, ones):
    with pytest.raises(GraphError, match="returned an object of type object, in which cgtool cannot find tensors"):
        captured(wrap(lambda x: (x * 2, object())), ones)


def test_a_dropped_graph_can_be_captured_again(backend, ones):
    model = GraphedModel(lambda x: x * 2, backend=backend)
    for sizes in ([4], [4, 3], [3, 4], [4]):
        for size in sizes:
            captured(model, ones[:size], size=size)
        for size in sizes:
            model.drop(CUDAGraphMode.FULL, BatchDescriptor(size))
    captured(model, ones)
    ones.fill_(4)
    assert replayed(model, ones).tolist() == [8, 8, 8, 8]


def test_clearing_frees_the_pools_and_capturing_again_works(backend, ones):
    model = GraphedModel(lambda x: x * 2, backend=backend)
    captured(model, ones)
    handle = model.pools.of(CUDAGraphMode.FULL, BatchDescriptor(4))
    model.clear()
    assert model.full.captured == ()
    assert model.pools.of(CUDAGraphMode.FULL, BatchDescriptor(4)) is not handle
    with pytest.raises(GraphError, match="no CUDA graph"):
        replayed(model, ones)
    captured(model, ones)
    ones.fill_(4)
    assert replayed(model, ones).tolist() == [8, 8, 8, 8]


@pytest.fixture
def pieces(backend, device):
    hand = HandPieces(device=device)
    return hand, GraphedModel(hand, backend=backend)


def test_five_pieces_at_two_sizes_need_six_captures_and_three_replays_per_step(pieces, device):
    hand, model = pieces
    x = {size: torch.arange(4.0 * size, device=device).view(size, 4) for size in (8, 2)}
    before = counters()
    for size, batch in x.items():
        assert torch.equal(captured(model, batch, size=size, mode="PIECEWISE"), hand.expected(batch))
    assert counters()["captures"] - before["captures"] == 6
    assert counters()["replays"] == before["replays"]
    for size in (2, 8, 2):
        x[size].add_(1)
        assert torch.equal(replayed(model, x[size], size=size, mode="PIECEWISE"), hand.expected(x[size]))
    assert counters()["replays"] - before["replays"] == 9
    assert hand.num_attends == 2 * 5
    assert counters()["captures"] - before["captures"] == 6


def test_full_and_piecewise_wrappers_nest(pieces, device):
    hand, model = pieces
    x = torch.ones(8, 4, device=device)
    before = counters()
    captured(model, x, size=8, mode="PIECEWISE")
    captured(model, x, size=8, mode="FULL")
    assert counters()["captures"] - before["captures"] == 3 + 1
    attends = hand.num_attends
    for mode, num_replays in (("FULL", 1), ("PIECEWISE", 3), ("FULL", 1), ("NONE", 0)):
        x.add_(1)
        count = counters()["replays"]
        assert torch.equal(replayed(model, x, size=8, mode=mode), hand.expected(x))
        assert counters()["replays"] - count == num_replays
    assert hand.num_attends == attends + 4  # two each for PIECEWISE and NONE; FULL replays captured kernels


def test_outputs_of_pieces_are_copied_before_they_are_returned(pieces, device):
    hand, model = pieces
    x = torch.ones(8, 4, device=device)
    captured(model, x, size=8, mode="PIECEWISE")
    held = replayed(model, x, size=8, mode="PIECEWISE")
    expected = hand.expected(x)
    x.fill_(9)
    replayed(model, x, size=8, mode="PIECEWISE")
    assert torch.equal(held, expected)


def test_a_replaced_weight_of_a_piece_is_refused(pieces, device):
    hand, model = pieces
    x = torch.ones(8, 4, device=device)
    captured(model, x, size=8, mode="PIECEWISE")
    hand.w1 = nn.Parameter(torch.ones(4, device=device), requires_grad=False)
    with pytest.raises(GraphError, match="The address of tensor 1 of piece 2 changed"):
        replayed(model, x, size=8, mode="PIECEWISE")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dynamic_dims": ("num_tokens", "batch")}, "piece 7 has 2 dynamic dimensions .num_tokens, batch."),
        ({"dynamic_dims": ()}, "No input of piece 7 has the token count"),
        ({"returned_by_ops": {2: "ns::attend"}}, "Tensor 2 of piece 7 is returned by ns::attend"),
    ],
)
def test_a_piece_that_token_counts_cannot_serve_is_refused_and_named(backend, changes, message):
    hand = HandPieces()
    hand.described[1] = Piece(**{"name": "piece 7", "dynamic_dims": ("num_tokens",), "returned_by_ops": {}} | changes)
    with pytest.raises(UsageError, match=message):
        GraphedModel(hand, backend=backend)


def test_results_of_ops_can_be_copied_into_place(backend, device):
    class Returning(HandPieces):
        def attend(self, x, output):
            return x * 2  # a new address at each call

    hand = Returning(device=device)
    for i in (1, 2):
        hand.described[i] = Piece(name=f"piece {2 * i}", dynamic_dims=("n",), returned_by_ops={0: "ns::attend"})
    model = GraphedModel(hand, backend=backend, copy_inputs=True)
    x = torch.ones(8, 4, device=device)
    captured(model, x, size=8, mode="PIECEWISE")
    ballast = []
    for _ in range(3):
        x.add_(1)
        ballast.append(torch.empty(8, 4, device=device))
        assert torch.equal(replayed(model, x, size=8, mode="PIECEWISE"), hand.expected(x))
