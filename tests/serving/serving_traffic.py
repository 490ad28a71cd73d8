"""A model over a paged KV cache, its runner, and requests, shared by tests of whole steps."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from graph_double import DoubleGraphs

from cgtool.config import CompilationConfig
from cgtool.serving.attention import allocate_kv_caches
from cgtool.serving.batch import BatchLimits, Request
from cgtool.serving.graphs import CudaGraphs
from cgtool.serving.runner import ModelRunner

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
VOCAB, LAYERS = 64, 2
NUM_BLOCKS = 64


def paged_llama(device="cpu", num_layers=LAYERS):
    """Build the fixture model with deterministic weights."""
    if str(FIXTURES) not in sys.path:
        sys.path.insert(0, str(FIXTURES))
    import paged_llama

    spec = paged_llama.build(num_layers, width=64, intermediate=96, vocab=VOCAB, max_position=128)
    return spec.module.requires_grad_(requires_grad=False).to(device)


class Cached(ModelRunner):
    """A runner with a KV cache for the fixture model."""

    def __init__(self, model, device, *, backend=None, config=None, limits=None, num_blocks=NUM_BLOCKS, **options):
        limits = limits or BatchLimits(max_num_seqs=4, max_num_tokens=32, max_seq_len=32, block_size=4)
        caches = allocate_kv_caches(
            [f"layers.{i}.self_attn" for i in range(LAYERS)],
            num_blocks=num_blocks,
            block_size=limits.block_size,
            num_kv_heads=2,
            head_dim=16,
            dtype=torch.float32,
            device=torch.device(device),
        )
        if backend is None:
            backend = DoubleGraphs() if torch.device(device).type == "cpu" else CudaGraphs(torch.device(device))
        super().__init__(
            model,
            limits=limits,
            config=config or CompilationConfig(cudagraph_capture_sizes=[1, 2, 4]),
            kv_caches=caches,
            device=torch.device(device),
            backend=backend,
            **options,
        )


class Sequence:
    """One sequence: its tokens, the number of cached tokens, and its blocks."""

    def __init__(self, rng, blocks, prompt_len):
        self.tokens = [rng.randrange(1, VOCAB - 1) for _ in range(prompt_len)]
        self.computed = 0
        self.blocks = blocks


class Traffic:
    """Random steps of prefills, decodes, mixed batches and chunks over a few sequences, without the pad token."""

    def __init__(self, limits, seed=0, num_blocks=NUM_BLOCKS):
        self.rng = random.Random(seed)
        self.limits = limits
        self.free = list(range(1, num_blocks))
        self.rng.shuffle(self.free)
        self.running = []

    def step(self):
        """Return the requests of a step, and the whole sequence so far for each."""
        limits, rng = self.limits, self.rng
        for sequence in [one for one in self.running if len(one.tokens) + 8 > limits.max_seq_len]:
            self.running.remove(sequence)
            self.free += sequence.blocks
        while len(self.running) < limits.max_num_seqs and (not self.running or rng.random() < 0.6):
            blocks, self.free = self.free[: limits.max_blocks], self.free[limits.max_blocks :]
            self.running.append(Sequence(rng, blocks, rng.randrange(1, 12)))
        chosen = [one for one in self.running if rng.random() < 0.8] or self.running[:1]
        requests, wholes, room = [], [], limits.max_num_tokens
        for sequence in chosen:
            new = len(sequence.tokens) - sequence.computed
            if new <= limits.uniform_query_len:  # decode: the sampled token and speculative tokens
                sequence.tokens += [rng.randrange(1, VOCAB - 1) for _ in range(limits.uniform_query_len - new)]
                new = limits.uniform_query_len
            new = min(new, room)
            if not new:
                break
            end = sequence.computed + new
            requests.append(
                Request(
                    token_ids=sequence.tokens[sequence.computed : end],
                    num_computed=sequence.computed,
                    blocks=sequence.blocks[: -(-end // limits.block_size)],
                )
            )
            wholes.append(sequence.tokens[:end])
            sequence.computed = end
            if end == len(sequence.tokens):
                sequence.tokens.append(rng.randrange(1, VOCAB - 1))
            room -= new
        return requests, wholes


def expected(module, requests, wholes):
    """Return the model's output for the new tokens of each sequence, computed without a cache."""
    device = next(module.parameters()).device
    rows = []
    for request, tokens in zip(requests, wholes, strict=True):
        ids = torch.tensor(tokens, device=device)
        rows.append(module(ids, torch.arange(len(tokens), device=device))[-len(request.token_ids) :])
    return torch.cat(rows)
