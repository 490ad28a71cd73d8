"""A decoder with a paged KV cache, served on the CPU with a double of CUDA graphs, optionally with a fault."""

from __future__ import annotations

import dataclasses

import paged_llama
import torch
from graph_double import DoubleGraphs

import cgtool
from cgtool.serving.attention import allocate_kv_caches

LAYERS = 2


def build(fault=None, embedding="embed_tokens"):
    """Build a small version of the fixture; `fault` is injected when it is served."""
    spec = paged_llama.build(LAYERS, width=64, intermediate=96, vocab=64, max_position=128)
    serving = cgtool.Serving(runner=lambda model, config: _serve(model, config, fault), token_embeddings=[embedding])
    return dataclasses.replace(spec, serving=serving)


def _serve(model, config, fault):
    limits = cgtool.BatchLimits(max_num_seqs=4, max_num_tokens=32, max_seq_len=32, block_size=4)
    caches = allocate_kv_caches(
        [f"layers.{i}.self_attn" for i in range(LAYERS)],
        num_blocks=64,
        block_size=4,
        num_kv_heads=2,
        head_dim=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    if fault == "pads":
        model = _leaking(model)
    runner = cgtool.ModelRunner(
        model,
        limits=limits,
        config=config,
        kv_caches=caches,
        device=torch.device("cpu"),
        backend=None if fault == "no graphs" else DoubleGraphs(),
        lend_outputs=fault == "overwritten",
        pad_token_id=3,
    )
    if fault == "overwritten":
        runner.model.pools.shared = True
    return runner


def _leaking(model):
    """Make every row depend on all rows, including padding."""

    def call(*args):
        hidden = model(*args)
        return hidden + 0 * hidden.sum(dim=0)

    return call
