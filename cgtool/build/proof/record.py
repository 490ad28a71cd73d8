"""What a proof found. Must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ProofRecord:
    """What was tried, and how near the artifact came.

    Args:
        shapes: The sizes of the graph's symbols, once for each run.
        worst_error: The largest relative error of a tensor against the same piece in float64, as a root of mean
            squares; 0 where nothing is a float.
        secs: How long it took, in seconds.
        reason: Why nothing was proved, as a sentence; None where the artifact was proved.
        may_pass_later: Whether that lies in this moment or process and not in the piece: too little memory, a module
            that could not be imported, a fault of the proof itself.
    """

    shapes: tuple[Mapping[str, int], ...]
    worst_error: float
    secs: float
    reason: str | None = None
    may_pass_later: bool = False

    @property
    def proved(self) -> bool:
        """Whether the artifact ran and gave what it should."""
        return self.reason is None

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {
            "shapes": [dict(sizes) for sizes in self.shapes],
            "worst_error": self.worst_error,
            "secs": round(self.secs, 4),
            "reason": self.reason,
            "may_pass_later": self.may_pass_later,
        }

    @classmethod
    def from_json(cls, data: Any) -> ProofRecord:
        """Return the ProofRecord of `data`, as `to_json` wrote it."""
        return cls(
            shapes=tuple(dict(sizes) for sizes in data["shapes"]),
            worst_error=float(data["worst_error"]),
            secs=float(data["secs"]),
            reason=data["reason"],
            may_pass_later=bool(data["may_pass_later"]),
        )
