"""Guard kinds: what each describes, when it fails, and its message."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cgtool.errors import GuardError
from cgtool.guards.kinds import NoRuleError, are_apart, check, describe, equal_json, evaluate
from cgtool.guards.sources import Roots
from cgtool.plan.records import Guard

pytestmark = pytest.mark.torch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.eps = 1e-6
        self.table = {"a": 1, (0, 1): 2}
        self.kinds = {dict: 1}
        self.names = ["x", "y"]
        self.mask = torch.zeros(2, 3)
        self.other = self.mask
        self.counter = iter(range(3))

    def forward(self, x):
        return self.layer(x) * self.eps


@pytest.fixture
def model():
    return Model()


def seen(model, source, kind):
    return evaluate(Guard(source=source, kind=kind, expected=None), Roots(model, model.forward))


SEES = {
    ("self.eps", "value"): ["f", "1e-06"],
    ("self.layer", "type"): "torch.nn.modules.linear:Linear",
    ("self.names", "length"): ["builtins:list", 2],
    ("self.counter", "length"): ["builtins:range_iterator", 3],
    ("self.table", "keys"): ["a", ["t", 0, 1]],
    ("self.names", "empty"): False,
    ("self._forward_hooks", "empty"): True,
    ("self.layer", "hooks"): 0,
    ("self.table", 'contains:"a"'): True,
    ("self.table", 'contains:"b"'): False,
    ("self.table", 'contains:["t", 0, 1]'): True,
    ("self.kinds", 'contains:["type", "builtins:dict"]'): True,
    ("self.kinds", 'contains:["type", "builtins:list"]'): False,
    ("self.kinds", 'contains:["plain", "typing:_SpecialForm", "typing.Union"]'): False,
    ("self.table", "contains:null"): False,
    ("self.layer", "hasattr:weight"): True,
    ("self.layer", "hasattr:scale"): False,
    ("self", "absent:forward"): True,
    ("self", "absent:eps"): False,
    ("self.mask", "tensor"): ["torch:Tensor", "float32", [2, 3], [3, 1], "cpu"],
    ("self.mask", "same:self.other"): True,
    ("self.mask", "same:self.layer.weight"): False,
    ("self.mask", "apart:self.other"): False,
    ("self.mask", "apart:self.layer.weight"): True,
    ("state:default_dtype", "state"): "float32",
}


@pytest.mark.parametrize(("source", "kind"), SEES)
def test_a_kind_describes(model, source, kind):
    found = seen(model, source, kind)
    assert equal_json(found, SEES[source, kind]), found
    assert json.loads(json.dumps(found)) == found


def test_code_is_read_from_methods_and_functions(model):
    digest = seen(model, "self.forward", "code")
    assert digest == describe("code", Model.forward)
    assert digest == describe("code", Model.forward.__code__)
    assert digest != describe("code", Model.__init__)


def set_eps(model):
    model.eps = 1e-5


def set_true(model):
    model.eps = True


def replace_layer(model):
    model.layer = nn.Identity()


def add_name(model):
    model.names.append("z")


def add_key(model):
    model.table["b"] = 3


def drop_key(model):
    del model.table["a"]


def add_hook(model):
    model.layer.register_forward_hook(lambda *_: None)


def add_pre_hook(model):
    model.layer.register_forward_pre_hook(lambda *_: None)


def add_attribute(model):
    model.layer.scale = 1


def patch_forward(model):
    model.forward = lambda x: x


def other_shape(model):
    model.mask = torch.zeros(3, 2)


def untie(model):
    model.other = model.mask.clone()


def share(model):
    model.names = model.mask.view(-1)


def empty_names(model):
    model.names.clear()


def remove_eps(model):
    del model.eps


def unwritable(model):
    model.eps = object()


CHANGES = [
    ("self.eps", "value", set_eps, "eps was 1e-06 when this was compiled and is 1e-05 now"),
    ("self.eps", "value", set_true, "eps was 1e-06 when this was compiled and is True now"),
    ("self.eps", "value", remove_eps, "eps was there when this was compiled and is gone now"),
    ("self.eps", "value", unwritable, "builtins:object"),
    ("self.layer", "type", replace_layer, "layer was of type torch.nn.modules.linear:Linear .*:Identity now"),
    ("self.names", "length", add_name, "names was of type builtins:list with 2 elements .* with 3 elements now"),
    ("self.table", "keys", add_key, "table was a dict with the keys 'a', .* 'b' now"),
    ("self.names", "empty", empty_names, "names was not empty when"),
    ("self.layer", "hooks", add_hook, "layer had no hooks when this was compiled and has 1 now"),
    ("self.layer", "hooks", add_pre_hook, "layer had no hooks when this was compiled and has 1 now"),
    ("self.table", 'contains:"a"', drop_key, 'table had the key "a" when'),
    ("self.table", 'contains:"b"', add_key, 'table did not have the key "b" when'),
    ("self.layer", "hasattr:scale", add_attribute, "layer did not have an attribute scale when"),
    ("self", "absent:forward", patch_forward, r"the model\.forward was not set on the object itself when"),
    ("self.mask", "tensor", other_shape, r"mask was a float32 tensor of shape \(2, 3\) .* \(3, 2\) .* now"),
    ("self.mask", "same:self.other", untie, "mask and other were one object when"),
    ("self.forward", "code", patch_forward, "the code of forward has changed"),
]


@pytest.mark.parametrize(("source", "kind", "change", "words"), CHANGES)
def test_a_change_fails_with_a_message(model, source, kind, change, words):
    guard = Guard(source=source, kind=kind, expected=seen(model, source, kind))
    assert check([guard], Roots(model, model.forward)) == []
    change(model)
    (failure,) = check([guard], Roots(model, model.forward))
    assert failure.guard is guard
    assert re.search(words, failure.sentence), failure.sentence


WRONG_THINGS = [None, 5, "text", [], {}, len, nn.Linear, torch.zeros(2)]


@pytest.mark.parametrize("thing", WRONG_THINGS, ids=repr)
@pytest.mark.parametrize(("source", "kind"), [key for key in SEES if key[0] != "self" and ":" not in key[0]])
def test_an_unexpected_object_is_a_failure_and_never_a_crash(model, source, kind, thing):
    guard = Guard(source=source, kind=kind, expected=SEES[source, kind])
    name = source.removeprefix("self.")
    if name == "_forward_hooks":
        return
    vars(model).pop(name, None)
    model._modules.pop(name, None)
    vars(model)[name] = thing
    for failure in check([guard], Roots(model, model.forward)):
        assert name in failure.sentence or type(thing).__name__ in failure.sentence


def test_all_failures_are_reported_in_order(model):
    guards = [
        Guard(source="self.eps", kind="value", expected=["f", "2.0"]),
        Guard(source="self.nothing", kind="value", expected=1),
        Guard(source="self.layer", kind="type", expected="torch.nn.modules.linear:Linear"),
        Guard(source="self.names", kind="empty", expected=True),
    ]
    failures = check(guards, Roots(model, model.forward))
    assert [f.guard.source for f in failures] == ["self.eps", "self.nothing", "self.names"]


def test_a_kind_of_another_version_is_an_error_for_describe_and_a_failure_for_check(model):
    with pytest.raises(GuardError, match=r"unknown kind 'nonsense'; it was written by another version"):
        describe("nonsense", 1)
    guard = Guard(source="self.eps", kind="nonsense", expected=1)
    (failure,) = check([guard], Roots(model, model.forward))
    assert "nonsense" in failure.sentence


def test_equality_is_that_of_json():
    assert equal_json([1, "a", [None]], [1, "a", [None]])
    for one, other in ((1, True), (1, 1.0), (0, False), ([1], [True]), ([1, 2], [1]), (None, 0), ("1", 1)):
        assert not equal_json(one, other)


def test_views_of_one_storage_are_not_apart():
    x = torch.zeros(4)
    assert not are_apart(x[:2], x[2:])
    assert not are_apart(x, x.view(2, 2))
    assert are_apart(x, x.clone())


@pytest.mark.parametrize("function", [re.compile, len, lambda: 3], ids=["library", "builtin", "own"])
def test_only_transformers_probes_are_called(function):
    with pytest.raises(NoRuleError, match="not a transformers probe"):
        describe("answers", function)


@pytest.mark.parametrize("make", [nn.Parameter, lambda tensor: tensor], ids=["parameter", "tensor"])
def test_a_fake_tensor_is_described_as_a_real_tensor(make):
    real = make(torch.zeros(2, 3))
    with FakeTensorMode():
        fake = make(torch.zeros(2, 3))
    assert describe("tensor", fake) == describe("tensor", real)
    assert describe("type", fake) == describe("type", real)
