"""Guards on reads that Dynamo folds: classes, objects, absence, identity, globals."""

from __future__ import annotations

import functools
import operator
import re
import sys
import types

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from trace_harness import agree, served

import cgtool
from cgtool.errors import CacheMissError

pytestmark = pytest.mark.torch

HERE = sys.modules[__name__]


class Plain:
    pass


class Slotted:
    __slots__ = ("one", "two")

    def __init__(self):
        self.one = 1.0


class BaseConfig:
    scale = 2.0


class Config(BaseConfig):
    pass


def with_default(x, factor=1.5):
    return x * factor


with_default.extra = 0.5


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * self.config.scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = Config()
        self.blocks = nn.ModuleList(Block(config) for _ in range(2))
        self.slotted = Slotted()
        self.plain = Plain()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = x * getattr(self.slotted, "two", 3.0) * self.slotted.one
        x = x + getattr(self.plain, "late", 1.0) + getattr(HERE, "UNDEFINED", 1.0)
        return with_default(x) * with_default.extra


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    root = tmp_path_factory.mktemp("touched")
    with torch.no_grad():
        served(root, Model(), torch.rand(3, 4), dynamic={"x": {0: "n"}})
    return root


def on(owner, name, value):
    return lambda model, patch: patch.setattr(owner, name, value, raising=False)


def run(function):
    return lambda model, patch: function(model)


#: In which words a change is told; tests/soundness has many more changes.
CHANGES = {
    "an attribute of a base class": (on(BaseConfig, "scale", 3.0), "BaseConfig: member scale has changed"),
    "an attribute that a subclass overrides": (on(Config, "scale", 3.0), "Config: member scale was added"),
    "an attribute of a class set on an object": (
        run(lambda m: setattr(m.blocks[1].config, "scale", 3.0)),
        "blocks.0.config.scale was not set",
    ),
    "one object of two": (run(lambda m: setattr(m.blocks[1], "config", Config())), r"blocks\.\d\.config"),
    "a slot that was empty": (run(lambda m: setattr(m.slotted, "two", 4.0)), "slotted.two was not set"),
    "a value in a slot": (run(lambda m: setattr(m.slotted, "one", 4.0)), "slotted.one was 1.0"),
    "an attribute that was absent": (run(lambda m: setattr(m.plain, "late", 2.0)), "plain.late was not set"),
    "a global that was absent": (on(HERE, "UNDEFINED", 4.0), "UNDEFINED was not set"),
    "a builtin shadowed by a global": (on(HERE, "getattr", lambda *_: 2.0), "getattr was not set"),
    "an attribute of a function": (on(with_default, "extra", 1.0), r"with_default\.extra was 0\.5"),
    "a default of a function": (on(with_default, "__defaults__", (2.0,)), "with_default"),
    "an operator of torch.Tensor": (on(torch.Tensor, "__add__", lambda self, _: self), "Tensor.__add__ was not set"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_reads_that_dynamo_folds_are_guarded(warmed, name, monkeypatch):
    change, words = CHANGES[name]
    model = Model().eval()
    change(model, monkeypatch)
    with pytest.raises(CacheMissError) as caught:
        cgtool.load(model, cache_dir=warmed)
    assert re.search(words, "\n".join(caught.value.reasons)), caught.value.reasons


def test_attributes_that_no_code_names_are_not_guarded(warmed, monkeypatch):
    model = Model().eval()
    model.plain.unheard_of = 1
    model.unheard_of = types.SimpleNamespace(a=1)
    monkeypatch.setattr(HERE, "UNHEARD_OF", 1, raising=False)
    cgtool.load(model, cache_dir=warmed)


class Reticent:
    def __init__(self):
        self.width, self.gain = 2, 3.0

    def __getattribute__(self, name):
        if name == "width":
            raise RuntimeError(name)
        return super().__getattribute__(name)


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.width = Reticent(), 4

    def forward(self, x):
        return x * self.width * self.config.gain


class Positioned(nn.Module):
    """A counting cache: Dynamo traces `inspect.unwrap` in it, which reads the recursion limit."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(16, 4))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        position = self.position.item()
        self.table[position : position + x.shape[0]] = x
        self.position += x.shape[0]
        return self.table.sum(0)


def test_the_recursion_limit_raised_by_inductor_is_not_guarded(tmp_path):
    model, x, usual = Positioned(), torch.rand(3, 4), sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(usual + 1000)
        loaded = served(tmp_path, model, x, dynamic={"x": {0: ("rows", 2, None)}})
    finally:
        sys.setrecursionlimit(usual)
    with torch.no_grad():
        assert torch.equal(loaded(x), x.sum(0))


def test_attributes_hidden_by_a_lookup_are_guarded_in_the_instance_dict(tmp_path):
    model, x = Asking(), torch.ones(2)
    agree(served(tmp_path, model, x), model, x)
    vars(model.config)["width"] = 5
    with pytest.raises(CacheMissError, match="width"):
        cgtool.load(model, cache_dir=tmp_path)


class Making(dict):
    def __getitem__(self, name):
        return super().__getitem__(name)()


MAKERS = Making(relu=nn.ReLU, silu=nn.SiLU)


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation = MAKERS["relu"]

    def forward(self, x):
        return MAKERS["silu"](x) if self.activation is None else self.activation(x)


def test_a_dict_with_computed_items_is_guarded_by_its_stored_items(tmp_path, monkeypatch):
    model, x = Choosing(), torch.ones(2)
    agree(served(tmp_path, model, x), model, x)
    monkeypatch.setitem(MAKERS, "silu", nn.GELU)
    with pytest.raises(CacheMissError, match="MAKERS"):
        cgtool.load(model, cache_dir=tmp_path)


doubled = functools.lru_cache(functools.partial(operator.mul, 2.0))  # a routine without a name


class Doubling(nn.Module):
    def forward(self, x):
        return x if doubled is None else x * 2.0


def test_a_routine_without_a_name_may_be_named(tmp_path):
    model, x = Doubling(), torch.ones(2)
    agree(served(tmp_path, model, x), model, x)


class Importing(dict):
    """Computes all it returns. Such a dict of transformers imports hundreds of modules when its values are read."""

    def __iter__(self):
        raise AssertionError("no trace enumerates what the class computes")

    keys = values = items = __iter__


IMPORTED = Importing(relu=nn.ReLU, silu=nn.SiLU)


class Looking(nn.Module):
    def forward(self, x):
        return x if "gelu" in IMPORTED else x + 1


def test_what_a_dict_subclass_computes_is_not_enumerated(tmp_path, monkeypatch):
    model, x = Looking(), torch.ones(2)
    agree(served(tmp_path, model, x), model, x)
    monkeypatch.setitem(IMPORTED, "gelu", nn.GELU)
    with pytest.raises(CacheMissError, match="IMPORTED"):
        cgtool.load(model, cache_dir=tmp_path)


OLD_NAMES = {"size": "width"}


class Renaming(type):
    """Renames what is set, as the metaclass of transformers' outputs does."""

    def __setattr__(cls, name, value):
        super().__setattr__(OLD_NAMES.get(name, name), value)


class Sizes(metaclass=Renaming):
    width = 3.0


class Widening(nn.Module):
    def forward(self, x):
        return x * Sizes.width


def test_what_a_metaclass_reads_to_create_classes_is_not_guarded(tmp_path, monkeypatch):
    model, x = Widening(), torch.ones(2)
    agree(served(tmp_path, model, x), model, x)
    monkeypatch.setitem(OLD_NAMES, "height", "width")
    agree(cgtool.load(model, cache_dir=tmp_path), model, x)
    Sizes.size = 4.0
    try:
        with pytest.raises(CacheMissError, match="width"):
            cgtool.load(model, cache_dir=tmp_path)
    finally:
        Sizes.size = 3.0


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.wrapped = nn.Linear(4, 4)
        self.scale = 2.0

    def forward(self, x):
        return self.wrapped(x)


class ReadingItself(Wrapping):
    def forward(self, x):
        return self.wrapped(x) * wrapped.scale  # noqa: F821 - a global that the test sets


def test_a_script_may_rebind_the_models_name_to_the_compiled_model(tmp_path, monkeypatch):
    """`wrapped = cgtool.compile(wrapped)`: `self.wrapped` in its forward is not this global."""
    options, x = {"cache_dir": tmp_path, "config": cgtool.CompilationConfig(adaptor="eager")}, torch.randn(2, 4)
    model = Wrapping().eval()
    monkeypatch.setattr(HERE, "wrapped", model, raising=False)
    compiled = cgtool.compile(model, example_args=(x,), **options)
    monkeypatch.setattr(HERE, "wrapped", compiled)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
        assert torch.equal(cgtool.load(model, **options)(x), model(x))
        x = torch.randn(5, 4)  # traced while the name refers to the compiled model
        assert torch.equal(cgtool.compile(model, example_args=(x,), **options)(x), model(x))


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = {"wrapped": 2.0}

    def forward(self, x):
        return x * self.scales["wrapped"] + (0.0 if wrapped is None else 1.0)  # noqa: F821 - a global that the test sets


def test_a_model_may_name_another_compiled_model_without_calling_it(tmp_path, monkeypatch):
    """A script compiles an encoder and a decoder, and the decoder has a key "encoder"."""
    options, x = {"cache_dir": tmp_path, "config": cgtool.CompilationConfig(adaptor="eager")}, torch.randn(2, 4)
    monkeypatch.setattr(HERE, "wrapped", cgtool.compile(Wrapping().eval(), example_args=(x,), **options), raising=False)
    model = Scaling().eval()
    cgtool.compile(model, example_args=(x,), **options)
    agree(cgtool.load(model, **options), model, x)
    monkeypatch.setattr(HERE, "wrapped", None)
    with pytest.raises(CacheMissError, match="wrapped"):
        cgtool.load(model, **options)


def test_a_model_that_reads_itself_through_a_global_is_guarded(tmp_path, monkeypatch):
    options = {"cache_dir": tmp_path, "config": cgtool.CompilationConfig(adaptor="eager")}
    model = ReadingItself().eval()
    monkeypatch.setattr(HERE, "wrapped", model, raising=False)
    cgtool.compile(model, example_args=(torch.randn(2, 4),), **options)
    monkeypatch.setattr(HERE, "wrapped", ReadingItself().eval())
    with pytest.raises(CacheMissError, match="were one object when this was compiled"):
        cgtool.load(model, **options)
