"""Small modules with data-dependent sizes or numbers: name → (module, calls with different data, dynamic)."""

from __future__ import annotations

import torch
from small_modules import FROM_2, module


def numbers(rows, width=4, *, shift=0.0):
    return (torch.arange(rows * width, dtype=torch.float32) * 0.7 + shift).sin().view(rows, width)


def chosen(self, x):
    kept = x[x[:, 0] > 0]
    return torch.relu(kept @ self.weight).sum(0) + x.mean(0)


def returned(self, x):
    return torch.nonzero(x > 0.5) * 2, x[x > 0].sin()


def how_many(self, x):
    kept = x[x[:, 0] > 0]
    return torch.relu(kept @ self.weight), kept.shape[0], (x.shape[0] - kept.shape[0]) * 2


def split_by_a_list(self, x, counts):
    parts = x.split(counts.tolist())
    return torch.cat([torch.relu(part @ self.weight) * (n + 1) for n, part in enumerate(parts)]) + x


def scaled(self, x):
    scale = x.abs().max().item()
    y = torch.relu(x @ self.weight) + 1
    return (y * scale).sin() + y.cos() * scale


def whole_number(self, x, n):
    k = (n * 2).item()
    y = torch.relu(x @ self.weight)
    return y * k + x / (k + 1)


def repeated(self, x, counts):
    return torch.relu(x.repeat_interleave(counts, dim=0) @ self.weight).sum(0)


def uniques(self, x):
    found, counts = torch.unique((x * 2).round(), return_counts=True)
    return torch.relu(found * 2) + 1, counts.float().mean()


def spread(self, x):
    mask = x[:, 0] > 0
    y = torch.zeros_like(x)
    y[mask] = torch.relu(x[mask] @ self.weight)
    return y + x


def chosen_twice(self, x):
    mask = x.mean(1) > 0
    return torch.relu(x[mask] @ self.weight), x.exp()[mask] * 2


def selected(self, x):
    return torch.masked_select(x, x > 0).exp().sum() + x


def checked(self, x, n):
    k = (n + 0).item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return torch.relu(x[:k] @ self.weight).sum(0)


def ranged(self, x, n):
    k = (n + 0).item()
    torch._check(k >= 0)
    positions = torch.arange(k)
    return torch.relu(positions[:, None] * x[0]).cos() @ self.weight


def attended(self, x):
    kept = x[x[:, 0] > 0][None]
    return torch.nn.functional.scaled_dot_product_attention(x[None], kept @ self.weight, kept) + x


def _weighted(function, calls, dynamic=FROM_2):
    return module(function, weight=torch.eye(4) * 0.5 + 0.1), calls, dynamic


X = [numbers(4), numbers(9, shift=1.0), numbers(3, shift=4.2), -numbers(4).abs(), numbers(5).abs() + 0.1]
ONE = [(x,) for x in X]


def counted(*lists):
    return [(numbers(sum(counts), shift=sum(counts)), torch.tensor(counts)) for counts in lists]


CASES = {
    "rows by a mask": lambda: _weighted(chosen, ONE),
    "nonzero returned": lambda: _weighted(returned, ONE),
    "their number returned": lambda: _weighted(how_many, ONE),
    "split by tolist": lambda: _weighted(split_by_a_list, counted([1, 3, 2], [4, 0, 1], [0, 0, 5], [1, 1, 1])),
    "a float from data": lambda: _weighted(scaled, ONE),
    "an integer from data": lambda: _weighted(
        whole_number, [(x, torch.tensor(n)) for x, n in zip(X, (5, 0, 1, -3, 7), strict=True)]
    ),
    "repeat_interleave": lambda: _weighted(
        repeated, [(numbers(4, shift=n), torch.tensor(c)) for n, c in enumerate(([1, 2, 0, 3], [0] * 4, [1] * 4))], {}
    ),
    "unique": lambda: _weighted(uniques, ONE),
    "written by a mask": lambda: _weighted(spread, ONE),
    "two takes by one mask": lambda: _weighted(chosen_twice, ONE),
    "masked_select": lambda: _weighted(selected, ONE),
    "a slice that is checked": lambda: _weighted(
        checked, [(x, torch.tensor(n)) for x, n in zip(X, (3, 9, 0, 1, 2), strict=True)]
    ),
    "a range": lambda: _weighted(ranged, [(x, torch.tensor(n)) for x, n in zip(X, (3, 9, 0, 1, 2), strict=True)]),
    "attention over chosen rows": lambda: _weighted(attended, [call for call in ONE if (call[0][:, 0] > 0).any()]),
}
