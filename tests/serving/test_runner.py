"""Whole steps over a paged KV cache: every mode compared with running whole sequences without a cache."""

from __future__ import annotations

import logging

import pytest
import torch
from serving_models import TokenPieces
from serving_traffic import VOCAB, Cached, Traffic, expected, paged_llama

from cgtool.config import CompilationConfig
from cgtool.config_values import CUDAGraphMode
from cgtool.errors import GraphError, UsageError
from cgtool.host import counters
from cgtool.serving.batch import BatchLimits, Request
from cgtool.serving.forward_context import get_forward_context
from cgtool.serving.modes import AttentionCGSupport

pytestmark = pytest.mark.torch

SIZES = {"cudagraph_capture_sizes": [1, 2, 4]}
DECODE = CompilationConfig(cudagraph_mode="FULL_DECODE_ONLY", **SIZES)
SPECULATIVE = BatchLimits(max_num_seqs=4, max_num_tokens=32, max_seq_len=32, block_size=4, uniform_query_len=3)


@pytest.fixture
def module(device):
    return paged_llama(device)


def close(actual, expected_rows):
    tolerance = 2e-3 if actual.is_cuda else 1e-4  # GPU kernels add in another order
    torch.testing.assert_close(actual, expected_rows, rtol=tolerance, atol=tolerance)


def delta(before):
    return {name: value - before[name] for name, value in counters().items()}


def request(tokens, computed=0, blocks=(1, 2, 3)):
    return Request(token_ids=tokens, num_computed=computed, blocks=list(blocks))


@pytest.mark.parametrize("limits", [None, SPECULATIVE], ids=["one token", "three tokens"])
@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_random_traffic_equals_running_whole_sequences(module, device, mode, limits):
    runner = Cached(module, device, config=DECODE.replace(cudagraph_mode=CUDAGraphMode[mode]), limits=limits)
    runner.capture()
    before, traffic, num_full = counters(), Traffic(runner.limits), 0
    for _ in range(120):
        requests, wholes = traffic.step()
        close(runner.run(requests), expected(module, requests, wholes))
        num_full += all(len(one.token_ids) == runner.limits.uniform_query_len for one in requests)
    assert num_full > 20
    assert delta(before)["captures"] == 0
    assert delta(before)["replays"] == (num_full if mode == "FULL_DECODE_ONLY" else 0)


def test_capture_is_largest_first_and_reports_its_cost(module, device):
    events = []
    runner = Cached(module, device, config=DECODE)
    report = runner.capture(on_event=events.append)
    assert [(size.mode.name, size.descriptor.num_tokens) for size in report.sizes] == [("FULL", n) for n in (4, 2, 1)]
    assert report.secs >= sum(size.secs for size in report.sizes) > 0
    assert report.pool_bytes == sum(size.pool_bytes for size in report.sizes) > 0
    assert report.pool_bytes <= 1.5 * report.sizes[0].pool_bytes, "smaller graphs fit into the memory of the largest"
    assert report.pools_are_shared
    assert [(event.phase, event.message, event.done, event.total) for event in events] == [
        ("capture", f"FULL {size}", number, 3) for number, size in enumerate((4, 2, 1), 1)
    ]


def test_only_rank_0_reports_progress(module, device):
    events = []
    Cached(module, device, config=DECODE, rank=1).capture(on_event=events.append)
    assert events == []


def test_oversize_batches_are_dropped_or_refused(module, device, caplog):
    config = DECODE.replace(cudagraph_capture_sizes=[2, 4, 64])
    with caplog.at_level(logging.WARNING):
        runner = Cached(module, device, config=config)
    assert runner.dispatcher.decode_sizes == (2, 4)
    assert "[64]" in caplog.text
    with pytest.raises(UsageError, match=r"\[64\]"):
        Cached(module, device, config=config, strict=True)


def test_steps_before_capture_run_without_graphs(module, device):
    runner = Cached(module, device, config=DECODE)
    before = counters()
    runner.run([request([5])])
    assert delta(before)["replays"] == delta(before)["captures"] == 0


def test_a_missing_graph_is_captured_only_on_demand(module, device):
    strict, lazy = Cached(module, device, config=DECODE), Cached(module, device, config=DECODE, capture_on_demand=True)
    strict.capture()
    strict.model.clear()
    with pytest.raises(GraphError, match="capturing during requests is disabled"):
        strict.run([request([5])])
    before = counters()
    first, second = lazy.run([request([5])]), lazy.run([request([5])])
    assert (delta(before)["captures"], delta(before)["replays"]) == (1, 1)
    close(first, second)


def test_sleep_frees_graphs_and_capture_restores_them(module, device):
    runner = Cached(module, device, config=DECODE)
    runner.capture()
    expected_rows = runner.run([request([5])])
    runner.sleep()
    before = counters()
    close(runner.run([request([5])]), expected_rows)
    assert delta(before)["replays"] == 0
    runner.capture()
    close(runner.run([request([5])]), expected_rows)
    assert (delta(before)["captures"], delta(before)["replays"]) == (3, 1)


def test_nan_in_pads_does_not_affect_real_rows(module, device):
    runner = Cached(module, device, config=DECODE, pad_token_id=VOCAB - 1)
    runner.capture()
    traffic = Traffic(runner.limits, seed=3)
    with torch.no_grad():
        module.embed_tokens.weight[VOCAB - 1] = float("nan")
    for cache in runner.kv_caches.values():
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
    replays = counters()["replays"]
    for _ in range(40):
        requests, _wholes = traffic.step()
        assert torch.isfinite(runner.run(requests)).all()
    assert counters()["replays"] > replays


def test_pads_are_removed_from_every_output_with_a_row_per_token(device):
    def model(input_ids, positions):
        rows = positions[:, None] * 1.0
        return {"hidden": rows, "total": torch.ones((), device=device), "heads": torch.ones(7, 2, device=device)}

    runner = Cached(model, device, config=DECODE)
    runner.capture()
    out = runner.run([request([5], blocks=(i + 1,)) for i in range(3)])
    assert [tuple(tensor.shape) for tensor in out.values()] == [(3, 1), (), (7, 2)]


def test_layers_read_the_current_step(device):
    seen = []

    def model(input_ids, positions):
        seen.append(get_forward_context())
        return positions[:, None] * 1.0

    runner = Cached(model, device, config=DECODE.replace(cudagraph_mode=CUDAGraphMode.NONE))
    out = runner.run([request([5, 6, 7]), request([8], computed=4, blocks=(4, 5))])
    (context,) = seen
    assert out[:, 0].tolist() == [0, 1, 2, 4]
    assert (context.context.is_prefill, context.context.batch_size, context.context.graph_bs) == (True, 2, 2)
    metadata = context.attn_metadata
    assert metadata.slots.tolist() == [4, 5, 6, 20]
    assert metadata.seq_lens.tolist() == [3, 5]
    assert metadata.query_starts.tolist() == [0, 3, 4]
    assert metadata.block_tables[:, :3].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert (metadata.query_lens, metadata.cached_lens, metadata.uniform_query_len) == ((3, 1), (3, 5), None)
    assert get_forward_context().attn_metadata is None


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([request([])], "at least one new token"),
        ([request(list(range(13)))], "blocks of 4 tokens"),
        ([request([1], computed=32, blocks=range(1, 20))], "at most 32 tokens"),
        ([request([1], blocks=(0,))], "Block 0"),
        ([request([1])] * 5, "exceeds max_num_seqs 4"),
        ([request([1] * 20, blocks=range(1, 9))] * 2, "max_num_tokens 32"),
    ],
)
def test_a_batch_beyond_the_limits_is_refused(module, requests, message):
    with pytest.raises(UsageError, match=message):
        Cached(module, "cpu").run(requests)


@pytest.mark.parametrize(
    ("support", "config", "mode"),
    [
        (AttentionCGSupport.UNIFORM_BATCH, {}, "FULL_DECODE_ONLY"),
        (AttentionCGSupport.NEVER, {}, "NONE"),
        (AttentionCGSupport.ALWAYS, {"cudagraph_mode": "FULL"}, "FULL"),
        (AttentionCGSupport.ALWAYS, {"use_cudagraph": False}, "NONE"),
        (AttentionCGSupport.ALWAYS, {"enforce_eager": True}, "NONE"),
    ],
)
def test_the_mode_depends_on_the_configuration_and_on_attention(module, support, config, mode):
    runner = Cached(module, "cpu", config=CompilationConfig(**SIZES, **config), supports=[support])
    assert runner.dispatcher.mode.name == mode


def ranks(*others):
    """A gather in which the other ranks send `others`."""
    return lambda own: [own, *others]


FULL, PIECEWISE, NONE = CUDAGraphMode.FULL.value, CUDAGraphMode.PIECEWISE.value, CUDAGraphMode.NONE.value


@pytest.mark.parametrize(
    ("own", "other", "mode", "tokens"),
    [
        (1, (3, 1, FULL), "FULL", (4, 4)),
        (2, (1, 1, FULL), "FULL", (2, 2)),
        (0, (2, 1, FULL), "FULL", (2, 2)),
        (2, (9, 0, NONE), "NONE", (2, 9)),
        (0, (9, 0, NONE), "NONE", (1, 9)),
    ],
)
def test_data_parallel_ranks_use_the_same_mode_and_padding(own, other, mode, tokens):
    seen = []

    def model(input_ids, positions):
        seen.append((get_forward_context(), len(input_ids)))
        return positions[:, None] * 1.0

    runner = Cached(model, "cpu", config=DECODE, gather=ranks(other), capture_on_demand=True)
    out = runner.run([request([5], blocks=(i + 1,)) for i in range(own)])
    context, length = seen[-1]
    assert context.cudagraph_runtime_mode.name == mode
    assert tuple(context.dp_metadata.num_tokens_across_dp) == tokens
    assert (length, len(out)) == (tokens[0], own)


@pytest.mark.parametrize(
    ("own", "other", "mode", "tokens"),
    [
        (1, (3, 1, PIECEWISE), "PIECEWISE", (4, 4)),
        (3, (2, 0, PIECEWISE), "PIECEWISE", (4, 4)),
        (0, (2, 0, PIECEWISE), "PIECEWISE", (2, 2)),
        (2, (9, 0, NONE), "NONE", (2, 9)),
    ],
)
def test_ranks_with_prompts_use_piecewise_graphs_and_the_same_padding(own, other, mode, tokens):
    model = TokenPieces(VOCAB)
    config = CompilationConfig(cudagraph_mode="PIECEWISE", **SIZES)
    runner = Cached(model, "cpu", config=config, gather=ranks(other))
    runner.capture()
    seen, plain = [], runner.execute

    def execute(requests, mode, descriptor, *, dp_metadata):
        seen.append((mode.name, descriptor.num_tokens, tuple(dp_metadata.num_tokens_across_dp)))
        return plain(requests, mode, descriptor, dp_metadata=dp_metadata)

    runner.execute = execute
    assert len(runner.run([request([5], blocks=(i + 1,)) for i in range(own)])) == own
    assert seen == [(mode, tokens[0], tokens)]
