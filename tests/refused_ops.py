"""Ops that AOTInductor cannot call, each for a different reason, and a model with one of them."""

from __future__ import annotations

import torch
from torch import nn

_LIBRARY = torch.library.Library("cgtool_refused", "FRAGMENT")


def _op(schema, impl, fake):
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, impl, "CPU")
    torch.library.register_fake(f"cgtool_refused::{name}", fake, lib=_LIBRARY)


_op("nested(Tensor x, int[][] how) -> Tensor", lambda x, how: x * how[1][0], lambda x, how: torch.empty_like(x))
_op("bounded(Tensor x, float most) -> Tensor", lambda x, most: x.clamp(max=most), lambda x, most: torch.empty_like(x))
_op("summed(Tensor x, int[] dims) -> Tensor", lambda x, dims: x * (1 + sum(dims)), lambda x, dims: torch.empty_like(x))

#: The name of each op → its call. The schema of the first shows it; of the others, only a package does.
CALLS = {
    "nested": lambda x: torch.ops.cgtool_refused.nested(x, [[1], [3]]),
    "bounded": lambda x: torch.ops.cgtool_refused.bounded(x, float("inf")),
    "summed": lambda x: torch.ops.cgtool_refused.summed(x, []),
}


class Model(nn.Module):
    """A layer, the call, and another layer: two equal pieces."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.sin(self.second(CALLS[self.name](torch.sin(self.first(x)))))


def build(name="nested"):
    from cgtool import ExampleCall, ModelSpec

    return ModelSpec(
        module=Model(name).eval(),
        calls=[ExampleCall(args=(torch.rand(4, 8),))],
        dynamic={"x": {0: ("rows", 2, None)}},
    )
