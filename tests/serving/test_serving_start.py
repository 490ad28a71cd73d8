"""Serving runs with torch alone."""

from __future__ import annotations

import pytest
from cli_harness import forked

pytestmark = pytest.mark.torch

SERVE = """
import sys, torch
from cgtool import (
    AttentionCGSupport, BatchDescriptor, CudagraphDispatcher, CUDAGraphWrapper, GraphedModel, BatchLimits, ModelRunner,
    Request, capture_cudagraphs, check_model, counters, get_forward_context, set_forward_context,
)
runner = ModelRunner(
    lambda input_ids, positions: positions[:, None] * 2.0,
    limits=BatchLimits(max_num_seqs=4, max_num_tokens=16, max_seq_len=16),
    kv_caches={},
    device=torch.device("cpu"),
    backend=object(),
    config=__import__("cgtool").CompilationConfig(use_cudagraph=False),
)
runner.capture()
assert runner.run([Request(token_ids=[1, 2], num_computed=3, blocks=[1])]).tolist() == [[6.0], [8.0]]
print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "triton") if name in sys.modules])
"""


def test_serving_needs_neither_dynamo_nor_inductor():
    ran = forked(SERVE)
    assert (ran.code, ran.out.strip()) == (0, "[]"), ran.err[-2000:]
