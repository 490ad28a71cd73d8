"""From what a user writes for `MODEL` to a `ModelSpec`: importing a factory, `hf:` models, fake tensors."""

from cgtool.models.resolve import resolve_model

__all__ = ["resolve_model"]
