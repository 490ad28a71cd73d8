"""The fixture's Triton kernels compared with SDPA attention, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.torch

FIXTURES = Path(__file__).parents[2] / "fixtures"

COMPARE = """
import torch
import paged_kernels
from cgtool.serving import attention
from cgtool.serving.batch import InputBuffers, BatchLimits, Request
from cgtool.serving.forward_context import BatchDescriptor

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
H, K, D, B, S = 4, 2, 16, 40, 4
nan = float("nan")
for query_len, lens, padded in [
    (1, [(1, 0), (1, 7), (1, 30)], BatchDescriptor(4, 4, uniform=True)),
    (3, [(3, 0), (3, 6)], BatchDescriptor(9, 3, uniform=True)),
    (1, [(13, 0)], BatchDescriptor(13)),
    (1, [(1, 9), (11, 4), (2, 0), (1, 31)], BatchDescriptor(20)),
    (1, [(32, 0)], BatchDescriptor(40)),
    (1, [(5, 0), (1, 3)], BatchDescriptor(8, 4)),
]:
    limits = BatchLimits(max_num_seqs=4, max_num_tokens=40, max_seq_len=32, block_size=S, uniform_query_len=query_len)
    buffers = InputBuffers(limits, 40, device)
    requests, block = [], 1
    for new, computed in lens:
        num_blocks = -(-(new + computed) // S)
        blocks = list(range(block, block + num_blocks))
        requests.append(Request(token_ids=[1] * new, num_computed=computed, blocks=blocks))
        block += num_blocks
    _, _, metadata = buffers.fill(requests, padded)
    num_tokens = sum(new for new, _ in lens)
    qkv = torch.randn(padded.num_tokens, H + 2 * K, D, device=device)
    qkv[num_tokens:] = nan
    q, k, v = qkv.split([H, K, K], dim=1)
    results = []
    for function in (attention.paged_attention, paged_kernels.paged_attention):
        torch.manual_seed(1)
        caches = attention.allocate_kv_caches(
            ["a"], num_blocks=B, block_size=S, num_kv_heads=K, head_dim=D, dtype=torch.float32, device=device
        )
        cache = caches["a"]
        for stored in (cache.keys, cache.values):
            stored.copy_(torch.randn(stored.shape))
            stored[0] = stored[block:] = nan
        output = torch.full((padded.num_tokens, H, D), nan, device=device)
        function(q, k, v, output, cache=cache, metadata=metadata)
        results.append((output[:num_tokens], cache.keys[1:block], cache.values[1:block]))
    for one, other in zip(*results):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(other, one, rtol=2e-3, atol=2e-3)
print("equal")
"""


def test_the_kernels_equal_plain_attention_for_prefills_decodes_and_mixed_batches():
    import torch

    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    path = os.pathsep.join([str(FIXTURES), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", COMPARE],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path, **interpreted},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "equal"), done.stderr[-3000:]
