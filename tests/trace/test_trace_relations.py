"""Relations between sizes: stored, reported when a call violates them, and true of served calls."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from trace_harness import agree, plan_of, served

from cgtool.errors import GuardError

pytestmark = pytest.mark.torch

N = {"x": {0: "n"}}


class Limited(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(512, 4)

    def forward(self, x):
        if x.shape[0] > 512:
            raise ValueError("too long")
        return self.table(torch.arange(x.shape[0])) + x


def test_an_upper_limit_of_the_code_is_kept(tmp_path):
    model = Limited()
    (general, one) = plan_of(model, torch.rand(8, 4), dynamic=N).plan.variants
    (symbol,) = general.symbols
    assert (symbol.min, symbol.max) == (2, 512)
    assert (general.fixed, one.fixed) == ({}, {"n": 1})
    assert one.symbols == ()
    loaded = served(tmp_path, model, torch.rand(8, 4), dynamic=N)
    for rows in (1, 2, 511, 512):
        agree(loaded, model, torch.rand(rows, 4))
    with pytest.raises(GuardError, match="n is 513 and must be from 1 to 512"):
        loaded(torch.rand(513, 4))


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] > 16 else x * 3


@pytest.mark.parametrize(("example", "good", "bad"), [(8, (1, 2, 16), (17, 40)), (20, (1, 17, 40), (16, 2))])
def test_a_branch_on_a_size_serves_the_side_that_was_traced(tmp_path, example, good, bad):
    model = Branching()
    loaded = served(tmp_path, model, torch.rand(example, 4), dynamic=N)
    for rows in good:
        agree(loaded, model, torch.rand(rows, 4))
    for rows in bad:
        with pytest.raises(GuardError, match="n is"):
            loaded(torch.rand(rows, 4))


class Divided(nn.Module):
    def forward(self, x):
        if x.shape[0] % 4 == 0:
            return x.view(-1, 4, x.shape[1]).sum(1)
        return x


def test_divisibility_is_a_relation(tmp_path):
    model = Divided()
    plan = plan_of(model, torch.rand(8, 4), dynamic=N).plan
    assert any("%" in relation for relation in plan.variants[0].relations)
    loaded = served(tmp_path, model, torch.rand(8, 4), dynamic=N)
    for rows in (4, 8, 40, 1):
        agree(loaded, model, torch.rand(rows, 4))
    with pytest.raises(GuardError, match="n"):
        loaded(torch.rand(6, 4))


class Capped(nn.Module):
    def forward(self, x):
        return x[: min(x.shape[0], 5)] * 2


class AtLeast(nn.Module):
    def forward(self, x):
        return torch.cat([x, x.new_zeros(max(x.shape[0], 5) - x.shape[0], 4)]) * 2


class NextPowerOfTwo(nn.Module):
    """Pads without int.bit_length(), which makes Dynamo specialize each size."""

    def forward(self, x):
        n = x.shape[0] - 1
        for bits in (1, 2, 4, 8, 16, 32):
            n |= n >> bits
        return torch.cat([x, x.new_zeros(n + 1 - x.shape[0], 4)]) * 2


class RoundedDown(nn.Module):
    def forward(self, x):
        return x.new_zeros((x.shape[0] & ~7) + 8, 4) + 1


class Neighbour(nn.Module):
    def forward(self, x):
        return x.new_zeros(x.shape[0] ^ 1, 4) + x.shape[0]


class RoundedUp(nn.Module):
    def forward(self, x):
        return x.new_zeros(math.ceil(x.shape[0] / 8) * 8, 4) + x.shape[0]


class Distance(nn.Module):
    def forward(self, x):
        return x.new_zeros(abs(x.shape[0] - 100) + 2, 4) + 1


@pytest.mark.parametrize("kind", [Capped, AtLeast, NextPowerOfTwo, RoundedDown, Neighbour, RoundedUp, Distance])
def test_arithmetic_on_sizes_serves_every_size(tmp_path, kind):
    model = kind()
    loaded = served(tmp_path, model, torch.rand(11, 4), dynamic=N)
    for rows in (1, 2, 4, 5, 6, 7, 8, 9, 16, 17, 200):
        agree(loaded, model, torch.rand(rows, 4))


class Added(nn.Module):
    def forward(self, x, y):
        return x + y


XY = (torch.rand(4, 3), torch.rand(4, 3))


def test_one_name_means_one_size(tmp_path):
    model = Added()
    loaded = served(tmp_path, model, *XY, dynamic={"x": {0: "n"}, "y": {0: "n"}})
    for rows in (1, 2, 7):
        agree(loaded, model, torch.rand(rows, 3), torch.rand(rows, 3))
    for sizes in ((7, 1), (1, 7), (2, 3)):
        with pytest.raises(GuardError):
            loaded(torch.rand(sizes[0], 3), torch.rand(sizes[1], 3))


def test_equality_required_by_the_code_is_a_relation_of_two_names(tmp_path):
    model = Added()
    loaded = served(tmp_path, model, *XY, dynamic={"x": {0: ("n", 2, None)}, "y": {0: ("m", 2, None)}})
    agree(loaded, model, torch.rand(7, 3), torch.rand(7, 3))
    with pytest.raises(GuardError):
        loaded(torch.rand(7, 3), torch.rand(6, 3))


class Cat(nn.Module):
    def forward(self, x, y):
        return torch.cat([x, y]).softmax(0)


def test_equal_sizes_with_different_names_stay_independent(tmp_path):
    model = Cat()
    loaded = served(tmp_path, model, *XY, dynamic={"x": {0: "n"}, "y": {0: "m"}})
    for n, m in ((4, 4), (2, 9), (9, 2), (1, 5), (5, 1), (1, 1)):
        agree(loaded, model, torch.rand(n, 3), torch.rand(m, 3))


class Pooled(nn.Module):
    """Works on any number of rows, including none."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.layer(x)), x.sum(0), x.shape[0]


def test_size_0_gets_its_own_variant_if_requested(tmp_path):
    model = Pooled()
    loaded = served(tmp_path / "with", model, torch.rand(3, 4), dynamic={"x": {0: ("n", 0, None)}})
    for rows in (0, 1, 2, 9):
        agree(loaded, model, torch.rand(rows, 4))
    loaded = served(tmp_path / "without", model, torch.rand(3, 4), dynamic=N)
    with pytest.raises(GuardError, match="n is 0"):
        loaded(torch.rand(0, 4))


def test_bounds_of_the_user_and_of_the_code_both_hold(tmp_path):
    model = Limited()
    loaded = served(tmp_path, model, torch.rand(8, 4), dynamic={"x": {0: ("n", 4, 600)}})
    for rows in (4, 512):
        agree(loaded, model, torch.rand(rows, 4))
    for rows in (1, 3, 513, 600):
        with pytest.raises(GuardError, match="n is"):
            loaded(torch.rand(rows, 4))


def test_a_dimension_counted_from_the_end_is_that_dimension(tmp_path):
    model = Pooled()
    loaded = served(tmp_path, model, torch.rand(3, 4), dynamic={"x": {-2: "n"}})
    for rows in (1, 2, 9):
        agree(loaded, model, torch.rand(rows, 4))


class Gaps(nn.Module):
    def forward(self, x):
        return x.sum(-1) * 2


def test_an_example_with_gaps_in_memory_serves_calls_like_it_at_every_size(tmp_path):
    model = Gaps()
    loaded = served(tmp_path, model, torch.rand(5, 3, 8)[..., :4], dynamic=N)
    for rows in (1, 2, 5, 9):
        agree(loaded, model, torch.rand(rows, 3, 8)[..., :4])
    with pytest.raises(GuardError, match="stride"):
        loaded(torch.rand(5, 3, 4))


def test_a_transposed_example_serves_calls_like_it(tmp_path):
    model = Gaps()
    loaded = served(tmp_path, model, torch.rand(4, 5).t(), dynamic=N)
    for rows in (1, 2, 9):
        agree(loaded, model, torch.rand(4, rows).t())


def test_examples_that_share_memory_are_traced_as_they_are(tmp_path):
    model = Written()
    whole = torch.rand(6, 4)
    loaded = served(tmp_path, model, whole[:3], whole[3:], dynamic={"x": {0: "n"}, "y": {0: "n"}})
    for rows in (3, 7):
        whole = torch.rand(2 * rows, 4)
        other = whole.clone()
        torch.testing.assert_close(loaded(whole[:rows], whole[rows:]), model(other[:rows], other[rows:]))
        torch.testing.assert_close(whole, other)


class Written(nn.Module):
    def forward(self, x, y):
        x.mul_(2)
        return x + y


class Extra(nn.Module):
    def forward(self, x, **more):
        return x + more["bias"]


def test_a_dimension_of_a_keyword_argument_is_dynamic(tmp_path):
    model = Extra()
    dynamic = {"x": {0: "n"}, "bias": {0: "n"}}
    loaded = served(tmp_path, model, torch.rand(3, 4), bias=torch.rand(3, 4), dynamic=dynamic)
    for rows in (1, 2, 9):
        agree(loaded, model, torch.rand(rows, 4), bias=torch.rand(rows, 4))


class DataSized(nn.Module):
    def forward(self, x, k):
        return x[: int(k.item())] * 2


def test_a_size_in_an_argument_is_read_at_call_time(tmp_path):
    model = DataSized()
    loaded = served(tmp_path, model, torch.rand(8, 4), torch.tensor(3), dynamic=N)
    for rows, size in ((8, 3), (5, 0), (1, 1), (9, 12)):
        agree(loaded, model, torch.rand(rows, 4), torch.tensor(size))
