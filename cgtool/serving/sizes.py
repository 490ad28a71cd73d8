"""Capture sizes, by the rules of vLLM and TensorRT-LLM, and the padded size of a batch.

`cgtool.config` resolves `cuda_graph_sizes` and `cudagraph_capture_sizes`; this module applies the limits of a
deployment. Must not import torch.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

from cgtool.errors import UsageError

_log = logging.getLogger(__name__)

#: vLLM's default for the largest captured size.
_MAX_TOKENS: Final = 512

#: TensorRT-LLM's default of `capture_num_tokens`.
DEFAULT_CAPTURE_NUM_TOKENS: Final = (*(2**i for i in range(8)), *range(256, 3073, 256))


def vllm_capture_sizes(max_num_seqs: int, *, uniform_query_len: int = 1) -> tuple[int, ...]:
    """Return the token counts that vLLM captures by default: 1, 2, 4, 8 to 256 by 8, then by 16.

    Args:
        max_num_seqs: The maximum number of sequences per batch.
        uniform_query_len: Tokens per sequence in a decode step.

    Source: vLLM 0.33.0; 35 sizes up to 256.
    """
    largest = min(2 * max_num_seqs * uniform_query_len, _MAX_TOKENS)
    return tuple(size for size in (1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16)) if size <= largest)


def context_capture_sizes(
    capture_num_tokens: Iterable[int] | None = None, *, max_batch_size: int, max_seq_len: int
) -> tuple[int, ...]:
    """Return the token counts to capture for batches with prefills, in ascending order.

    A batch has at most `max_batch_size * (max_seq_len - 1)` tokens. Larger counts are replaced by that limit, so that
    all batches up to the limit have a graph.

    Args:
        capture_num_tokens: The requested counts; None means TensorRT-LLM's default.
        max_batch_size: The maximum number of sequences per batch.
        max_seq_len: The maximum number of tokens per sequence, including the token that is generated last.

    Source: TensorRT-LLM's `capture_num_tokens` and its filter.
    """
    requested = sorted(set(DEFAULT_CAPTURE_NUM_TOKENS if capture_num_tokens is None else capture_num_tokens))
    limit = max_batch_size * (max_seq_len - 1)
    kept = tuple(size for size in requested if 0 < size <= limit)
    dropped = [size for size in requested if size > limit]
    if not dropped or limit <= 0:
        return kept
    _log.warning("Token counts above %s cannot occur and are not captured: %s.", limit, dropped)
    return kept if limit in kept else (*kept, limit)


def fit_sizes(
    sizes: Iterable[int],
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    uniform_query_len: int = 1,
    strict: bool = False,
) -> tuple[int, ...]:
    """Return the batch sizes that a deployment can run, in ascending order. Others are dropped with a warning.

    Raises:
        UsageError: A size is too large and `strict` is set, or no size is left.
    """
    limit = min(max_num_seqs, max_num_tokens // uniform_query_len)
    requested = sorted(set(sizes))
    kept = tuple(size for size in requested if size <= limit)
    if len(kept) < len(requested):
        too_large = requested[len(kept) :]
        msg = (
            f"CUDA graphs for {too_large} sequences are never used: a batch has at most {limit} sequences "
            f"(max_num_seqs {max_num_seqs}, max_num_tokens {max_num_tokens}, {uniform_query_len} tokens per sequence)."
        )
        if strict or not kept:
            advice = f"{msg} Use smaller sizes, or raise the limits."
            raise UsageError(advice, path="cudagraph_capture_sizes", expected=limit, actual=too_large)
        _log.warning("%s These sizes are dropped.", msg)
    return kept


def padded_size(num_tokens: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `sizes` that fits `num_tokens`; None if none does or `num_tokens` is 0."""
    index = bisect_left(sizes, num_tokens)
    return sizes[index] if num_tokens > 0 and index < len(sizes) else None


def check_compile_sizes(compile_sizes: Iterable[int], capture_sizes: Sequence[int]) -> None:
    """Check that no compile size is unreachable because its batches are padded to a captured size.

    Raises:
        UsageError: Padding changes a compile size.
    """
    for size in compile_sizes:
        padded = padded_size(size, capture_sizes)
        if padded not in {None, size}:
            msg = (
                f"compile_sizes has {size}, but a batch of {size} tokens is padded to the captured size {padded}. "
                f"Add {size} to cudagraph_capture_sizes, or compile for {padded}."
            )
            raise UsageError(msg, path="compile_sizes", expected=padded, actual=size)
