"""Resolve the CUDA graph mode of a model: the requested mode, lowered to what its attention backends support.

Source: the rules of vLLM 0.33.0 (`initialize_cudagraph_capture`).
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
    """The batches that an attention backend can serve from a FULL graph. Cascade attention never can.

    Attributes:
        NEVER: No batches.
        UNIFORM_SINGLE_TOKEN_DECODE: Batches in which every sequence has one token.
        UNIFORM_BATCH: Batches in which every sequence has the same number of tokens, as in speculative decoding.
        ALWAYS: All batches, including mixed prefills and decodes.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True, kw_only=True)
class ResolvedMode:
    """The resolved mode of a model.

    Attributes:
        mode: The mode.
        reasons: A sentence for each step away from the requested mode, in order.
    """

    mode: CUDAGraphMode
    reasons: tuple[str, ...] = ()


def resolve_cudagraph_mode(
    requested: CUDAGraphMode,
    supports: Sequence[AttentionCGSupport],
    *,
    has_pieces: bool,
    attention_is_split: bool,
    uniform_query_len: int = 1,
    can_capture: bool = True,
) -> ResolvedMode:
    """Return the nearest supported mode to the requested one. Each step down is logged with its reason.

    Args:
        requested: The mode in the configuration.
        supports: The support of each of the model's attention backends; the lowest applies.
        has_pieces: Whether the model was compiled in pieces.
        attention_is_split: Whether the pieces were split at attention, so that their graphs exclude attention.
        uniform_query_len: Tokens per sequence in a decode step: 1 plus the number of speculative tokens.
        can_capture: Whether the device supports CUDA graphs.

    Raises:
        UsageError: FULL was requested, and an attention backend can never be captured.
    """
    steps = _Steps(requested)
    support = min(supports, default=AttentionCGSupport.ALWAYS)
    piecewise = CUDAGraphMode.PIECEWISE if has_pieces and attention_is_split else CUDAGraphMode.NONE

    if not can_capture and requested is not CUDAGraphMode.NONE:
        steps.lower(CUDAGraphMode.NONE, "the device does not support CUDA graphs")
    if has_pieces and not attention_is_split and steps.mode.has_piecewise_cudagraphs():
        # The only piece contains attention, so its graph would be a FULL graph.
        whole = {
            CUDAGraphMode.PIECEWISE: CUDAGraphMode.NONE,
            CUDAGraphMode.FULL_AND_PIECEWISE: CUDAGraphMode.FULL,
        }[steps.mode]
        steps.lower(whole, "the graph is not split at attention (splitting_ops is empty)")
    if steps.mode.has_piecewise_cudagraphs() and not has_pieces:
        steps.lower(steps.mode.without_piecewise(), "the model was not compiled in pieces")

    if steps.mode.mixed_mode() is CUDAGraphMode.FULL and support < AttentionCGSupport.ALWAYS:
        if support is AttentionCGSupport.NEVER and requested is CUDAGraphMode.FULL:
            msg = (
                "cudagraph_mode is FULL, but an attention backend of the model can never be captured (NEVER). Use "
                f"{piecewise.name}, or another attention backend."
            )
            raise UsageError(msg, path="cudagraph_mode", expected=piecewise.name, actual="FULL")
        lower = (
            CUDAGraphMode.FULL_AND_PIECEWISE if piecewise is CUDAGraphMode.PIECEWISE else CUDAGraphMode.FULL_DECODE_ONLY
        )
        steps.lower(lower, f"attention can be captured for {_BATCHES[support]}, but not for mixed batches")
    if steps.mode.decode_mode() is CUDAGraphMode.FULL and support is AttentionCGSupport.NEVER:
        steps.lower(piecewise, f"attention can be captured for {_BATCHES[support]}")
    if (
        steps.mode.decode_mode() is CUDAGraphMode.FULL
        and uniform_query_len > 1
        and support < AttentionCGSupport.UNIFORM_BATCH
    ):
        steps.lower(
            piecewise,
            f"attention can be captured for {_BATCHES[support]}, but decode steps have {uniform_query_len} tokens per "
            "sequence",
        )
    return ResolvedMode(mode=steps.mode, reasons=tuple(steps.reasons))


_BATCHES = {
    AttentionCGSupport.NEVER: "no batches",
    AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE: "decode batches with one token per sequence",
    AttentionCGSupport.UNIFORM_BATCH: "uniform decode batches",
}


class _Steps:
    def __init__(self, mode: CUDAGraphMode) -> None:
        self.mode = mode
        self.reasons: list[str] = []

    def lower(self, mode: CUDAGraphMode, cause: str) -> None:
        reason = f"cudagraph_mode {self.mode.name} becomes {mode.name}: {cause}."
        _log.warning("%s", reason)
        self.reasons.append(reason)
        self.mode = mode
