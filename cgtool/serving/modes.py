"""Which CUDA graph mode a model gets: what was asked for, made to fit what its attention can do.

Source: the rows are vLLM's (`initialize_cudagraph_capture`), read in 0.33.0.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from cgtool.config_values import CUDAGraphMode
from cgtool.errors import UsageError

_log = logging.getLogger(__name__)


class AttentionCGSupport(IntEnum):
    """Which batches an attention backend can serve from a FULL graph. Cascade attention never can.

    Attributes:
        NEVER: None.
        UNIFORM_SINGLE_TOKEN_DECODE: Batches in which every sequence has one token.
        UNIFORM_BATCH: Batches in which every sequence has the same number of tokens, as in speculative decoding.
        ALWAYS: All, mixed prefills and decodes included.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True, kw_only=True)
class ResolvedMode:
    """The mode that a model gets.

    Attributes:
        mode: The mode.
        reasons: A sentence for each step away from what was asked for, in order.
    """

    mode: CUDAGraphMode
    reasons: tuple[str, ...] = ()


def resolve_cudagraph_mode(
    asked: CUDAGraphMode,
    supports: Sequence[AttentionCGSupport],
    *,
    has_pieces: bool,
    attention_is_split: bool,
    uniform_query_len: int = 1,
    can_capture: bool = True,
) -> ResolvedMode:
    """Return the mode nearest to `asked` that the model can be served in; each step down is logged with its reason.

    Args:
        asked: What the configuration asks for.
        supports: What each of the model's attention backends can do; the least of them rules.
        has_pieces: Whether the model was compiled in pieces.
        attention_is_split: Whether its pieces were cut at attention, so that graphs of pieces leave attention out.
        uniform_query_len: Tokens of a sequence in a decode step: 1, or 1 and the speculative tokens.
        can_capture: Whether the device has CUDA graphs.

    Raises:
        UsageError: FULL graphs of mixed batches were asked for by name, and an attention backend can never be captured.
    """
    steps = _Steps(asked)
    support = min(supports, default=AttentionCGSupport.ALWAYS)
    piecewise = CUDAGraphMode.PIECEWISE if has_pieces and attention_is_split else CUDAGraphMode.NONE

    if not can_capture and asked is not CUDAGraphMode.NONE:
        steps.to(CUDAGraphMode.NONE, "the device has no CUDA graphs")
    if has_pieces and not attention_is_split and steps.mode.has_piecewise_cudagraphs():
        # The one piece holds attention: its graph would be a FULL one.
        whole = {
            CUDAGraphMode.PIECEWISE: CUDAGraphMode.NONE,
            CUDAGraphMode.FULL_AND_PIECEWISE: CUDAGraphMode.FULL,
        }[steps.mode]
        steps.to(whole, "the graph is not split at attention (splitting_ops is empty)")
    if steps.mode.has_piecewise_cudagraphs() and not has_pieces:
        steps.to(steps.mode.without_piecewise(), "the model was not compiled in pieces")

    if steps.mode.mixed_mode() is CUDAGraphMode.FULL and support < AttentionCGSupport.ALWAYS:
        if support is AttentionCGSupport.NEVER and asked is CUDAGraphMode.FULL:
            msg = (
                "cudagraph_mode is FULL and an attention backend of the model can never be captured (NEVER): use "
                f"{piecewise.name}, or another attention backend."
            )
            raise UsageError(msg, path="cudagraph_mode", expected=piecewise.name, actual="FULL")
        lesser = (
            CUDAGraphMode.FULL_AND_PIECEWISE if piecewise is CUDAGraphMode.PIECEWISE else CUDAGraphMode.FULL_DECODE_ONLY
        )
        steps.to(lesser, f"attention can be captured for {_WORDS[support]}, not for mixed ones")
    if steps.mode.decode_mode() is CUDAGraphMode.FULL and support is AttentionCGSupport.NEVER:
        steps.to(piecewise, f"attention can be captured for {_WORDS[support]}")
    if (
        steps.mode.decode_mode() is CUDAGraphMode.FULL
        and uniform_query_len > 1
        and support < AttentionCGSupport.UNIFORM_BATCH
    ):
        steps.to(
            piecewise,
            f"attention can be captured for {_WORDS[support]}, and decode steps have {uniform_query_len} tokens each",
        )
    return ResolvedMode(mode=steps.mode, reasons=tuple(steps.reasons))


_WORDS = {
    AttentionCGSupport.NEVER: "no batches",
    AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE: "decode batches of one token a sequence",
    AttentionCGSupport.UNIFORM_BATCH: "uniform decode batches",
}


class _Steps:
    def __init__(self, mode: CUDAGraphMode) -> None:
        self.mode = mode
        self.reasons: list[str] = []

    def to(self, mode: CUDAGraphMode, why: str) -> None:
        reason = f"cudagraph_mode {self.mode.name} becomes {mode.name}: {why}."
        _log.warning("%s", reason)
        self.reasons.append(reason)
        self.mode = mode
