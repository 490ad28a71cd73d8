"""Small modules that are hard to compile correctly, with calls that differ from their example in many ways.

Each case says what of its calls must be served; a call not named so may be refused, and is never served wrongly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - what everyone calls it
from torch import nn

from cgtool import ExampleCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A module and its calls.

    Args:
        build: Makes the module, always with the same weights.
        example: Makes the example call.
        served: Calls that must be served, by name.
        tried: Calls that may be refused.
        dynamic: As in a model's spec.
        fails: A word of the error that warm must raise instead ("GraphBreakError: print(\"forward\", x.shape)").
    """

    build: Callable[[], nn.Module]
    example: Callable[[], Any]
    served: Mapping[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    tried: Mapping[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    dynamic: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fails: str | None = None


def call(*args: Any, **kwargs: Any) -> ExampleCall:
    return ExampleCall(args=args, kwargs=kwargs)


CASES: dict[str, Case] = {}
ROWS = {"x": {0: "rows"}}


def x(rows: int = 4, width: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed * 100 + rows))


def case(name: str | None = None, **fields: Any) -> Callable[[type], type]:
    def register(kind: type) -> type:
        def build() -> nn.Module:
            torch.manual_seed(0)
            return kind().eval()

        CASES[name or kind.__name__] = Case(build=build, **fields)
        return kind

    return register


SIZES = {f"rows {n}": functools.partial(lambda n: call(x(n)), n) for n in (1, 2, 3, 4, 7, 9, 33)}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


# ---- arguments


@case(
    example=lambda: call(x(), x(seed=2), extra=x(seed=3)),
    served={"same": lambda: call(x(seed=5), x(seed=6), extra=x(seed=7))},
    tried={
        "one positional": lambda: call(x(), extra=x(seed=3)),
        "three positional": lambda: call(x(), x(), x(), extra=x(seed=3)),
        "other keyword": lambda: call(x(), x(), other=x(seed=3)),
        "two keywords": lambda: call(x(), x(), extra=x(), other=x(seed=3)),
    },
)
class VariadicForward(Base):
    def forward(self, *args, **kwargs):
        total = self.linear(args[0])
        for value in args[1:]:
            total = total + value
        for name, value in kwargs.items():
            total = total + value * len(name)
        return total


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Batch:
    values: torch.Tensor
    count: int = 2


@case(
    example=lambda: call([x(), x(seed=2)], {"k": x(seed=3), "n": 2}, Pair(x(seed=4), x(seed=5)), Batch(x(seed=6))),
    served={"same": lambda: call([x(seed=7), x(seed=2)], {"k": x(), "n": 2}, Pair(x(seed=4), x()), Batch(x(seed=9)))},
    tried={
        "longer list": lambda: call([x(), x(), x()], {"k": x(), "n": 2}, Pair(x(), x()), Batch(x())),
        "shorter list": lambda: call([x()], {"k": x(), "n": 2}, Pair(x(), x()), Batch(x())),
        "tuple": lambda: call((x(), x()), {"k": x(), "n": 2}, Pair(x(), x()), Batch(x())),
        "more keys": lambda: call([x(), x()], {"k": x(), "n": 2, "z": x()}, Pair(x(), x()), Batch(x())),
        "other order": lambda: call([x(), x()], {"n": 2, "k": x()}, Pair(x(), x()), Batch(x())),
        "ordered dict": lambda: call([x(), x()], OrderedDict(k=x(), n=2), Pair(x(), x()), Batch(x())),
        "other number": lambda: call([x(), x()], {"k": x(), "n": 3}, Pair(x(), x()), Batch(x())),
        "plain tuple": lambda: call([x(), x()], {"k": x(), "n": 2}, (x(), x()), Batch(x())),
        "other count": lambda: call([x(), x()], {"k": x(), "n": 2}, Pair(x(), x()), Batch(x(), 3)),
    },
)
class ContainerArguments(Base):
    def forward(self, parts, named, pair, batch):
        y = self.linear(sum(parts)) * named["n"] + named["k"]
        return y + pair[0] - pair[1] * batch.count + batch.values + len(named)


# ---- shapes


@case(
    example=lambda: call(x()),
    served={"contiguous": lambda: call(x(5))},
    tried={
        "transposed": lambda: call(torch.randn(8, 5, generator=torch.Generator().manual_seed(3)).t()),
        "strided": lambda: call(x(10)[::2]),
        "expanded": lambda: call(x(1).expand(5, 8)),
        "offset": lambda: call(x(9)[4:]),
        "wide": lambda: call(x(5, 16)[:, :8]),
        "storage offset": lambda: call(torch.randn(41, generator=torch.Generator().manual_seed(4))[1:].view(5, 8)),
        "parameter": lambda: call(nn.Parameter(x(5))),
        "negative view": lambda: call(torch._neg_view(x(5))),
    },
    dynamic=ROWS,
)
class LooksAtStrides(Base):
    def forward(self, x):
        return (x.contiguous().view(-1) * 2, x.t() + 1, self.linear(x) if x.is_contiguous() else self.linear(x) * 0)


@case(
    example=lambda: call(torch.tensor(2.0), x()),
    served={"other": lambda: call(torch.tensor(-3.5), x(seed=4)), "nan": lambda: call(torch.tensor(float("nan")), x())},
    tried={
        "one element": lambda: call(torch.tensor([2.0]), x()),
        "int": lambda: call(torch.tensor(2), x()),
    },
)
class ZeroDimensional(Base):
    def forward(self, scale, x):
        return self.linear(x) * scale, scale + 1, scale.shape


# ---- outputs


@case(example=lambda: call(x(), x(seed=2)), served={"other": lambda: call(x(seed=5), x(seed=6))})
class ReturnsInputs(Base):
    def forward(self, x, y):
        return x, x.view(-1), y[1:], self.linear.weight, self.linear(y), self.linear.bias[2:]


# ---- writes


@case(
    example=lambda: call(x(), x(seed=2)),
    served={"other": lambda: call(x(9, seed=5), x(9, seed=6))},
    dynamic={"x": {0: "r"}, "y": {0: "r"}},
)
class WritesToInput(Base):
    def forward(self, x, y):
        x.add_(y)
        y.mul_(2)
        return self.linear(x) + y


def twice(rows: int = 4) -> Any:
    one = x(rows)
    return call(one, one)


def overlapping() -> Any:
    base = x(6)
    return call(base[:4], base[2:])


def disjoint() -> Any:
    base = x(8)
    return call(base[:4], base[4:])


ALIASED = {"twice": twice, "overlapping": overlapping, "disjoint": disjoint}


@case(example=lambda: call(x(), x(seed=2)), served={"apart": lambda: call(x(seed=3), x(seed=4))}, tried=ALIASED)
class WritesToFirst(Base):
    def forward(self, x, y):
        z = y + 1
        x.mul_(2)
        return z + y, x + y


@case(
    "written_twice_example",
    example=twice,
    served={"twice": twice},
    tried={"apart": lambda: call(x(), x(seed=2)), **ALIASED},
)
class WritesToFirstAgain(WritesToFirst):
    pass


@case(
    "written_overlapping_example",
    example=overlapping,
    served={},
    tried={"apart": lambda: call(x(), x(seed=2)), **ALIASED},
)
class WritesToFirstOverlapping(WritesToFirst):
    pass


@case(
    example=lambda: call(x(), x(seed=2)),
    served={
        "apart": lambda: call(x(seed=3), x(seed=4)),
        "twice": twice,
        "overlapping": overlapping,
        "disjoint": disjoint,
    },
)
class ReadsBoth(Base):
    def forward(self, x, y):
        return self.linear(x) + y, x - y


@case(example=lambda: call(x()), served={"other": lambda: call(x(4, seed=5))})
class CountsInBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(4, 8))

    def forward(self, x):
        self.count.add_(1)
        self.seen[1:].copy_(x[:3])
        return self.linear(x) + self.seen * self.count


@case(example=lambda: call(x()), served={"other": lambda: call(x(4, seed=5))}, tried={"itself": lambda: call(x())})
class TiedBufferViews(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 4, 8))
        self.register_buffer("keys", self.cache[0])

    def forward(self, x):
        before = self.keys + 1
        self.cache[0].add_(x)
        return self.keys * 2 + before


@case(
    example=lambda: call(torch.tensor([0, 2]), x(2)), served={"other": lambda: call(torch.tensor([3, 1]), x(2, seed=4))}
)
class ScattersIntoCache(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(6, 8))

    def forward(self, slots, x):
        self.cache[slots] = self.linear(x)
        self.cache.index_add_(0, slots, x)
        return self.cache.sum(0), self.cache


# ---- regions and randomness


@case(example=lambda: call(x()), served={"again": lambda: call(x(seed=2))})
class DropsAlways(Base):
    def forward(self, x):
        return self.linear(F.dropout(x, 0.5, training=True)) + x.clone().uniform_()


@case(example=lambda: call(x()), tried={"again": lambda: call(x(seed=2))})
class DrawsPermutation(Base):
    def forward(self, x):
        return self.linear(x)[torch.randperm(4)], torch.randint(0, 9, (3,)), torch.multinomial(x.abs(), 2)


# ---- what cannot be one graph, or must not be


@case(example=lambda: call(x(), {"a": x(seed=2)}), fails="Error: named")
class WritesArgumentDict(Base):
    def forward(self, x, named):
        named["b"] = self.linear(x)
        return named["a"] + 1


@case(example=lambda: call(x(), [x(seed=2)]), fails="Error: parts")
class AppendsToArgument(Base):
    def forward(self, x, parts):
        parts.append(self.linear(x))
        return x + 1


@case(example=lambda: call(x()), served={"other": lambda: call(x(seed=4))}, tried=SIZES)
class PlainTensorAttributes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.ones(8), torch.full((8,), 2.0)]
        self.named = {"bias": torch.full((8,), 3.0)}
        self.same = self.linear.weight

    def forward(self, x):
        return F.linear(x, self.same) * self.tables[1] + self.named["bias"] + self.tables[0]


GLOBAL_TENSOR = torch.full((8,), 0.25)


def make_class() -> type:
    free, factor = torch.full((8,), 0.5), 3

    @case("ClosesOverTensors", example=lambda: call(x()), served=SIZES, dynamic=ROWS)
    class ClosesOverTensors(Base):
        def forward(self, x):
            return self.linear(x) * free + GLOBAL_TENSOR * factor

    return ClosesOverTensors


make_class()


@case(
    example=lambda: call(x(4, 8)),
    served={"other": lambda: call(x(5, 9)), "one": lambda: call(x(1, 9))},
    dynamic={"x": {0: "rows", 1: "width"}},
)
class DynamicLast(Base):
    def forward(self, x):
        return x.t().contiguous(), x.reshape(-1), x.sum(-1, keepdim=True) / x.shape[1], x.stride(0), x[..., None].shape


@case(
    example=lambda: call(
        torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
    ),
    served={"other": lambda: call(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))},
    tried={"contiguous": lambda: call(torch.ones(2, 3, 4, 5))},
)
class ChannelsLast(nn.Module):
    def forward(self, x):
        return x * 2, x.flatten(2), x.is_contiguous(memory_format=torch.channels_last)


@case(example=lambda: call(x()), served={"rows": lambda: call(x(4, seed=2))})
class SharedModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.linear
        self.listed = nn.ModuleList([self.linear, nn.Linear(8, 8), self.linear])

    def forward(self, x):
        for layer in self.listed:
            x = layer(x)
        return self.again(x)
