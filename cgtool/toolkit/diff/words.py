"""Tensors of a plan, in words. No torch here."""

from __future__ import annotations

from cgtool.plan.pieces import TensorMeta


def tensor_words(meta: TensorMeta) -> str:
    """Return what is known of a tensor: "float32[s0, 64] strides [64, 1] cpu"."""
    shape, stride = (", ".join(map(str, dims)) for dims in (meta.shape, meta.stride))
    return f"{meta.dtype}[{shape}] strides [{stride}] {meta.device}"
