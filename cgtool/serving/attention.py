"""Attention over a paged KV cache: the metadata of a batch, and a reference implementation on SDPA.

The keys and values of a sequence are stored in blocks of `block_size` tokens. Block 0 is reserved for pads. The
implementation works on any device, and in FULL graphs of uniform decode batches (`AttentionCGSupport.UNIFORM_BATCH`).
Production servers use their own kernels.

Legend of shapes: T tokens, R sequences, Q tokens per sequence, H heads, K key-value heads, D head width, B blocks, S
tokens per block, L cached tokens.
"""

# Names end in shapes (see the legend above), and F is the usual alias.
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
    """Return a zeroed KV cache for each layer; block 0 is reserved for pads."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return {
        name: KVCache(
            keys=torch.zeros(shape, dtype=dtype, device=device), values=torch.zeros(shape, dtype=dtype, device=device)
        )
        for name in layer_names
    }


@dataclass(frozen=True, kw_only=True)
class PagedMetadata:
    """The positions of a batch's tokens in the batch and in the KV cache. Tensors are padded like the batch.

    Attributes:
        slots: The slot of each token's key and value: [T], block * block_size + offset.
        block_tables: The blocks of each sequence in order, 0 after the last: [R, maximum number of blocks].
        seq_lens: The number of tokens in each sequence, including this step's: [R].
        query_starts: The index of each sequence's first token in the batch, and the total: [R + 1].
        uniform_query_len: The number of tokens that every sequence has in this step; None if they differ.
        query_lens: The number of tokens of each sequence in this step, without pads, for attention that runs outside
            graphs.
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
    """Store the keys and values of the batch, and write its causal attention to `output_THD`."""
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
    """Return attention from the last Q tokens of each sequence to all tokens of the sequence."""
    num_cached = tables_RB.shape[1] * cache.keys.shape[1]
    places_L = torch.arange(num_cached, device=q_RQHD.device)
    last_RQ = seq_lens_R[:, None] - q_RQHD.shape[1] + torch.arange(q_RQHD.shape[1], device=q_RQHD.device)
    seen_RQL = places_L <= last_RQ[:, :, None]
    # Zero the slots past a sequence's end, which may belong to another: even with weight 0, a NaN would propagate.
    own_RL11 = (places_L < seq_lens_R[:, None])[:, :, None, None]
    k, v = (
        torch.where(own_RL11, stored[tables_RB].flatten(1, 2), 0).transpose(1, 2)
        for stored in (cache.keys, cache.values)
    )
    attended = F.scaled_dot_product_attention(
        q_RQHD.transpose(1, 2), k, v, attn_mask=seen_RQL.unsqueeze(1), enable_gqa=True
    )
    return attended.transpose(1, 2)
