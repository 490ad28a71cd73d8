"""Models whose changes no load could notice are refused at warm, by name."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from trace_harness import agree, plan_of, served

import cgtool
from cgtool.errors import CgtoolError, TraceError
from cgtool.guards.kinds import describe

pytestmark = pytest.mark.torch

GAIN = 2.0


@torch.compiler.assume_constant_result
def assumed():
    return GAIN


class Numbered(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = [object(), object()]

    def forward(self, x):
        return x * len({id(part) for part in self.parts})


class Assuming(nn.Module):
    def forward(self, x):
        return x * assumed()


class Method(nn.Module):
    @torch.compiler.assume_constant_result
    def factor(self):
        return GAIN

    def forward(self, x):
        return x * self.factor()


class Plain(nn.Module):
    def forward(self, x):
        return x + 1


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param(Numbered, r"test_trace_refusals\.py:\d+, in Numbered.*id\(\) returns a different number", id="id"),
        pytest.param(Assuming, r"assumed is marked with assume_constant_result", id="constant function"),
        pytest.param(Method, r"Method\.factor is marked with assume_constant_result", id="constant method"),
    ],
)
def test_unguardable_code_is_refused_by_name(model, words):
    with pytest.raises(TraceError, match=words):
        plan_of(model(), torch.rand(3, 4))


@pytest.mark.parametrize("name", ["__call__", "_wrapped_call_impl", "_call_impl"])
def test_a_replaced_module_call_is_refused_by_name(name, monkeypatch):
    monkeypatch.setattr(nn.Module, name, lambda self, *args: self.forward(*args) * 2)
    with pytest.raises(TraceError, match=rf"torch\.nn\.Module\.{name} was replaced"):
        plan_of(Plain(), torch.rand(3, 4))


def test_transformers_probes_are_evaluated_again_at_load(tmp_path, monkeypatch):
    probes = pytest.importorskip("transformers.utils.import_utils")
    asked = probes.is_torch_distributed_available.__wrapped__

    class Asking(nn.Module):
        def forward(self, x):
            return x + 1 if asked() else x - 1

    model, x = Asking(), torch.ones(2)
    agree(served(tmp_path, model, x), model, x)
    assert describe("answers", asked) == [True]
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert describe("answers", asked) == [False]
    with pytest.raises(CgtoolError, match=r"asked was \[true\] when this was compiled and is \[false\] now"):
        cgtool.load(model, cache_dir=tmp_path)
