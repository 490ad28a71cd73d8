"""Which pieces of an entry another adaptor serves than the configured one, as the manifest says it. No torch here."""

from __future__ import annotations

from cgtool.cache.checks import count, text, word
from cgtool.cache.shapes import Shape, shape_from_json, shape_text, shape_to_json
from cgtool.pieces import Json
from cgtool.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A piece that another adaptor serves than the one that the configuration names.

    Args:
        variant: Which of the manifest's variants.
        piece_index: Which piece.
        shape: For which sizes.
        adaptor: What serves it: its row names that adaptor.
        reason: Why, as a sentence.
    """

    variant: int
    piece_index: int
    shape: Shape
    adaptor: str
    reason: str

    @property
    def place(self) -> tuple[int, int, str]:
        """What there is one fallback of: (variant, piece_index, shape as text)."""
        return self.variant, self.piece_index, shape_text(self.shape)

    def to_json(self) -> Json:
        """Return the fallback as JSON."""
        return {
            "variant": self.variant,
            "piece_index": self.piece_index,
            "shape": shape_to_json(self.shape),
            "adaptor": self.adaptor,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, data: Json) -> Fallback:
        """Return the fallback of `data`.

        Raises:
            CacheError: A field is outside of the grammar.
            KeyError: A field is missing.
        """
        return cls(
            variant=count(data["variant"]),
            piece_index=count(data["piece_index"]),
            shape=shape_from_json(data["shape"]),
            adaptor=word(data["adaptor"]),
            reason=text(data["reason"]),
        )
