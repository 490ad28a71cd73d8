"""Which sizes are captured, by the rules of the three systems whose users come here, and what a batch is padded to.

The lists of `cuda_graph_sizes` and `cudagraph_capture_sizes` are resolved in `cgtool.config`; here they meet the limits
of a deployment. Must not import torch.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

from cgtool.errors import UsageError

_log = logging.getLogger(__name__)

#: What vLLM captures up to at most where nobody says how far.
_MOST_TOKENS: Final = 512

#: TensorRT-LLM's default of `capture_num_tokens`.
DEFAULT_CAPTURE_NUM_TOKENS: Final = (*(2**i for i in range(8)), *range(256, 3073, 256))


def vllm_capture_sizes(max_num_seqs: int, *, uniform_query_len: int = 1) -> tuple[int, ...]:
    """Return the token counts that vLLM captures by default: 1, 2, 4, 8 to 256 by 8, then by 16.

    Args:
        max_num_seqs: Most sequences in a batch.
        uniform_query_len: Tokens of a sequence in a decode step.

    Source: vLLM 0.33.0; 35 sizes up to 256.
    """
    largest = min(2 * max_num_seqs * uniform_query_len, _MOST_TOKENS)
    return tuple(size for size in (1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16)) if size <= largest)


def context_capture_sizes(
    capture_num_tokens: Iterable[int] | None = None, *, max_batch_size: int, max_seq_len: int
) -> tuple[int, ...]:
    """Return the token counts to capture for batches that hold prefills, in rising order.

    A batch has at most `max_batch_size * (max_seq_len - 1)` tokens. What is larger is left out, and that ceiling is
    taken in its place, so that batches between it and the last size kept have a graph.

    Args:
        capture_num_tokens: The counts wanted; None takes TensorRT-LLM's default.
        max_batch_size: Most sequences in a batch.
        max_seq_len: Most tokens of a sequence, the one that is generated last included.

    Source: TensorRT-LLM's `capture_num_tokens` and its filter.
    """
    wanted = sorted(set(DEFAULT_CAPTURE_NUM_TOKENS if capture_num_tokens is None else capture_num_tokens))
    ceiling = max_batch_size * (max_seq_len - 1)
    kept = tuple(size for size in wanted if 0 < size <= ceiling)
    dropped = [size for size in wanted if size > ceiling]
    if not dropped or ceiling <= 0:
        return kept
    _log.warning("Token counts above %s cannot occur and are not captured: %s.", ceiling, dropped)
    return kept if ceiling in kept else (*kept, ceiling)


def fit_sizes(
    sizes: Iterable[int],
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    uniform_query_len: int = 1,
    strict: bool = False,
) -> tuple[int, ...]:
    """Return the batch sizes that a deployment can run, in rising order; others are dropped with a warning, or refused.

    Raises:
        UsageError: `strict`, and some size is too large; or none is left.
    """
    limit = min(max_num_seqs, max_num_tokens // uniform_query_len)
    wanted = sorted(set(sizes))
    kept = tuple(size for size in wanted if size <= limit)
    if len(kept) < len(wanted):
        too_large = wanted[len(kept) :]
        msg = (
            f"CUDA graphs of {too_large} sequences cannot be needed: a batch has at most {limit} "
            f"(max_num_seqs {max_num_seqs}, max_num_tokens {max_num_tokens}, {uniform_query_len} tokens a sequence)."
        )
        if strict or not kept:
            advice = f"{msg} Name smaller sizes, or raise the limits."
            raise UsageError(advice, path="cudagraph_capture_sizes", expected=limit, actual=too_large)
        _log.warning("%s They are dropped.", msg)
    return kept


def padded_size(num_tokens: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of the rising `sizes` that holds `num_tokens`; None where none does or nothing is held."""
    index = bisect_left(sizes, num_tokens)
    return sizes[index] if num_tokens > 0 and index < len(sizes) else None


def check_compile_sizes(compile_sizes: Iterable[int], capture_sizes: Sequence[int]) -> None:
    """Refuse sizes that were compiled for and that no batch has, because each is padded to a captured one.

    Raises:
        UsageError: Padding changes a compile size.
    """
    for size in compile_sizes:
        padded = padded_size(size, capture_sizes)
        if padded not in {None, size}:
            msg = (
                f"compile_sizes names {size}, and a batch of {size} tokens is padded to the captured size {padded}: "
                f"add {size} to cudagraph_capture_sizes, or compile for {padded}."
            )
            raise UsageError(msg, path="compile_sizes", expected=padded, actual=size)
