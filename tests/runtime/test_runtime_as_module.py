"""What `cgtool.load` and `cgtool.compile` return, in the hands of people who had a module before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cgtool
from cgtool.errors import GuardError

pytestmark = pytest.mark.torch

CONFIG = cgtool.CompilationConfig(adaptor="eager")


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.factor = 3

    def forward(self, x):
        return x * self.weight * self.factor


@pytest.fixture(params=["compiled", "loaded", "first call"])
def pair(request, tmp_path):
    module = Scale().eval()
    if request.param == "first call":
        return module, cgtool.compile(module, config=CONFIG, cache_dir=tmp_path)
    model = cgtool.compile(module, example_args=(torch.ones(4),), config=CONFIG, cache_dir=tmp_path)
    return module, cgtool.load(module, cache_dir=tmp_path) if request.param == "loaded" else model


def test_it_answers_as_the_module_does(pair):
    module, model = pair
    assert model(torch.ones(4)).tolist() == [6.0] * 4
    assert list(model.state_dict()) == ["weight"]
    assert [name for name, _ in model.named_parameters()] == ["weight"]
    assert next(model.parameters()) is module.weight
    assert (model.factor, model.training) == (3, False)
    model.load_state_dict({"weight": torch.ones(4)})
    assert model(torch.ones(4)).tolist() == [3.0] * 4
    assert not hasattr(model, "no_such_attribute")


def test_what_is_chained_stays_the_compiled_one(pair):
    _, model = pair
    assert model.eval() is model
    assert model.to("cpu").requires_grad_(requires_grad=False) is model
    assert model(torch.ones(4)).tolist() == [6.0] * 4


def test_a_change_on_purpose_is_rechecked(pair):
    module, model = pair
    model.recheck()
    model(torch.ones(4))
    module.factor = 4
    with pytest.raises(GuardError, match="factor"):
        model.recheck()
