"""The forward context: facts about the current batch that layers read without taking them as arguments.

A captured graph takes no new arguments, so attention reads its metadata and KV cache from the context, and wrappers
read the chosen CUDA graph mode. The context belongs to the thread and the asyncio task that set it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cgtool.config_values import CUDAGraphMode
from cgtool.errors import UsageError


class BatchDescriptor(NamedTuple):
    """The key of a CUDA graph: a padded batch.

    Attributes:
        num_tokens: The number of tokens, including pads.
        num_reqs: The number of sequences, including pads; None if the graph does not depend on it, as graphs of pieces.
        uniform: Whether every sequence has the same number of tokens: a decode batch, speculative or not.
        has_lora: Whether the graph applies LoRA adapters.
        num_active_loras: The number of adapters that the graph was captured for; 0 without LoRA.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


@dataclass(frozen=True, kw_only=True)
class Context:
    """The facts about a step that layers use most.

    Attributes:
        positions: The positions of the tokens in their sequences, including pads.
        is_prefill: Whether any sequence has more tokens than in a decode step.
        batch_size: The number of sequences, without pads.
        graph_bs: The number of sequences, with pads.
        is_draft: Whether a draft model runs.
    """

    positions: torch.Tensor
    is_prefill: bool = False
    batch_size: int = 0
    graph_bs: int = 0
    is_draft: bool = False


@dataclass(frozen=True)
class DPMetadata:
    """The number of tokens that each data-parallel rank runs in this step.

    Attributes:
        num_tokens_across_dp: The number of tokens of each rank, including pads, by rank.
    """

    num_tokens_across_dp: Sequence[int]

    def __post_init__(self) -> None:
        if not self.num_tokens_across_dp or min(self.num_tokens_across_dp) < 0:
            msg = "num_tokens_across_dp must have a token count of 0 or more for each data-parallel rank."
            raise UsageError(msg, actual=list(self.num_tokens_across_dp))

    @property
    def max_tokens_across_dp(self) -> int:
        """The largest count, to which every rank is padded if the ranks run collectives together."""
        return max(self.num_tokens_across_dp)

    @property
    def cu_tokens_across_dp(self) -> tuple[int, ...]:
        """Running sums: rank r's tokens end at entry r of the gathered batch."""
        sums, total = [], 0
        for num_tokens in self.num_tokens_across_dp:
            total += num_tokens
            sums.append(total)
        return tuple(sums)


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """The state of the current step for layers and wrappers. Empty between steps.

    Attributes:
        no_compile_layers: Layers that run as plain Python, by name.
        attn_metadata: Lengths, block tables and slots of the batch, for attention.
        kv_cache_data: The KV cache of each attention layer, by name.
        context: The facts that layers use most.
        dp_metadata: Token counts of the data-parallel ranks; None without data parallelism.
        spec_decode_metadata: Data that a speculative decoder passes to its layers.
        batch_descriptor: The key of this batch's graph.
        cudagraph_runtime_mode: The wrappers that replay: NONE, PIECEWISE or FULL.
        capturing: Whether a wrapper without a graph for this batch captures one.
    """

    no_compile_layers: Mapping[str, Any] = field(default_factory=dict)
    attn_metadata: Any = None
    kv_cache_data: Mapping[str, Any] = field(default_factory=dict)
    context: Context | None = None
    dp_metadata: DPMetadata | None = None
    spec_decode_metadata: Any = None
    batch_descriptor: BatchDescriptor | None = None
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    capturing: bool = False

    def __post_init__(self) -> None:
        if not self.cudagraph_runtime_mode.is_valid_runtime_mode():
            names = ", ".join(sorted(mode.name for mode in CUDAGraphMode.valid_runtime_modes()))
            msg = (
                f"A batch runs in one of the modes {names}. {self.cudagraph_runtime_mode.name} is not a mode of a "
                "single batch; dispatch the batch to get its mode."
            )
            raise UsageError(msg, actual=self.cudagraph_runtime_mode.name)


_EMPTY = ForwardContext()
_current: ContextVar[ForwardContext] = ContextVar("cgtool_forward_context", default=_EMPTY)


def get_forward_context() -> ForwardContext:
    """Return the context of the current step, or an empty context between steps."""
    return _current.get()


def set_forward_context(context: ForwardContext) -> _Previous:
    """Make `context` the current one, until `reset_forward_context` or the end of a `with` block.

    Returns:
        A context manager that restores the previous context on exit.
    """
    previous = _current.get()
    _current.set(context)
    return _Previous(previous)


def reset_forward_context() -> None:
    """Make an empty context the current one."""
    _current.set(_EMPTY)


class _Previous:
    """Restores a context at the end of a `with` block.

    It sets the value rather than resetting a token, because a token is invalid if a task or generator ends in another
    context.
    """

    def __init__(self, context: ForwardContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        """Do nothing: the new context is current already."""

    def __exit__(self, *_: object) -> None:
        _current.set(self._context)
