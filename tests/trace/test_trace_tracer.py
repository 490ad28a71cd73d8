"""Functions that Dynamo substitutes for a model's calls are not guarded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from trace_harness import agree, plan_of, served

from cgtool.trace import _torch as private
from cgtool.trace.capture import slow_ops

pytestmark = pytest.mark.torch


@dataclass
class Output:
    hidden: torch.Tensor
    options: dict


class Model(nn.Module):
    """Creates a dataclass and updates a dict: Dynamo substitutes its own functions for both."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, **options):
        found = OrderedDict(scale=2.0)
        found.update(options)
        return Output(hidden=self.linear(x) * found["scale"], options=found)


def test_no_guard_refers_to_dynamo_and_the_model_is_served(tmp_path):
    x = torch.ones(2, 4)
    plan = plan_of(Model(), x, extra=1).plan
    sources = [guard.source for variant in plan.variants for guard in variant.model_guards]
    assert sources
    assert [source for source in sources if "torch._dynamo" in source] == []
    model = Model().eval()
    agree(served(tmp_path / "cache", model, x, extra=1), model, x, extra=1)


def test_torchs_own_ops_cause_no_note_on_registration():
    assert private.made_by_custom_op("prims::add")  # as torch makes them
    assert slow_ops(["prims.add.default", "aten.add"]) == ()
