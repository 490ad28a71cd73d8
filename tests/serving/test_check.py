"""`check_model`: correct models pass, and every seeded fault is reported."""

from __future__ import annotations

import pytest
import torch
from serving_models import TokenPieces
from serving_traffic import VOCAB, Cached, paged_llama

from cgtool.config import CompilationConfig
from cgtool.config_values import CUDAGraphMode
from cgtool.host import count
from cgtool.serving.check import check_model
from cgtool.serving.forward_context import get_forward_context

pytestmark = pytest.mark.torch

SIZES = {"cudagraph_capture_sizes": [1, 2, 4]}


def check(model, device, *, mode="FULL_DECODE_ONLY", embeddings=None, prepare=lambda runner: None, **options):
    runner = Cached(model, device, config=CompilationConfig(cudagraph_mode=mode, **SIZES), pad_token_id=3, **options)
    prepare(runner)
    found = check_model(runner, vocab_size=VOCAB, embeddings=embeddings or [model.embed_tokens])
    return found, [(one.fault, one.mode and one.mode.name, one.num_tokens) for one in found.findings]


class Around(torch.nn.Module):
    """A decoder whose output is modified."""

    def __init__(self, device, change):
        super().__init__()
        self.inner = paged_llama(device)
        self.embed_tokens = self.inner.embed_tokens
        self.change = change

    def forward(self, input_ids, positions):
        return self.change(self.inner(input_ids, positions))


def test_a_correct_model_passes_and_is_unchanged(device):
    module = paged_llama(device)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    record, faults = check(module, device)
    assert faults == []
    assert record.may_be_served
    assert (record.mode.name, record.num_keys, record.num_replays) == ("FULL_DECODE_ONLY", 3, 9)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_pads_that_affect_real_rows_are_reported(device):
    leaking = Around(device, lambda hidden: hidden + 0 * hidden.sum(dim=0))
    record, faults = check(leaking, device)
    assert set(faults) == {("pads", "FULL", 4), ("pads", "FULL", 2)}, "a batch of one token has no pads"
    assert not record.may_be_served
    assert "NaN" in record.findings[0].sentence


def test_state_that_a_graph_froze_is_reported(device):
    calls = []

    def counted(hidden):
        calls.append(1)
        return hidden + len(calls)

    _, faults = check(Around(device, counted), device)
    assert set(faults) == {("differs", "FULL", size) for size in (1, 2, 4)}


def test_overwritten_outputs_are_reported(device):
    def share(runner):
        runner.model.pools.shared = True

    _, faults = check(paged_llama(device), device, lend_outputs=True, prepare=share)
    assert {fault for fault, _, _ in faults} == {"overwritten"}


def test_correct_pieces_pass(device):
    record, faults = check(TokenPieces(VOCAB, device=device), device, mode="PIECEWISE")
    assert (faults, record.num_keys, record.num_replays) == ([], 3, 9)


def test_compiling_after_warm_up_is_reported(device):
    class Recompiling(TokenPieces):
        def attend(self, x, output):
            if get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE and self.warm:
                count("compiles")
            return super().attend(x, output)

    model = Recompiling(VOCAB, device=device)
    model.warm = False

    def warm(runner):
        runner.capture()
        model.warm = True

    record, faults = check(model, device, mode="PIECEWISE", prepare=warm)
    assert faults == [("made", None, None)]
    assert "18 compiles" in record.findings[0].sentence


def test_inputs_that_move_are_reported(device):
    class Moving(TokenPieces):
        def attend(self, x, output):
            self.kept = super().attend(x, output).clone()
            return self.kept

    record, faults = check(Moving(VOCAB, device=device), device, mode="PIECEWISE")
    assert ("refused", "PIECEWISE", 4) in faults
    assert "The address of tensor 0 of piece 2 changed" in record.findings[0].sentence
