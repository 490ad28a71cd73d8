"""A model with one layer and one dynamic dimension, which the `eager` adaptor warms quickly."""

from __future__ import annotations

import torch
from torch import nn

from cgtool import CompilationConfig, ExampleCall, ModelSpec


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.layer(x))


EAGER = CompilationConfig(adaptor="eager", proof=False)


def spec(model, **more):
    return ModelSpec(module=model, calls=[ExampleCall(args=(torch.rand(3, 4),))], dynamic={"x": {0: "n"}}, **more)
