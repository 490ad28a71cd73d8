"""A model whose first and last layers share one weight."""

from __future__ import annotations

import torch
from torch import nn

from cgtool import ExampleCall, ModelSpec

WIDTH = 16


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def tied():
    x = torch.arange(3 * WIDTH, dtype=torch.float32).sin().view(3, WIDTH)
    # From 2 on: a single row would need its own variant.
    return ModelSpec(module=Tied().eval(), calls=[ExampleCall(args=(x,))], dynamic={"x": {0: ("rows", 2, 64)}})
