"""CUDA graph modes: what is captured, for which batches. Imports nothing but the standard library, never torch."""

from __future__ import annotations

from enum import Enum


class CUDAGraphMode(Enum):
    """What is captured as CUDA graphs.

    A single mode holds for every batch. A pair is (decode batches, mixed prefill and decode batches); its halves are
    values of single modes. At run time a batch is served under NONE, PIECEWISE or FULL: the valid runtime modes.

    Attributes:
        NONE: Nothing is captured.
        PIECEWISE: Each compiled piece is captured; splitting pieces run between the graphs.
        FULL: The whole model is captured.
        FULL_DECODE_ONLY: FULL for decode batches, NONE for mixed ones.
        FULL_AND_PIECEWISE: FULL for decode batches, PIECEWISE for mixed ones.

    Source: the names, values and helpers are those of ATOM and vLLM, so that their users find what they know.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def separate_routine(self) -> bool:
        """Return whether decode batches and mixed batches are treated differently."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> CUDAGraphMode:
        """Return the single mode for decode batches."""
        return CUDAGraphMode(self._halves()[0])

    def mixed_mode(self) -> CUDAGraphMode:
        """Return the single mode for batches that hold prefills."""
        return CUDAGraphMode(self._halves()[1])

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Return whether decode or mixed batches run under `mode`.

        Args:
            mode: A single mode.

        Raises:
            ValueError: `mode` is a pair.
        """
        if mode.separate_routine():
            names = ", ".join(sorted(m.name for m in self.valid_runtime_modes()))
            message = f"{mode.name} is a pair of modes; ask for one of {names}."
            raise ValueError(message)
        return mode.value in self._halves()

    def requires_piecewise_compilation(self) -> bool:
        """Return whether the graph must be split and compiled in pieces for this mode."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def has_piecewise_cudagraphs(self) -> bool:
        """Return whether any batch is served from graphs of pieces."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def has_full_cudagraphs(self) -> bool:
        """Return whether any batch is served from a graph of the whole model."""
        return self.has_mode(CUDAGraphMode.FULL)

    def max_cudagraph_mode(self) -> CUDAGraphMode:
        """Return the single mode of the highest value over decode and mixed batches."""
        return CUDAGraphMode(max(self._halves()))

    def without_piecewise(self) -> CUDAGraphMode:
        """Return this mode with NONE in place of PIECEWISE: what is left where there are no pieces."""
        if self is CUDAGraphMode.PIECEWISE:
            return CUDAGraphMode.NONE
        return CUDAGraphMode.FULL_DECODE_ONLY if self is CUDAGraphMode.FULL_AND_PIECEWISE else self

    def is_valid_runtime_mode(self) -> bool:
        """Return whether a batch can be served under this mode."""
        return not self.separate_routine()

    @classmethod
    def valid_runtime_modes(cls) -> frozenset[CUDAGraphMode]:
        """Return the single modes, under which a batch can be served."""
        return frozenset({cls.NONE, cls.PIECEWISE, cls.FULL})

    def _halves(self) -> tuple[int, int]:
        return self.value if isinstance(self.value, tuple) else (self.value, self.value)


def default_capture_sizes(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, then every multiple of 16, none above `limit`.

    Args:
        limit: The largest size, in sequences.

    Source: ATOM's pattern, which does not end at `limit` itself where that is no multiple of 16.
    """
    return tuple(size for size in (1, 2, 4, 8, *range(16, limit + 1, 16)) if size <= limit)
