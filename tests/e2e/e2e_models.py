"""Small models with unusual signatures, outputs and side effects, and factories of them for the command line."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from cgtool import ExampleCall, ModelSpec

WIDTH = 16


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


@dataclass
class Inner:
    tensor: torch.Tensor
    label: str
    nothing: None = None


@dataclass
class Outer:
    inner: Inner
    parts: dict[str, object]
    count: int = 0


def linear(width=WIDTH):
    layer = nn.Linear(width, width)
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            numbers = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.copy_((numbers * 0.37 + index).sin().view(parameter.shape) / width**0.5)
    return layer


class Nested(nn.Module):
    """Returns every kind of container, with tensors, None, numbers and text in them, and one tensor twice."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        y = self.layer(x)
        z = torch.tanh(y)
        return Outer(
            inner=Inner(tensor=y, label="inner"),
            parts={
                "list": [y, [z, None]],
                "tuple": (z, (x + 1,), ()),
                "pair": Pair(left=z.sum(-1), right=None),
                "ordered": OrderedDict(b=y * 2, a=z * 3),
                "constants": (1, 2.5, True, "text", None),
                "shape": x.shape[0],
            },
            count=3,
        )


class Signature(nn.Module):
    """Has positional, keyword and keyword-only parameters with defaults, one of them an optional tensor."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x, bias=None, *, scale=2.0, mode="tanh"):
        y = self.layer(x) * scale
        if bias is not None:
            y = y + bias
        return torch.tanh(y) if mode == "tanh" else F.relu(y)


class Asking(nn.Module):
    """Checks the type of its argument, for which Dynamo creates a name that the frame does not have."""

    def forward(self, x):
        return x + 1 if type(x) is torch.Tensor else x - 1


class Attention(nn.Module):
    """Two attentions over [batch, seq, width], which separate three pieces."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x):
        y = self.first(x).unsqueeze(1)
        y = F.scaled_dot_product_attention(y, y, y)
        y = F.gelu(self.second(y))
        y = F.scaled_dot_product_attention(y, y, y)
        return torch.softmax(self.third(y).squeeze(1) + x, dim=-1)


BATCH_SEQ = {"x": {0: "batch", 1: "seq"}}


def x_of(batch=3, width=WIDTH):
    return (torch.arange(batch * width, dtype=torch.float32) * 0.11).cos().view(batch, width)


def attention_x(batch=2, seq=5):
    return (torch.arange(batch * seq * WIDTH, dtype=torch.float32) * 0.13).sin().view(batch, seq, WIDTH)


def nested():
    return ModelSpec(module=Nested().eval(), calls=[ExampleCall(args=(x_of(),))], dynamic={"x": {0: "batch"}})


def asking():
    return ModelSpec(module=Asking().eval(), calls=[ExampleCall(args=(x_of(),))], dynamic={"x": {0: "batch"}})


def attention(dynamic=BATCH_SEQ):
    """Four variants: each dimension is 1 or not."""
    return ModelSpec(module=Attention().eval(), calls=[ExampleCall(args=(attention_x(),))], dynamic=dynamic)


def attention_from_2():
    """A single variant, for tests that are not about sizes."""
    return attention({"x": {0: ("batch", 2, None), 1: ("seq", 2, None)}})


class Scales(nn.Module):
    """Iterates over a list of parameters, which may grow."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.full((4,), 2.0)])

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return x


class Positive(nn.Module):
    """Asserts a property of its input, without a message."""

    def forward(self, x):
        torch._assert_async((x > 0).all())
        return x * 2
