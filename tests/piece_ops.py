"""Custom ops, one for each kind of argument and result; importing this module registers them."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("cgtool_user", "FRAGMENT")


def _op(schema, impl, fake):
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, impl, "CPU")
    torch.library.register_fake(f"cgtool_user::{name}", fake, lib=_LIBRARY)


def _every_kind(x, bias, dims, factors, scale, mode, dtype, device, *, flag, count):  # noqa: PLR0917 - as in its schema
    if (mode, flag, device.type, len(factors)) != ("wide", True, "cpu", 2):
        raise ValueError(mode)
    y = x * scale * factors[1] + sum(dims) + count
    return (y if bias is None else y + bias).to(dtype)


def _accumulate(total, x):
    total.add_(x)


def _advance(total, x):
    total.add_(x)
    return total.sum(-1) * 2


_op(
    "halves(Tensor x, int at) -> (Tensor, Tensor)",
    lambda x, at: (x[:, :at] * 2, x[:, at:] * 3),
    lambda x, at: (x.new_empty(x.shape[0], at), x.new_empty(x.shape[0], x.shape[1] - at)),
)
_op(
    "every_kind(Tensor x, Tensor? bias, int[] dims, float[] factors, float scale, str mode, ScalarType dtype, "
    "Device device, *, bool flag, SymInt count) -> Tensor",
    _every_kind,
    lambda x, bias, dims, factors, scale, mode, dtype, device, *, flag, count: torch.empty_like(x, dtype=dtype),
)
_op(
    "mapped(Tensor[] xs, Tensor?[] others) -> Tensor[]",
    lambda xs, others: [x + (0 if other is None else other) for x, other in zip(xs, others, strict=True)],
    lambda xs, others: [torch.empty_like(x) for x in xs],
)
_op("accumulate(Tensor(a!) total, Tensor x) -> ()", _accumulate, lambda total, x: None)
_op("advance(Tensor(a!) total, Tensor x) -> Tensor", _advance, lambda total, x: total.new_empty(total.shape[0]))
_op(
    "transposed(Tensor x) -> Tensor",
    lambda x: x.t().contiguous().t() * 1,
    lambda x: torch.empty_strided(x.shape, (1, x.shape[0]), dtype=x.dtype),
)
