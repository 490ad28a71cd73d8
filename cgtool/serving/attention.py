"""Attention over a paged KV cache: what a batch tells it, and a plain implementation on SDPA.

A sequence's keys and values lie in blocks of `block_size` tokens; block 0 belongs to nobody, and pads write there. The
implementation here serves any device, and FULL graphs of uniform decode batches (`AttentionCGSupport.UNIFORM_BATCH`); a
server brings kernels of its own.

Legend of shapes: T tokens, R sequences, Q tokens of each sequence, H heads, K key-value heads, D head width, B blocks,
S tokens of a block, L cached tokens.
"""

# Shapes are suffixes (the legend above), and F is what everyone calls it.
# ruff: noqa: N803, N806, N812

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of one layer, each [B, S, K, D]."""

    keys: torch.Tensor
    values: torch.Tensor


def allocate_kv_caches(
    layer_names: Iterable[str],
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, KVCache]:
    """Return a KV cache of zeros for each layer; block 0 is for pads."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return {
        name: KVCache(
            keys=torch.zeros(shape, dtype=dtype, device=device), values=torch.zeros(shape, dtype=dtype, device=device)
        )
        for name in layer_names
    }


@dataclass(frozen=True, kw_only=True)
class PagedMetadata:
    """Where the tokens of a batch and of its sequences lie; tensors are padded as the batch is.

    Attributes:
        slots: Where each token's key and value go: [T], block * block_size + offset.
        block_tables: The blocks of each sequence in order, 0 after its last: [R, most blocks].
        seq_lens: Tokens of each sequence, those of this step included: [R].
        query_starts: Where the tokens of each sequence begin in the batch, and the end: [R + 1].
        uniform_query_len: Tokens of every sequence in this step; None where they differ.
        query_lens: Tokens of each sequence in this step, without pads, for attention that runs outside of graphs.
        cached_lens: As `seq_lens`, without pads, on the host.
    """

    slots: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    uniform_query_len: int | None
    query_lens: tuple[int, ...]
    cached_lens: tuple[int, ...]


def paged_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    output_THD: torch.Tensor,
    *,
    cache: KVCache,
    metadata: PagedMetadata,
) -> None:
    """Store keys and values of the batch, and write causal attention of its tokens into `output_THD`."""
    for new, stored in ((k_TKD, cache.keys), (v_TKD, cache.values)):
        stored.view(-1, *stored.shape[2:]).index_copy_(0, metadata.slots, new)
    query_len = metadata.uniform_query_len
    if query_len is not None:
        q_RQHD = q_THD.view(-1, query_len, *q_THD.shape[1:])
        attended = _attend(q_RQHD, cache, metadata.block_tables, metadata.seq_lens)
        output_THD.copy_(attended.reshape(output_THD.shape))
        return
    start, block_size = 0, cache.keys.shape[1]
    for row, (num_new, num_cached) in enumerate(zip(metadata.query_lens, metadata.cached_lens, strict=True)):
        end, num_blocks = start + num_new, -(-num_cached // block_size)
        tables, lens = metadata.block_tables[row : row + 1, :num_blocks], metadata.seq_lens[row : row + 1]
        output_THD[start:end] = _attend(q_THD[None, start:end], cache, tables, lens)[0]
        start = end


def _attend(q_RQHD: torch.Tensor, cache: KVCache, tables_RB: torch.Tensor, seq_lens_R: torch.Tensor) -> torch.Tensor:
    """Attend from the last Q tokens of each sequence to all of its tokens."""
    num_cached = tables_RB.shape[1] * cache.keys.shape[1]
    places_L = torch.arange(num_cached, device=q_RQHD.device)
    last_RQ = seq_lens_R[:, None] - q_RQHD.shape[1] + torch.arange(q_RQHD.shape[1], device=q_RQHD.device)
    seen_RQL = places_L <= last_RQ[:, :, None]
    # What lies behind a sequence's end is another's or nobody's: a NaN there would pass through a weight of zero.
    own_RL11 = (places_L < seq_lens_R[:, None])[:, :, None, None]
    k, v = (
        torch.where(own_RL11, stored[tables_RB].flatten(1, 2), 0).transpose(1, 2)
        for stored in (cache.keys, cache.values)
    )
    attended = F.scaled_dot_product_attention(
        q_RQHD.transpose(1, 2), k, v, attn_mask=seen_RQL.unsqueeze(1), enable_gqa=True
    )
    return attended.transpose(1, 2)
