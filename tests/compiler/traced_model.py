"""Models for tracing in children, and factories that fail there."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import nn

from cgtool import ExampleCall, ModelSpec


class Convolved(nn.Module):
    """Runs only at lengths from 3 on."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)

    def forward(self, x):
        return self.conv(x)


class Broken(nn.Module):
    """Breaks the graph at size 1."""

    def forward(self, x):
        if x.shape[0] == 1:
            torch._dynamo.graph_break()
        return x + 1


def convolved():
    return _spec(Convolved(), torch.rand(2, 4, 8), {0: "batch", 2: "length"})


def broken():
    return _spec(Broken(), torch.rand(4, 4), {0: "n"})


def fixed():
    """Build a model whose code fixes its dynamic dimension."""
    return _spec(nn.Linear(4, 4), torch.rand(3, 4), {0: "n", 1: "width"}, argument="input", static_where_fixed=True)


def activated(width=4):
    return _spec(nn.ReLU(), torch.rand(4, width), {0: "n"}, argument="input")


def dying(parent):
    """Build a model in the parent, and kill any other process."""
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return activated()


def hanging(parent, width=4):
    """Build a model in the parent, and hang in any other process."""
    if os.getpid() != parent:
        time.sleep(3600)
    return activated(width)


def _spec(module, x, dims, **more):
    return ModelSpec(module=module, calls=[ExampleCall(args=(x,))], dynamic={more.pop("argument", "x"): dims}, **more)
