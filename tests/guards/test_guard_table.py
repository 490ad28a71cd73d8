"""Guard tables give the same results and messages as checking each guard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cgtool.guards import table
from cgtool.guards.kinds import check, describe
from cgtool.guards.sources import Roots
from cgtool.guards.table import failures_of
from cgtool.plan.grammar import canonical_json
from cgtool.plan.records import Guard, GuardTable, Plan, Variant, parse_plan
from cgtool.plan.writing import encode_plan

pytestmark = pytest.mark.torch

SCALE = 2
SCALES = {"a|b": 3, "c.d": 4}


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-6
        self.flag = True
        self.sizes = [4, 2]
        self.names = {"a": 1, "b.c": 2}

    def forward(self, x):
        return x * self.eps


class Layer(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.norm = Norm()
        self.shared = shared

    def forward(self, x):
        return self.norm(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        shared = Norm()
        self.layers = nn.ModuleList(Layer(shared) for _ in range(6))

    def forward(self, x):
        return x


def facts(model):
    """Return guards on `model` as the tracer records them, of every common kind."""
    roots = Roots(model, model.forward)
    name = __name__
    sources = [
        ("self|type.forward", "value"),
        ("self|type.__call__", "value"),
        (f"global:{name}:SCALE", "value"),
        (f'global:{name}:SCALES["a|b"]', "value"),
        (f'global:{name}:SCALES["c.d"]', "value"),
        (f"module:{name}", "value"),
    ]
    for index in range(6):
        norm = f"self.layers.{index}.norm"
        for module in (f"self.layers.{index}", norm):
            sources += [(module, "type"), (module, "hooks"), (module, "absent:forward")]
        sources += [
            (f"{norm}.eps", "value"),
            (f"{norm}.flag", "value"),
            (f"{norm}.sizes", "length"),
            (f"{norm}.sizes[1]", "value"),
            (f"{norm}.names", "keys"),
            (f"{norm}.names", 'contains:"a"'),
            (f'{norm}.names["b.c"]', "value"),
            (f"{norm}.names|keys[1]", "value"),
            (f"{norm}.names|values[0]", "value"),
            (norm, "hasattr:eps"),
        ]
    guards = [Guard(source=s, kind=k, expected=describe(k, roots.resolve(s))) for s, k in sources]
    same = "same:self.layers.0.shared"
    return [*guards, *(Guard(source=f"self.layers.{i}.shared", kind=same, expected=True) for i in range(1, 6))]


def variant(name, guards):
    return Variant(
        name=name,
        fixed={},
        dims={},
        symbols=(),
        relations=(),
        inputs=(),
        model_guards=tuple(guards),
        call_guards=(),
        steps=(),
        output=["const", None],
    )


def through_json(*variants):
    plan = Plan(method="forward", qualname="m:C", variants=variants, graphs={})
    return parse_plan(encode_plan(plan), path=Path("plan.json"))


def spelled(guards):
    return sorted(canonical_json([guard.source, guard.kind, guard.expected]) for guard in guards)


def test_each_variant_gets_its_own_guards_back():
    guards = facts(Model())
    extra = Guard(source="self.training", kind="value", expected=True)
    read = through_json(variant("all", guards), variant("fewer", guards[3:]), variant("more", [*guards, extra]))
    assert all(isinstance(v.model_guards, GuardTable) for v in read.variants)
    for found, given in zip(read.variants, (guards, guards[3:], [*guards, extra]), strict=True):
        assert spelled(found.model_guards) == spelled(given)
        assert len(found.model_guards) == len(given)
    assert [len(v.model_guards.groups) for v in read.variants] < [60, 60, 60]


def test_guards_that_hold_need_no_slow_check(monkeypatch):
    model = Model()
    read = through_json(variant("one", facts(model)))
    looked_at = []
    monkeypatch.setattr(table, "check", lambda guards, roots: looked_at.extend(guards) or check(looked_at, roots))
    assert failures_of([v.model_guards for v in read.variants], Roots(model, model.forward)) == []
    assert looked_at == []


class Other(Norm):
    pass


def set_item(model):
    model.layers[3].norm.sizes[1] = 3


def shadow(model):
    model.layers[2].norm.forward = lambda x: x


CHANGES = [
    pytest.param(lambda m: setattr(m.layers[5].norm, "eps", 1e-5), r"layers.5.norm.eps was 1e-06", id="float"),
    pytest.param(lambda m: setattr(m.layers[1].norm, "flag", 1), r"layers.1.norm.flag was True", id="1 is not True"),
    pytest.param(set_item, r"layers.3.norm.sizes\[1\] was 2", id="list item"),
    pytest.param(lambda m: m.layers[2].norm.names.update({"b.c": 5}), r"names\[.b.c.\] was 2", id="quoted key"),
    pytest.param(shadow, r"layers.2.norm.forward was not set", id="method of the object"),
    pytest.param(lambda m: setattr(m.layers[1], "norm", Other()), r"layers.1.norm was of type", id="class"),
    pytest.param(lambda m: setattr(m.layers[1], "shared", Norm()), r"one object", id="untied"),
    pytest.param(lambda m: m.layers[1].norm.register_forward_hook(print), r"layers.1.norm had no hooks", id="hook"),
    pytest.param(lambda m: m.layers.__delitem__(5), r"layers.5 was there", id="fewer layers"),
]


@pytest.mark.parametrize(("change", "says"), CHANGES)
def test_a_change_is_reported_as_by_the_slow_check(change, says):
    model = Model()
    guards = facts(model)
    read = through_json(variant("one", guards), variant("two", guards[2:]))
    change(model)
    roots = Roots(model, model.forward)
    found = [failure.sentence for failure in failures_of([v.model_guards for v in read.variants], roots)]
    assert sorted(found) == sorted(failure.sentence for failure in check(guards, Roots(model, model.forward)))
    with pytest.raises(AssertionError, match=says):
        raise AssertionError("\n".join(found))


def test_a_replaced_method_is_reported(monkeypatch):
    model = Model()
    read = through_json(variant("one", facts(model)))
    monkeypatch.setattr(Model, "forward", lambda self, x: x + 1)
    [failure] = failures_of([v.model_guards for v in read.variants], Roots(model, model.forward))
    assert "forward" in failure.sentence


def test_a_changed_global_is_reported(monkeypatch):
    model = Model()
    read = through_json(variant("one", facts(model)))
    monkeypatch.setitem(globals(), "SCALE", torch.float32)
    [failure] = failures_of([v.model_guards for v in read.variants], Roots(model, model.forward))
    assert "SCALE was 2" in failure.sentence
