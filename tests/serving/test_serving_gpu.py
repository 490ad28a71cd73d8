"""On a GPU: native pieces in every mode compared with eager, over long random traffic, before and after sleep."""

from __future__ import annotations

import pytest
import torch
from serving_traffic import Cached, Traffic, expected, paged_llama

import cgtool
from cgtool.config import CompilationConfig
from cgtool.host import counters
from cgtool.serving.modes import AttentionCGSupport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = CompilationConfig(cudagraph_capture_sizes=[1, 2, 4, 8, 16])
DYNAMIC = {"input_ids": {0: "num_tokens"}, "positions": {0: "num_tokens"}}
STEPS = 2000


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    root, module = tmp_path_factory.mktemp("served"), paged_llama("cuda")
    ids = torch.arange(8, device="cuda")
    cgtool.compile(module, example_args=(ids, ids.clone()), dynamic=DYNAMIC, config=CONFIG, cache_dir=root)
    return module, root


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_random_traffic_equals_eager_and_captures_nothing_after_start_up(warmed, mode):
    module, root = warmed
    model = cgtool.load(module, config=CONFIG, cache_dir=root)
    limits = cgtool.BatchLimits(max_num_seqs=16, max_num_tokens=64, max_seq_len=32, block_size=4)
    runner = Cached(
        model,
        "cuda",
        config=CONFIG.replace(cudagraph_mode=mode),
        limits=limits,
        supports=[AttentionCGSupport.ALWAYS],
        num_blocks=256,
    )
    assert runner.mode_reasons == ()
    runner.capture()
    before, traffic, held = counters(), Traffic(limits, num_blocks=256), []
    for step in range(STEPS):
        if step == STEPS // 2:
            runner.sleep()
            runner.capture()
            before = counters()
        requests, wholes = traffic.step()
        actual, expected_rows = runner.run(requests), expected(module, requests, wholes)
        torch.testing.assert_close(actual, expected_rows, rtol=5e-3, atol=5e-3)
        if step % 100 == 0:
            held.append((actual, actual.clone()))
    after = counters()
    assert all(torch.equal(actual, then) for actual, then in held)
    assert [name for name in after if after[name] != before[name]] == ([] if mode == "NONE" else ["replays"])
