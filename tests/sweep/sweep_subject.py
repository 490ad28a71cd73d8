"""A model with one of everything that a compiled graph can rest on; its file is run as a script, too."""

from __future__ import annotations

import dataclasses
import enum
import functools

import torch
import torch.nn.functional as F  # noqa: N812 - what everyone calls it
from torch import nn

import cgtool

SCALE = 1.5
TABLE = {"shift": 0.25, "names": ["a", "b"]}


def _inside(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _inside_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _cut(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _cut_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


cgtool.direct_register_custom_op("inside", _inside, mutates_args=[], fake_impl=_inside_fake, namespace="cgtool_sweep")
cgtool.direct_register_custom_op(
    "cut", _cut, mutates_args=[], fake_impl=_cut_fake, namespace="cgtool_sweep", splitting=True
)


class Mode(enum.Enum):
    ONE = 1


@dataclasses.dataclass
class Settings:
    eps: float = 1e-3


def helper(x: torch.Tensor, factor: float = 0.5) -> torch.Tensor:
    return x * factor


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def make_closure(weight: float):
    def closed(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    return closed


def make_local_class():
    class Local(nn.Module):
        def forward(self, x):
            return x * 1.25

    return Local


Local = make_local_class()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.eps = 1e-6

    def forward(self, x):
        return self.act(self.linear(x)) + self.eps

    def act(self, x):
        return F.silu(x)


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x + 0.125


class Aliased(nn.Module):
    def _plain(self, x):
        return x + 0.5

    forward = _plain


class Subject(nn.Module):
    """`forward(x)` on [rows, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList([Inner(), Inner()])
        self.named = nn.ModuleDict({"local": Local(), "decorated": Decorated(), "aliased": Aliased()})
        self.builtin = nn.Sequential(nn.SiLU(), nn.LayerNorm(8), nn.Dropout(0.5))
        self.settings = Settings()
        self.mode = Mode.ONE
        self.closure = make_closure(0.75)
        self.thunk = lambda value: value + 2
        self.partial = functools.partial(helper, factor=0.9)
        self.table = [torch.ones(8), torch.full((8,), 2.0)]
        self.register_buffer("offset", torch.zeros(8))
        self._hidden = 3.0

    @property
    def hidden(self) -> float:
        return self._hidden

    @staticmethod
    def fixed(x):
        return x * 1.0625

    @classmethod
    def shared(cls, x):
        return x * 0.9375

    @decorated
    def wrapped(self, x):
        return x + 0.0625

    def forward(self, x, *, gain: float = 2.0):
        y = helper(self.first(x)) * SCALE + TABLE["shift"] * len(TABLE["names"]) + self.settings.eps
        y = torch.ops.cgtool_sweep.inside(y)
        for layer in self.layers:
            y = layer(y)
        y = torch.ops.cgtool_sweep.cut(y)
        for module in self.named.values():
            y = module(y)
        y = self.builtin(self.closure(self.thunk(self.partial(y)))) * self.hidden
        y = self.wrapped(self.shared(self.fixed(y))) * self.table[1] + self.offset
        if self.mode is Mode.ONE:
            y = y * gain
        return self.last(y)


def example() -> torch.Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8)


def build() -> cgtool.ModelSpec:
    torch.manual_seed(0)
    return cgtool.ModelSpec(
        module=Subject().eval(),
        calls=[cgtool.ExampleCall(args=(example(),))],
        dynamic={"x": {0: "rows"}},
    )


if __name__ == "__main__":
    import sys

    model = build().module
    loaded = cgtool.load(model, cache_dir=sys.argv[1])
    with torch.no_grad():
        torch.testing.assert_close(loaded(example()), model(example()))
        loaded(example()[:1])
        loaded(example().repeat(3, 1))
    print("hit")  # noqa: T201 - read by a test
