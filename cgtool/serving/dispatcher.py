"""Choose the CUDA graph and the padded size of a batch.

All decisions are made when the dispatcher is built, so a step only looks one up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from cgtool.config_values import CUDAGraphMode
from cgtool.errors import UsageError
from cgtool.serving.forward_context import BatchDescriptor
from cgtool.serving.sizes import padded_size

_NONE, _PIECEWISE, _FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL

Decision = tuple[CUDAGraphMode, BatchDescriptor]


class CudagraphDispatcher:
    """The keys of all CUDA graphs, and the decision for each batch: FULL before PIECEWISE before NONE.

    Args:
        mode: The CUDA graph mode.
        sizes: The captured token counts.
        max_num_seqs: The maximum number of sequences per batch.
        uniform_query_len: Tokens per sequence in a decode step: 1 plus the number of speculative tokens.
        decode_sizes: Token counts of the FULL graphs for uniform decode batches; None means `sizes`. Used only if
            `mode` treats these batches differently. Counts that no batch of whole sequences can have are dropped.
        lora_counts: The numbers of active adapters for which graphs are captured; (0,) means without LoRA. A batch uses
            the next larger count.
        enable_padding: Whether a batch is padded to the next captured size; otherwise only exact sizes have a graph.

    Raises:
        UsageError: A size, a length or a count is out of range.
    """

    def __init__(
        self,
        mode: CUDAGraphMode,
        sizes: Iterable[int],
        *,
        max_num_seqs: int,
        uniform_query_len: int = 1,
        decode_sizes: Iterable[int] | None = None,
        lora_counts: Iterable[int] = (0,),
        enable_padding: bool = True,
    ) -> None:
        self.mode = mode
        self.sizes = tuple(sorted(set(sizes)))
        self._loras = tuple(sorted(set(lora_counts)))
        if min((*self.sizes, uniform_query_len, max_num_seqs)) < 1 or min(self._loras, default=-1) < 0:
            msg = "Sizes, uniform_query_len and max_num_seqs must be 1 or more, and lora_counts 0 or more."
            raise UsageError(msg, actual=(self.sizes, uniform_query_len, max_num_seqs, self._loras))
        self._query_len = uniform_query_len
        self._max_num_seqs = max_num_seqs
        self._enable_padding = enable_padding
        requested = self.sizes if decode_sizes is None else sorted(set(decode_sizes))
        largest = uniform_query_len * max_num_seqs
        self.decode_sizes = tuple(
            size for size in requested if uniform_query_len <= size <= largest and size % uniform_query_len == 0
        )
        #: False while no graphs exist; all batches then run under NONE.
        self.enabled = True
        #: (uniform, whether FULL is allowed) → for each LoRA count, the decision for each count of tokens
        self._tables = {
            (uniform, full): [self._table(num_loras, uniform=uniform, full=full) for num_loras in self._loras]
            for uniform in (False, True)
            for full in (False, True)
        }

    def dispatch(
        self, num_tokens: int, *, uniform: bool = False, num_active_loras: int = 0, most: CUDAGraphMode = _FULL
    ) -> Decision:
        """Return the runtime mode of a batch and the padded key of its graph. Under NONE, the batch is not padded.

        Args:
            num_tokens: The number of tokens in the batch.
            uniform: Whether each sequence has `uniform_query_len` tokens.
            num_active_loras: The number of adapters that the sequences use.
            most: The highest mode allowed: PIECEWISE with cascade attention, or the mode that all ranks agreed on.
        """
        if self.enabled and most is not _NONE:
            lora = bisect_left(self._loras, num_active_loras) if num_active_loras else 0
            if lora < len(self._loras):
                table = self._tables[uniform, most is _FULL][lora]
                if num_tokens < len(table):
                    return table[num_tokens]
        return _NONE, BatchDescriptor(num_tokens)

    def keys(self) -> Iterator[Decision]:
        """Yield the mode and descriptor of every graph in the order of capture: PIECEWISE, then FULL, largest first."""
        if self.mode.has_piecewise_cudagraphs():
            yield from self._graphs(_PIECEWISE, self.sizes)
        if self.mode.mixed_mode() is _FULL:
            yield from self._graphs(_FULL, self.sizes)
        elif self.mode.decode_mode() is _FULL:
            yield from self._graphs(_FULL, self.decode_sizes, uniform=True)

    def _graphs(self, mode: CUDAGraphMode, sizes: tuple[int, ...], *, uniform: bool = False) -> Iterator[Decision]:
        for size in reversed(sizes):
            for num_loras in self._loras:
                yield self._graph(mode, size, num_loras, uniform=uniform)

    def _graph(self, mode: CUDAGraphMode, num_tokens: int, num_loras: int, *, uniform: bool = False) -> Decision:
        """Return the decision for one graph. Graphs of pieces do not depend on the number of sequences."""
        num_reqs = min(num_tokens // (self._query_len if uniform else 1), self._max_num_seqs)
        reqs = num_reqs if mode is _FULL else None
        return mode, BatchDescriptor(num_tokens, reqs, uniform, num_loras > 0, num_loras)

    def _table(self, num_loras: int, *, uniform: bool, full: bool) -> list[Decision]:
        largest = max((*self.sizes, *self.decode_sizes), default=0)
        return [self._decide(num_tokens, num_loras, uniform=uniform, full=full) for num_tokens in range(largest + 1)]

    def _decide(self, num_tokens: int, num_loras: int, *, uniform: bool, full: bool) -> Decision:
        separate = self.mode.separate_routine()  # otherwise decode batches use the graphs of mixed batches
        if full and (self.mode.decode_mode() if uniform else self.mode.mixed_mode()) is _FULL:
            size = self._padded(num_tokens, self.decode_sizes if separate else self.sizes)
            if size is not None:
                return self._graph(_FULL, size, num_loras, uniform=separate)
        if self.mode.has_piecewise_cudagraphs():
            size = self._padded(num_tokens, self.sizes)
            if size is not None:
                return self._graph(_PIECEWISE, size, num_loras)
        return _NONE, BatchDescriptor(num_tokens)

    def _padded(self, num_tokens: int, sizes: tuple[int, ...]) -> int | None:
        size = padded_size(num_tokens, sizes)
        return size if self._enable_padding or size == num_tokens else None
