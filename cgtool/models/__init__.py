"""Resolve `MODEL`, as the user writes it, to a `ModelSpec`: factories, `hf:` models, fake tensors."""

from cgtool.models.resolve import resolve_model

__all__ = ["resolve_model"]
