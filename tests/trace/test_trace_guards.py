"""Conversion of Dynamo's guards to the plan's; guards without a rule are reported."""

from __future__ import annotations

import functools
import types

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from trace_harness import plan_of

import cgtool
from cgtool.errors import CacheMissError, TraceError
from cgtool.plan.records import Guard
from cgtool.trace.guards import _IMPLIED, _KINDS, _WITH_ARGUMENT, GuardRecorder, combined, split_guards
from cgtool.trace.sources import Frame

pytestmark = pytest.mark.torch


class Opaque:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Opaque)

    def __hash__(self):
        return 1


class HasOpaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = {Opaque(1): 2.0}

    def forward(self, x):
        for value in self.table.values():
            x = x * value
        return x


def test_a_guard_that_cannot_be_stored_is_reported():
    with pytest.raises(TraceError) as caught:
        plan_of(HasOpaque(), torch.rand(3, 4))
    assert "table" in str(caught.value) or "Opaque" in str(caught.value)


FRAME = Frame(owner="self", free=frozenset(), module="m", global_names={})


def entry(kind, value=None, create=None):
    source = __import__("torch")._dynamo.source
    made = source.AttrSource(base=source.LocalSource("self", is_input=True), member="thing")
    original = types.SimpleNamespace(originating_source=made, create_fn=create or (lambda: None))
    return types.SimpleNamespace(
        guard_type=kind, name="L['self'].thing", value=value, has_value=True, orig_guard=original
    )


def recorded(*entries):
    recorder = GuardRecorder(frame=lambda: FRAME, is_input=lambda _: False)
    assert recorder.filter(entries) == [True] * len(entries)
    return recorder.finish()


VALUES = {
    "value": 3,
    "type": nn.Linear(1, 1),
    "length": [1, 2],
    "keys": {"a": 1},
    "empty": {},
    "tensor": torch.zeros(2),
}


@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_every_guard_type_of_dynamo_has_a_rule(kind):
    (guard,) = recorded(entry(kind, VALUES[_KINDS[kind]]))
    assert (guard.source, guard.kind) == ("self.thing", _KINDS[kind])


@pytest.mark.parametrize("kind", sorted(set(_WITH_ARGUMENT) - {"HASATTR"}))
def test_guard_types_with_an_argument_keep_it(kind):
    argument, word = _WITH_ARGUMENT[kind]
    create = functools.partial(lambda **_: None, **{argument: "a"})
    (guard,) = recorded(entry(kind, {"a": 1}, create))
    assert guard.kind == (f'{word}:"a"' if word == "contains" else f"{word}:a")
    assert guard.expected == (kind not in {"DICT_NOT_CONTAINS", "SET_NOT_CONTAINS"})
    with pytest.raises(TraceError, match="cannot tell what this guard checks"):
        recorded(entry(kind, {"a": 1}))


@pytest.mark.parametrize("kind", sorted(_IMPLIED))
def test_implied_guard_types_add_no_guard(kind):
    assert recorded(entry(kind, object())) == ()


def test_unknown_guard_types_and_values_are_reported():
    with pytest.raises(TraceError, match=r"depends on 2 facts") as caught:
        recorded(entry("BRAND_NEW_MATCH", 1), entry("EQUALS_MATCH", object()), entry("EQUALS_MATCH", 1))
    text = str(caught.value)
    assert "BRAND_NEW_MATCH on L['self'].thing: cgtool has no rule for this kind of guard (thing)" in text
    assert "EQUALS_MATCH on L['self'].thing: A value of type builtins:object cannot be encoded as data" in text
    assert text.endswith("and warm again.")


def test_each_module_without_hooks_has_one_hook_guard():
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    guards = [Guard(source=f"self.{m}.{n}", kind="empty", expected=True) for m in "ab" for n in names]
    other = Guard(source="self.a._forward_hooks", kind="empty", expected=False)
    assert combined(guards, ()) == tuple(Guard(source=f"self.{m}", kind="hooks", expected=0) for m in "ab")
    assert combined([other], ()) == (other,)


def scaled(factor):
    return lambda module, args, output: output * factor


def test_hooks_of_submodules_are_guarded_by_order_and_code(tmp_path):
    def made(*factors):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval().requires_grad_(requires_grad=False)
        for factor in factors:
            model[0].register_forward_hook(scaled(factor))
        return model

    x, config = torch.rand(3, 4), cgtool.CompilationConfig(adaptor="eager", jobs=0)
    cgtool.compile(made(2, 3), example_args=(x,), config=config, cache_dir=tmp_path)
    made(2)  # hooks are numbered through the process
    model = made(2, 3)
    with torch.no_grad():
        assert torch.equal(cgtool.load(model, cache_dir=tmp_path)(x), model(x))
    for factors, words in (((2,), "_forward_hooks"), ((), "_forward_hooks"), ((2, 4), "was 3")):
        with pytest.raises(CacheMissError, match=words):
            cgtool.load(made(*factors), cache_dir=tmp_path)


def test_call_guards_and_model_guards_are_separated():
    ours = [Guard(source=s, kind="value", expected=1) for s in ("self.a", "global:m:a", "free:x", "arg:x", "arg:y.z")]
    model, call = split_guards(ours)
    assert [guard.source for guard in model] == ["self.a", "global:m:a", "free:x"]
    assert [guard.source for guard in call] == ["arg:x", "arg:y.z"]
