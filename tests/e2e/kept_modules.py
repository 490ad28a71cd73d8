"""Small modules that store tensors in attributes, which the next call may read."""

from __future__ import annotations

import functools

import torch
from torch import nn


def keeps_last(self, x):
    self.last = self.layer(x)
    return self.last * 2


def last_of_a_part(self, x):
    return self.part(x) + 1


def last_of_several(self, x):
    y = self.layer(x)
    self.count, self.both, self.gone = x.shape[0], (y.sum(), y.view(-1)), None
    return y


def running(self, x):
    self.mean = self.mean * 0.9 + x.mean(0) * 0.1
    return x - self.mean


def replaced_buffer(self, x):
    self.count = self.count + 1
    return x * self.count


def begins_without(self, x):
    if not hasattr(self, "mean"):
        self.mean = x.mean(0)
        self.started = True
    return x - self.mean


def put_into_a_dict(self, x):
    self.cache["last"] = x * 2
    return x + 1


def made_once(self, x):
    if "weight" not in self.cache:
        self.cache["weight"] = self.layer.weight.t() * 2
    return x @ self.cache["weight"]


def compared(self, x):
    """From the second call on, both names refer to one tensor."""
    y = x * 2 if self.first is self.second else x * 3
    self.second = self.first
    return y


def back_and_forth(self, x):
    self.sign = -self.sign
    return x * self.sign


def taken_in_turn(self, x):
    """Writes to a ring buffer of three rows."""
    slot = self.slot
    self.slot = (slot + 1) % 3
    self.ring = torch.cat([self.ring[:slot], x.sum(0)[None], self.ring[slot + 1 :]])
    return x + self.ring.sum(0)


def first_call_differs(self, x):
    first, self.is_first = self.is_first, False
    return x.sin() if first else x.cos()


def swapped(self, x):
    self.one, self.other = self.other, self.one
    return x + self.one


def keys_and_values(self, x):
    keys, values = self.pair
    self.pair = (x, x * 2) if keys is None else (torch.cat([keys, x]), torch.cat([values, x * 2]))
    return (x @ self.pair[0].t()).softmax(-1) @ self.pair[1]


def table_that_grows(self, x):
    rows = x.shape[0]
    if self.table is None or self.table.shape[0] < rows:
        self.table = torch.arange(rows, dtype=x.dtype).cos()
    return x * self.table[:rows, None]


def average_in_a_dict(self, x):
    self.shadow["weight"] = self.shadow["weight"] * 0.9 + x.mean()
    return x @ self.shadow["weight"]


def mask_of_the_size(self, x):
    rows = x.shape[0]
    if self.mask is None or self.mask.shape[0] != rows:
        self.mask = torch.ones(rows, rows).tril()
    return self.mask @ x


def a_view_of_the_argument(self, x):
    self.seen, self.same = x[:, :4], self.part
    return x * 2


class Computed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.steps = nn.Linear(8, 8), 3

    @functools.cached_property
    def shift(self):
        return self.steps - 1

    @functools.cached_property
    def transposed(self):
        return self.layer.weight.t() * self.shift

    def forward(self, x):
        return (x @ self.transposed).roll(self.shift)


def counts_on(self, x):
    self.count = self.count + x.sum(0)
    return x + self.count


def part_that_counts_on_from_its_class():
    return type("Part", (nn.Module,), {"forward": counts_on, "count": torch.ones(8)})()


def part_that_keeps():
    part = type("Part", (nn.Module,), {"forward": keeps_last})()
    part.layer, part.last = nn.Linear(8, 8), None
    return part


def with_hooks_of_old():
    """Do what `torch.nn.utils.weight_norm` does: a hook computes the weight before each call."""
    layer = nn.Linear(8, 8)
    weight = layer.weight
    del layer.weight
    layer.direction, layer.scale = nn.Parameter(weight.detach().clone()), nn.Parameter(torch.ones(8, 1))
    layer.weight = weight.detach().clone()
    layer.register_forward_pre_hook(
        lambda module, _: setattr(module, "weight", torch._weight_norm(module.direction, module.scale, 0))
    )
    return layer


#: name → (forward, parts, plain attributes)
KEPT = {
    "what was computed last": (keeps_last, {"layer": nn.Linear(8, 8)}, {"last": None}),
    "by a part, in an attribute that was not there": (last_of_a_part, {"part": part_that_keeps()}, {}),
    "on top of its class's": (last_of_a_part, {"part": part_that_counts_on_from_its_class()}, {}),
    "a size, a tuple and None": (last_of_several, {"layer": nn.Linear(8, 8)}, {"gone": torch.ones(2)}),
    "a running mean": (running, {}, {"mean": torch.zeros(8)}),
    "a buffer that is replaced": (replaced_buffer, {"count": torch.zeros(())}, {}),
    "nothing before the first call": (begins_without, {}, {}),
    "one tensor by two names": (compared, {}, {"first": torch.ones(8), "second": torch.ones(8)}),
    "a number back and forth": (back_and_forth, {}, {"sign": 0.5}),
    "an item of a dict": (put_into_a_dict, {}, {"cache": {}}),
    "what the first call made of weights": (made_once, {"layer": nn.Linear(8, 8)}, {"cache": {}}),
    "a cached property": (lambda self, x: self.part(x), {"part": Computed()}, {}),
    "a ring": (taken_in_turn, {}, {"ring": torch.zeros(3, 8), "slot": 0}),
    "a first call that is another graph": (first_call_differs, {}, {"is_first": True}),
    "two that change places": (swapped, {}, {"one": torch.ones(8), "other": torch.zeros(8)}),
    "keys and values": (keys_and_values, {}, {"pair": (None, None)}),
    "a table that grows": (table_that_grows, {}, {"table": None}),
    "a moving average in a dict": (average_in_a_dict, {}, {"shadow": {"weight": torch.eye(8), "bias": torch.ones(8)}}),
    "a mask of the size": (mask_of_the_size, {}, {"mask": None}),
    "a view of the argument, and a tensor of the model": (
        a_view_of_the_argument,
        {"part": torch.ones(3)},
        {"seen": None, "same": None},
    ),
    "weight norm by a hook": (lambda self, x: self.layer(x), {"layer": with_hooks_of_old()}, {}),
}

#: Modules that store tensors with a size that depends on the number of rows.
OF_THE_SIZE = (
    "what was computed last",
    "by a part, in an attribute that was not there",
    "a size, a tuple and None",
    "an item of a dict",
    "a table that grows",
    "a mask of the size",
    "a view of the argument, and a tensor of the model",
)
