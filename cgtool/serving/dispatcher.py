"""Which CUDA graph serves a batch: the one place that knows which graphs there are and what a batch is padded to.

All decisions are made when the dispatcher is built; a step looks one up.
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
        mode: What is captured.
        sizes: Token counts that are captured.
        max_num_seqs: Most sequences in a batch.
        uniform_query_len: Tokens of a sequence in a decode step: 1, or 1 and the speculative tokens.
        decode_sizes: Token counts of the FULL graphs that serve uniform decode batches alone; None takes `sizes`. Used
            where `mode` treats these batches differently, and only counts of whole sequences that a batch can have.
        lora_counts: For how many active adapters graphs are captured; (0,) means without LoRA. A batch takes the next
            count.
        enable_padding: Whether a batch is padded to the next captured size; else only exact sizes have a graph.

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
            msg = "Sizes, uniform_query_len and max_num_seqs are 1 or more, and lora_counts holds counts of 0 or more."
            raise UsageError(msg, actual=(self.sizes, uniform_query_len, max_num_seqs, self._loras))
        self._query_len = uniform_query_len
        self._max_num_seqs = max_num_seqs
        self._enable_padding = enable_padding
        wanted = self.sizes if decode_sizes is None else sorted(set(decode_sizes))
        most = uniform_query_len * max_num_seqs
        self.decode_sizes = tuple(
            size for size in wanted if uniform_query_len <= size <= most and size % uniform_query_len == 0
        )
        #: False while there are no graphs: everything runs under NONE then.
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
        """Return the runtime mode of a batch and the key of its graph, padded; under NONE nothing is padded.

        Args:
            num_tokens: Tokens of the batch.
            uniform: Whether each of its sequences has `uniform_query_len` tokens.
            num_active_loras: How many adapters its sequences use.
            most: The highest mode that can serve it: PIECEWISE with cascade attention, or what other ranks agree on.
        """
        if self.enabled and most is not _NONE:
            lora = bisect_left(self._loras, num_active_loras) if num_active_loras else 0
            if lora < len(self._loras):
                table = self._tables[uniform, most is _FULL][lora]
                if num_tokens < len(table):
                    return table[num_tokens]
        return _NONE, BatchDescriptor(num_tokens)

    def keys(self) -> Iterator[Decision]:
        """Yield the mode and the descriptor of every graph, in the order of capture: PIECEWISE, FULL, largest first."""
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
        """Return the decision for one graph; those of pieces do not depend on how many sequences there are."""
        num_reqs = min(num_tokens // (self._query_len if uniform else 1), self._max_num_seqs)
        reqs = num_reqs if mode is _FULL else None
        return mode, BatchDescriptor(num_tokens, reqs, uniform, num_loras > 0, num_loras)

    def _table(self, num_loras: int, *, uniform: bool, full: bool) -> list[Decision]:
        largest = max((*self.sizes, *self.decode_sizes), default=0)
        return [self._decide(num_tokens, num_loras, uniform=uniform, full=full) for num_tokens in range(largest + 1)]

    def _decide(self, num_tokens: int, num_loras: int, *, uniform: bool, full: bool) -> Decision:
        apart = self.mode.separate_routine()  # else decode batches run from the graphs of mixed ones
        if full and (self.mode.decode_mode() if uniform else self.mode.mixed_mode()) is _FULL:
            size = self._padded(num_tokens, self.decode_sizes if apart else self.sizes)
            if size is not None:
                return self._graph(_FULL, size, num_loras, uniform=apart)
        if self.mode.has_piecewise_cudagraphs():
            size = self._padded(num_tokens, self.sizes)
            if size is not None:
                return self._graph(_PIECEWISE, size, num_loras)
        return _NONE, BatchDescriptor(num_tokens)

    def _padded(self, num_tokens: int, sizes: tuple[int, ...]) -> int | None:
        size = padded_size(num_tokens, sizes)
        return size if self._enable_padding or size == num_tokens else None
