"""Sizes computed from real numbers: single operations and divisions are exact, others are refused."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

import torch

import cgtool
from cgtool import CompilationConfig
from cgtool.errors import SplitError

pytestmark = pytest.mark.torch


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def compiled(function, root):
    model = Model(function).eval()
    config = CompilationConfig(adaptor="eager", jobs=0)
    rows = {"x": {0: ("rows", 10, 399)}}
    return model, cgtool.compile(model, example_args=(torch.ones(17, 4),), dynamic=rows, config=config, cache_dir=root)


def larger(x):
    return torch.nn.functional.interpolate(x[None, None], scale_factor=(1.3, 1.0), mode="nearest")


SERVED = {
    "rounded to even": lambda x: x[: round(x.shape[0] * 0.25)] + 1,
    "rounded down": lambda x: x[: math.floor(x.shape[0] * 0.7)] + 1,
    "a quotient rounded up": lambda x: x[: math.ceil(x.shape[0] / 3)] + 1,
    "a quotient of a quotient": lambda x: x[: math.ceil(x.shape[0] / 3 / 0.7)] + 1,
    "a quotient by a quotient, as windows of Swin are counted": lambda x: (
        x[: x.shape[0] // 5 * 5].view(int(x.shape[0] // 5 * 10 / (x.shape[0] // 5 * 5 * 4 / 5 / 2)), -1) + 1
    ),
    "an op of torch's": larger,
    "a factor": lambda x: x * (x.shape[0] * 0.1 * 3),
}

REFUSED = {
    "two products": lambda x: x[: math.ceil(x.shape[0] * 0.1 * 3)] + 1,
    "a sum of products": lambda x: x[: int(0.1 * x.shape[0] + 0.2 * x.shape[0])] + 1,
    "a quotient and a product": lambda x: x[: int(x.shape[0] / 3 * 3)] + 1,
    "a branch": lambda x: x + 1 if x.shape[0] * 0.1 * 3 > 3 else x - 1,
}


@torch.no_grad()
@pytest.mark.parametrize("name", SERVED)
def test_single_operations_and_divisions_are_exact_at_every_size(name, tmp_path):
    model, loaded = compiled(SERVED[name], tmp_path)
    whole = torch.rand(400, 4)
    for rows in range(10, 400):
        x = whole[:rows]
        assert torch.equal(loaded(x), model(x)), rows


@pytest.mark.parametrize("name", REFUSED)
def test_several_operations_are_refused_with_their_line(name, tmp_path):
    with pytest.raises(SplitError, match=r"torch may reorder them.*test_reals"):
        compiled(REFUSED[name], tmp_path)
