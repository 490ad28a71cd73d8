"""Dynamo's guards as the plan's: what a model reads becomes a guard that load checks; what has no rule is named."""

from __future__ import annotations

import enum
import functools
import math
import re
import types

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from trace_harness import agree, plan_of, served

import cgtool
from cgtool.errors import CacheMissError, TraceError
from cgtool.guards.sources import parse_source
from cgtool.plan.records import Guard
from cgtool.trace.guards import _IMPLIED, _KINDS, _WITH_ARGUMENT, GuardRecorder, combined, split_guards
from cgtool.trace.sources import Frame

pytestmark = pytest.mark.torch


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


def helper(x):
    return x + 1


def other_helper(x):
    return x + 2


FACTOR = 2.0
TABLE = {"a": 1.5, "b": 2.5}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.eps = 1e-6
        self.flag = True
        self.nothing = None
        self.name = "tanh"
        self.sizes = [4, 1]
        self.pair = (2, 2)
        self.config = types.SimpleNamespace(alpha=0.5, inner=types.SimpleNamespace(beta=3))
        self.options = {"scale": 2.0, "shift": 1}
        self.mode = Mode.FAST
        self.dtype = torch.float32
        self.function = helper
        self.partial = functools.partial(math.pow, 2.0)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = x * (1 + self.eps) if self.flag else x
        x = x if self.nothing is None else x + self.nothing
        x = getattr(torch, self.name)(x).to(self.dtype)
        x = x.view(-1, *self.sizes).squeeze(-1) * self.pair[0]
        x = x * self.config.alpha + self.config.inner.beta
        if "scale" in self.options:
            x = x * self.options["scale"]
        if "bias" not in self.options:
            x = x + 1
        if hasattr(self, "extra"):
            x = x + self.extra
        x = x * 2 if self.mode is Mode.FAST else x
        return self.function(x) * FACTOR + TABLE["a"]


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    root = tmp_path_factory.mktemp("guards")
    with torch.no_grad():
        model = Model()
        loaded = served(root, model, torch.rand(3, 4), dynamic={"x": {0: "n"}})
        agree(loaded, model, torch.rand(5, 4))
    return root


def setter(name, value):
    return lambda model: setattr(model, name, value)


def add_layer(model):
    model.layers.append(nn.Identity())


def swap_layer(model):
    model.layers[0] = nn.Sequential(nn.Linear(4, 4))


def add_option(model):
    model.options["bias"] = 1


def change_option(model):
    model.options["scale"] = 3.0


def drop_option(model):
    del model.options["scale"]


def hook(model):
    model.layers[1].register_forward_hook(lambda *_: None)


def own_forward(model):
    model.layers[1].forward = lambda x: x


CHANGES = {
    "a number": (setter("eps", 1e-5), "eps was 1e-06"),
    "a flag": (setter("flag", False), "flag was True"),
    "a flag that is a number": (setter("flag", 1), "flag was True"),
    "None": (setter("nothing", 1.0), "nothing was None"),
    "text": (setter("name", "sigmoid"), "name was 'tanh'"),
    "a list": (setter("sizes", [2, 2]), r"sizes\[0\] was 4"),
    "a longer list": (setter("sizes", [4, 1, 1]), "sizes was of type builtins:list with 2 elements"),
    "a tuple": (setter("pair", (3, 2)), r"pair was \(2, 2\)"),
    "an attribute of an object": (lambda m: setattr(m.config, "alpha", 0.25), "config.alpha was 0.5"),
    "of an object in it": (lambda m: setattr(m.config.inner, "beta", 4), "config.inner.beta was 3"),
    "a key": (change_option, r"options.*scale.* was 2\.0"),
    "a key less": (drop_option, "options"),
    "a key more": (add_option, "options"),
    "an attribute more": (setter("extra", 1.0), "extra"),
    "an enum": (setter("mode", Mode.SLOW), "mode was .*Mode.FAST"),
    "a dtype": (setter("dtype", torch.float64), "dtype was float32"),
    "a function": (setter("function", other_helper), "function was .*helper"),
    "an object gone": (lambda m: delattr(m, "eps"), "eps was there when this was compiled and is gone now"),
    "a layer more": (add_layer, "layers"),
    "another layer": (swap_layer, r"layers\.0"),
    "a hook": (hook, r"layers\.1 had no hooks"),
    "a forward of its own": (own_forward, r"layers\.1.*forward"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_model_reads_is_a_guard(warmed, name):
    change, words = CHANGES[name]
    model = Model().eval()
    cgtool.load(model, cache_dir=warmed)
    change(model)
    with pytest.raises(CacheMissError) as caught:
        cgtool.load(model, cache_dir=warmed)
    assert re.search(words, "\n".join(caught.value.reasons)), caught.value.reasons


def test_globals_are_guards(warmed, monkeypatch):
    model = Model().eval()
    for name, value in (("FACTOR", 3.0), ("TABLE", {"a": 9.0}), ("helper", other_helper)):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, value)
            if name == "helper":
                model.function = other_helper
            with pytest.raises(CacheMissError, match=name):
                cgtool.load(model, cache_dir=warmed)
    model.function = helper
    cgtool.load(model, cache_dir=warmed)


def test_what_the_model_does_not_read_is_no_guard(warmed, monkeypatch):
    model = Model().eval()
    model.unused = object()
    model.config.other = 1
    monkeypatch.setitem(globals(), "UNUSED", 1)
    cgtool.load(model, cache_dir=warmed)


def test_every_guard_of_a_plan_can_be_read_and_said():
    plan = plan_of(Model(), torch.rand(3, 4), dynamic={"x": {0: "n"}}).plan
    for variant in plan.variants:
        assert variant.model_guards
        for guard in (*variant.model_guards, *variant.call_guards):
            parse_source(guard.source)
        assert not any(guard.source.startswith("arg:") for guard in variant.model_guards)
        once = {(guard.source, guard.kind): guard.expected for guard in variant.model_guards}
        assert all(once[guard.source, guard.kind] == guard.expected for guard in variant.model_guards)


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


def test_a_fact_that_cannot_be_kept_is_named():
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
def test_every_kind_of_dynamo_has_a_rule_that_writes_a_guard(kind):
    (guard,) = recorded(entry(kind, VALUES[_KINDS[kind]]))
    assert (guard.source, guard.kind) == ("self.thing", _KINDS[kind])


@pytest.mark.parametrize("kind", sorted(set(_WITH_ARGUMENT) - {"HASATTR"}))
def test_kinds_with_an_argument_keep_it(kind):
    argument, word = _WITH_ARGUMENT[kind]
    create = functools.partial(lambda **_: None, **{argument: "a"})
    (guard,) = recorded(entry(kind, {"a": 1}, create))
    assert guard.kind == (f'{word}:"a"' if word == "contains" else f"{word}:a")
    assert guard.expected == (kind not in {"DICT_NOT_CONTAINS", "SET_NOT_CONTAINS"})
    with pytest.raises(TraceError, match="cannot tell what this guard looks for"):
        recorded(entry(kind, {"a": 1}))


@pytest.mark.parametrize("kind", sorted(_IMPLIED))
def test_kinds_that_are_implied_leave_no_guard(kind):
    assert recorded(entry(kind, object())) == ()


def test_a_kind_without_a_rule_and_a_value_without_one_are_named():
    with pytest.raises(TraceError, match=r"2 of the facts") as caught:
        recorded(entry("BRAND_NEW_MATCH", 1), entry("EQUALS_MATCH", object()), entry("EQUALS_MATCH", 1))
    text = str(caught.value)
    assert "BRAND_NEW_MATCH on L['self'].thing: cgtool has no rule for this kind of guard (thing)" in text
    assert "EQUALS_MATCH on L['self'].thing: A value of type builtins:object cannot be written down" in text
    assert text.endswith("and warm again.")


def test_guards_on_hooks_are_one_for_each_module():
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    guards = [Guard(source=f"self.{m}.{n}", kind="empty", expected=True) for m in "ab" for n in names]
    other = Guard(source="self.a._forward_hooks", kind="empty", expected=False)
    assert combined(guards, ()) == tuple(Guard(source=f"self.{m}", kind="hooks", expected=0) for m in "ab")
    assert combined([other], ()) == (other,)


def scaled(factor):
    return lambda module, args, output: output * factor


def test_hooks_of_parts_are_guarded_by_their_order_and_what_they_do(tmp_path):
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


def test_guards_of_a_call_are_told_from_those_of_the_model():
    ours = [Guard(source=s, kind="value", expected=1) for s in ("self.a", "global:m:a", "free:x", "arg:x", "arg:y.z")]
    model, call = split_guards(ours)
    assert [guard.source for guard in model] == ["self.a", "global:m:a", "free:x"]
    assert [guard.source for guard in call] == ["arg:x", "arg:y.z"]
