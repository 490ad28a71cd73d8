"""A batch as tensors: the inputs of a step and its attention metadata, in buffers with fixed addresses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from cgtool.errors import UsageError
from cgtool.serving.attention import PagedMetadata
from cgtool.serving.forward_context import BatchDescriptor


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence's part of a step.

    Attributes:
        token_ids: The new tokens: a prompt or part of one, or the last sampled token and any speculative tokens.
        num_computed: The number of the sequence's tokens that are already in the KV cache.
        blocks: The sequence's KV cache blocks in order, enough for all of its tokens; never block 0.
    """

    token_ids: Sequence[int]
    num_computed: int
    blocks: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the sequence, including this step's."""
        return self.num_computed + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The maximum size of batches.

    Attributes:
        max_num_seqs: Sequences per batch.
        max_num_tokens: Tokens per batch.
        max_seq_len: Tokens per sequence.
        block_size: Tokens per KV cache block.
        uniform_query_len: Tokens per sequence in a decode step: 1 plus the number of speculative tokens.
    """

    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    block_size: int = 16
    uniform_query_len: int = 1

    @property
    def max_blocks(self) -> int:
        """The maximum number of blocks per sequence."""
        return -(-self.max_seq_len // self.block_size)


#: The alignment of a buffer's parts, in integers: kernels are compiled for aligned addresses.
_ALIGNMENT = 32


class InputBuffers:
    """The device buffers of a step, all parts of one allocation, so that a step needs a single copy."""

    def __init__(
        self, limits: BatchLimits, max_padded_tokens: int, device: torch.device, pad_token_id: int = 0
    ) -> None:
        self._limits = limits
        self._pad = pad_token_id
        num_tokens, num_seqs = max(limits.max_num_tokens, max_padded_tokens), limits.max_num_seqs
        needed = [num_tokens, num_tokens, num_tokens, num_seqs, num_seqs + 1, num_seqs * limits.max_blocks]
        sizes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in needed]
        self._begins = tuple(accumulate(sizes, initial=0))
        # Writing integers one by one is many times faster in Python's array than in a tensor.
        self._ints = array("q", bytes(8 * sum(sizes)))
        self._host = torch.frombuffer(self._ints, dtype=torch.int64)
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._views = torch.split(self._device, sizes)

    def fill(
        self, requests: Sequence[Request], descriptor: BatchDescriptor
    ) -> tuple[torch.Tensor, torch.Tensor, PagedMetadata]:
        """Return the input ids, positions and metadata of a batch, padded to `descriptor`.

        In a uniform batch, pads form additional sequences, whose tokens are in block 0. In other batches, pads do not
        belong to a sequence.

        Args:
            requests: The batch.
            descriptor: The size to pad to, in tokens and, if it matters, in sequences; and whether attention may rely
                on `uniform_query_len` tokens per sequence, including pads.
        """
        uniform = descriptor.uniform
        limits, query_len, size = self._limits, self._limits.uniform_query_len, self._limits.block_size
        ids, positions, slots, seq_lens = list[int](), list[int](), list[int](), list[int]()
        starts, tables = [0], array("q")
        for request in requests:
            self._check(request)
            places, blocks = range(request.num_computed, request.num_tokens), request.blocks
            ids += request.token_ids
            positions += places
            slots += [blocks[place // size] * size + place % size for place in places]
            seq_lens.append(request.num_tokens)
            starts.append(len(ids))
            tables.extend(blocks)
            tables.extend([0] * (limits.max_blocks - len(blocks)))
        num_tokens = descriptor.num_tokens
        num_seqs = descriptor.num_reqs or (num_tokens // query_len if uniform else len(requests))
        pad_tokens, pad_seqs = num_tokens - len(ids), num_seqs - len(requests)
        starts += [len(ids) + (query_len * (row + 1) if uniform else 0) for row in range(pad_seqs)]
        ids += [self._pad] * pad_tokens
        positions += [0] * pad_tokens
        slots += [0] * pad_tokens
        seq_lens += [query_len if uniform else 0] * pad_seqs
        tables.extend([0] * (pad_seqs * limits.max_blocks))
        for begin, values in zip(self._begins, (ids, positions, slots, seq_lens, starts, tables), strict=False):
            self._ints[begin : begin + len(values)] = array("q", values)
        used = self._begins[-2] + len(tables)
        self._device[:used].copy_(self._host[:used])
        ids_, positions_, slots_, seq_lens_, starts_, tables_ = self._views
        metadata = PagedMetadata(
            slots=slots_[:num_tokens],
            block_tables=tables_[: num_seqs * limits.max_blocks].view(-1, limits.max_blocks),
            seq_lens=seq_lens_[:num_seqs],
            query_starts=starts_[: num_seqs + 1],
            uniform_query_len=query_len if uniform else None,
            query_lens=tuple(len(request.token_ids) for request in requests),
            cached_lens=tuple(request.num_tokens for request in requests),
        )
        return ids_[:num_tokens], positions_[:num_tokens], metadata

    def _check(self, request: Request) -> None:
        limits = self._limits
        enough = request.num_tokens <= len(request.blocks) * limits.block_size
        fits = request.num_tokens <= limits.max_seq_len and len(request.blocks) <= limits.max_blocks
        if not request.token_ids or not fits or not enough:
            msg = (
                f"A request with {len(request.token_ids)} new and {request.num_computed} cached tokens in blocks "
                f"{list(request.blocks)} cannot run: it must have at least one new token, at most "
                f"{limits.max_seq_len} tokens in total, and enough blocks of {limits.block_size} tokens."
            )
            raise UsageError(msg, actual=request)
