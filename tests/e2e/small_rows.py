"""Small modules over rows of eight numbers: name → (forward, parts)."""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - what everyone calls it
from torch import nn


class Pair(typing.NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Both:
    total: torch.Tensor
    rows: int


def layers():
    return {"layer": nn.Linear(8, 8)}


def cells(self, x):
    hidden = x.new_zeros(x.shape[0], 8)
    for _ in range(2):
        hidden = self.cell(x, hidden)
    return hidden


def long_short_cell(self, x):
    hidden, cell = self.cell(x, (torch.zeros_like(x), torch.zeros_like(x)))
    return hidden + cell


def causal(self, x):
    q = self.layer(x).view(1, 1, -1, 8)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def masked_attention(self, x):
    mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()
    q = self.layer(x)[None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def slot_written(self, x):
    self.cache[1:3] = x[:1]
    return self.cache.sum() + x


def slots_written_by_index(self, x):
    self.cache.index_copy_(0, torch.tensor([0, 3]), x[:1].expand(2, 8))
    return self.cache * 2


def view_written(self, x):
    y = x * 2
    y[:, 2:].mul_(3)
    y.view(-1)[0] = 5
    return y


def out_of_place(self, x):
    return torch.add(x, 1, out=torch.empty_like(x))


def views(self, x):
    return x, x.t(), x[1:], x[:, None].expand(-1, 2, -1), x.view(-1)


def regions(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            z = self.layer(y.float())
    return y.float() + z


@torch.autocast("cpu", dtype=torch.bfloat16)
def decorated(self, x):
    return self.layer(x).float()


def dequantised(self, x):
    return x @ ((self.weight.float() - 3) * self.scale)


def fake_quantised(self, x):
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)


def dropped(self, x):
    return F.dropout(self.layer(x), 0.5, training=self.training)


def applied(self, x):
    return self.layer(x)


def solved(self, x):
    return torch.linalg.solve(torch.eye(8) * 2 + self.weight.tril(), x.t())


def by_name(self, x):
    for name in sorted(self.parts):
        x = self.parts[name](x)
    return x


def in_turn(self, x):
    return sum(layer(x) * (index + 1) for index, layer in enumerate(self.layers))


def caught(self, x):
    try:
        return x @ self.absent
    except AttributeError:
        return x * 2


def chosen_by_type(self, x):
    if isinstance(x, torch.Tensor) and x.dtype.is_floating_point and hasattr(self, "scale"):
        return x * self.scale
    return x


def hooked():
    """Return a layer with hooks of every kind, each of which changes its output."""
    layer = nn.Linear(8, 8)
    layer.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    layer.register_forward_hook(lambda _, args, output: output + args[0], always_call=True)
    return {"layer": layer}


def rounded_sizes(self, x):
    rows = x.shape[0]
    return x * math.floor(rows * 0.5) + round(rows / 3) + math.ceil(rows / 4), x / math.sqrt(rows), x[: int(rows * 0.7)]


def from_a_position(self, x):
    position = self.position.item()
    self.table[position : position + x.shape[0]] = x
    self.position += x.shape[0]
    return self.table.sum(0)


def shape_arithmetic(self, x):
    rows, width = x.shape
    return x.reshape(rows * 2, width // 2).view(rows, 2, -1).transpose(1, 2).contiguous().view(-1, width) / rows


def attention(self, x):
    return self.layer(x[None], x[None], x[None], need_weights=False)[0]


def topk(self, x):
    values, indices = x.topk(3)
    return values.cumsum(-1), indices


def nested(self, x):
    return {"list": [x + 1, None], "tuple": (x.sum(), 3, "text")}


def complex_numbers(self, x):
    return torch.view_as_real(torch.view_as_complex(x.view(-1, 4, 2)) * (1 + 2j))


def masked(self, x):
    kept = x.masked_fill(x > 0, 0).sort(-1).values
    return kept.scatter_add(1, torch.zeros(x.shape[0], 1, dtype=torch.long), x[:, :1])


def rounded(self, x):
    return (x / 0.1).round().clamp(-128, 127).to(torch.int8).float() * 0.1


#: Equal to eager at every number of rows.
ROWS_OF_EIGHT = {
    "gru cell": (cells, {"cell": nn.GRUCell(8, 8)}),
    "lstm cell": (long_short_cell, {"cell": nn.LSTMCell(8, 8)}),
    "rnn cell": (cells, {"cell": nn.RNNCell(8, 8)}),
    "fft and back": (lambda self, x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=8), {}),
    "fft of two dimensions": (lambda self, x: torch.fft.fft2(x.view(-1, 2, 4)).real, {}),
    "polar": (lambda self, x: torch.polar(x.abs(), x).angle(), {}),
    "complex weight": (lambda self, x: (x * self.weight).imag, {"weight": torch.complex(torch.ones(8), torch.ones(8))}),
    "causal attention": (causal, layers()),
    "attention with a mask": (masked_attention, layers()),
    "where": (lambda self, x: torch.where(x > 0, x, x.exp()), {}),
    "a mask filled in place": (lambda self, x: (x * 1).masked_fill_(x < 0, -1.0), {}),
    "upper triangle": (lambda self, x: (x @ x.t()).triu(1), {}),
    "a slot of a buffer": (slot_written, {"cache": torch.zeros(4, 8)}),
    "slots of a buffer by index": (slots_written_by_index, {"cache": torch.zeros(4, 8)}),
    "a view written to": (view_written, {}),
    "out=": (out_of_place, {}),
    "views and the input": (views, {}),
    "a named tuple": (lambda self, x: Pair(x + 1, x - 1), {}),
    "a dataclass": (lambda self, x: Both(total=x.sum(), rows=x.shape[0]), {}),
    "a dict of lists": (lambda self, x: {"a": [x, {"b": (x * 2,)}], "n": x.shape[0]}, {}),
    "nested autocast": (regions, layers()),
    "autocast as a decorator": (decorated, layers()),
    "weights of eight bits": (dequantised, {"weight": torch.arange(64, dtype=torch.int8).view(8, 8), "scale": 0.01}),
    "spectral norm": (
        lambda self, x: self.layer(x),
        {"layer": nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))},
    ),
    "dropout in inference": (dropped, layers()),
    "layer norm": (applied, {"layer": nn.LayerNorm(8)}),
    "rms norm": (applied, {"layer": nn.RMSNorm(8)}),
    "instance norm": (lambda self, x: self.layer(x.view(-1, 2, 4)), {"layer": nn.InstanceNorm1d(2)}),
    "average pool": (lambda self, x: F.avg_pool1d(x, 2), {}),
    "adaptive pool": (lambda self, x: F.adaptive_max_pool1d(x, 3), {}),
    "pixel shuffle": (lambda self, x: F.pixel_shuffle(x.view(-1, 4, 1, 2), 2), {}),
    "pad by reflection": (lambda self, x: F.pad(x, (2, 1), mode="reflect"), {}),
    "unfold": (lambda self, x: x.unfold(1, 3, 2).sum(-1), {}),
    "one hot": (lambda self, x: F.one_hot(x.argmax(-1), 8), {}),
    "cross entropy": (lambda self, x: F.cross_entropy(x, x.argmax(-1)), {}),
    "distances": (lambda self, x: torch.cdist(x, x + 1), {}),
    "triangular solve": (solved, {"weight": torch.ones(8, 8)}),
    "gather, roll and flip": (lambda self, x: x.gather(1, x.argsort(-1)).roll(1, -1).flip(0), {}),
    "buckets": (lambda self, x: torch.bucketize(x, self.bounds), {"bounds": torch.tensor([-0.5, 0.0, 0.5])}),
    "a dict of modules": (by_name, {"parts": nn.ModuleDict({"b": nn.Linear(8, 8), "a": nn.ReLU()})}),
    "a list of modules": (in_turn, {"layers": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])}),
    "an exception that is caught": (caught, {}),
    "a choice by type": (chosen_by_type, {"scale": 3.0}),
    "arithmetic on shapes": (shape_arithmetic, {}),
    "sizes that are rounded": (rounded_sizes, {}),
    "resized by a part": (lambda self, x: F.interpolate(x.t()[None], scale_factor=1.7, mode="linear"), {}),
    "a tensor of sizes": (lambda self, x: torch.tensor([x.shape[0], 2]) * torch.tensor(x.shape[0]) + x.sum(), {}),
    "data": (lambda self, x: x.data * self.layer.weight.data.sum(), layers()),
    "hooks": (applied, hooked()),
    "a position in a buffer": (from_a_position, {"table": torch.zeros(32, 8), "position": torch.tensor(0)}),
    "a choice by version": (lambda self, x: x * 2 if torch.__version__ >= "2" else x, {}),
    "distributions": (lambda self, x: torch.distributions.Normal(x, 1.0).log_prob(x * 2), {}),
    "an argument that nothing reads": (lambda self, x: self.layer.weight * 2, layers()),
    "numbers and arrays of numpy": (
        lambda self, x: x * self.scale + torch.from_numpy(self.shift),
        {"scale": np.float64(0.5), "shift": np.arange(8, dtype=np.float32)},
    ),
    "batch norm": (applied, {"layer": nn.BatchNorm1d(8)}),
    "group norm": (applied, {"layer": nn.GroupNorm(2, 8)}),
    "weight norm": (applied, {"layer": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))}),
    "multi-head attention": (attention, {"layer": nn.MultiheadAttention(8, 2, batch_first=True)}),
    "complex numbers": (complex_numbers, {}),
    "einsum": (lambda self, x: torch.einsum("bi,ij->bj", x, self.weight), {"weight": torch.ones(8, 8)}),
    "topk and cumsum": (topk, {}),
    "masks, sort, scatter": (masked, {}),
    "integers of eight bits": (rounded, {}),
    "nested outputs": (nested, {}),
    "vmap": (lambda self, x: torch.vmap(lambda row: row.sin() @ self.weight)(x), {"weight": torch.ones(8, 8)}),
    "jvp": (lambda self, x: torch.func.jvp(torch.sin, (x,), (x,)), {}),
    "softmax and log": (lambda self, x: x.softmax(-1).clamp_min(1e-3).log().mul(2).logsumexp(-1), {}),
}
