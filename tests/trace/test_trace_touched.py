"""What Dynamo folds without a guard is guarded: classes and objects as they live, absence, identity, globals."""

from __future__ import annotations

import abc
import dataclasses
import enum
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
MISSING = object()
LIMIT = 3


class Mode(enum.Enum):
    FAST = 2
    SLOW = 5


class Kind(abc.ABC):  # noqa: B024 - classes are registered with it
    pass


class Plain:
    pass


class Scaled:
    """A descriptor that holds a number."""

    def __init__(self, factor):
        self.factor = factor

    def __get__(self, owner, kind=None):
        return self.factor


class Meta(type):
    @property
    def width(cls):
        return 2


class Sized(metaclass=Meta):
    factor = Scaled(2.0)
    table = {"a": 1.0}  # noqa: RUF012 - what a model's class holds
    level = 1

    def __len__(self):
        return 3

    def __bool__(self):
        return True

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return 7.0


@dataclasses.dataclass
class Options:
    gain: float = 2.0
    names: tuple[str, ...] = ("a", "b")


class Slotted:
    __slots__ = ("one", "two")

    def __init__(self):
        self.one = 1.0


class BaseConfig:
    scale = 2.0

    def depth(self):
        return 2


class Config(BaseConfig):
    pass


def with_default(x, pad=MISSING, factor=1.5):
    return x * factor if pad is MISSING else x


with_default.extra = 0.5


class Block(nn.Module):
    def __init__(self, config, shared):
        super().__init__()
        self.config = config
        self.shared = shared
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * self.config.scale * self.config.depth() + self.shared[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        shared = [1.0]
        config = Config()
        self.blocks = nn.ModuleList(Block(config, shared) for _ in range(2))
        self.sized = Sized()
        self.options = Options()
        self.slotted = Slotted()
        self.plain = Plain()
        self.pad = MISSING
        self.table = {"a": 1.0}
        self.mode = Mode.FAST
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("other", torch.ones(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = x * self.sized.factor + Sized.width + len(self.sized) + self.sized.level + self.sized.anything
        x = x + Sized.table["a"] if self.sized else x
        x = x * self.options.gain + self.mode.value
        x = x * getattr(self.slotted, "two", 3.0) * self.slotted.one
        x = x + (1 if isinstance(self.plain, Kind) else 2)
        x = x + (1 if self.pad is MISSING else 2)
        x = x + self.table.get("b", 2.0) + getattr(self.plain, "late", 1.0)
        x = x + (self.mask if self.mask is not self.other else 2 * self.mask)
        x = x * max(LIMIT, 2)
        x = x + getattr(HERE, "UNDEFINED", 1.0)
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


def reload_registered(model, patch):
    class Registered(abc.ABC):  # noqa: B024
        pass

    Registered.register(Plain)
    Registered.__name__ = Registered.__qualname__ = "Kind"
    Registered.__module__ = __name__
    patch.setattr(HERE, "Kind", Registered)


CHANGES = {
    "an attribute of a base class": (on(BaseConfig, "scale", 3.0), "BaseConfig: member scale has changed"),
    "an attribute that a subclass overrides": (on(Config, "scale", 3.0), "Config: member scale is new"),
    "a method that a subclass overrides": (on(Config, "depth", lambda self: 3), "Config: member depth is new"),
    "an attribute of a class set on an object": (
        run(lambda m: setattr(m.blocks[1].config, "scale", 3.0)),
        "blocks.0.config.scale was not set",
    ),
    "one object of two": (run(lambda m: setattr(m.blocks[1], "config", Config())), r"blocks\.\d\.config"),
    "one list of two": (run(lambda m: setattr(m.blocks[1], "shared", [1.0])), r"blocks\.\d\.shared"),
    "two buffers that become one": (
        run(lambda m: setattr(m, "other", m.mask)),
        "tied.other",
    ),
    "a special method": (on(Sized, "__len__", lambda self: 4), "Sized: member __len__ has changed"),
    "a truth value": (on(Sized, "__bool__", lambda self: False), "Sized: member __bool__ has changed"),
    "__getattr__": (on(Sized, "__getattr__", lambda self, name: 8.0), "Sized: member __getattr__ has changed"),
    "what a descriptor holds": (on(Sized, "factor", Scaled(3.0)), "Sized: member factor has changed"),
    "a descriptor's class": (on(Scaled, "__get__", lambda self, *_: 3.0), "Scaled: member __get__ has changed"),
    "a metaclass": (on(Meta, "width", property(lambda cls: 3)), "Meta: member width has changed"),
    "a dict of a class": (lambda m, patch: patch.setitem(Sized.table, "a", 2.0), r"table.* was 1\.0|member table"),
    "a default of a dataclass": (on(Options, "gain", 3.0), r"gain|Options"),
    "the value of an enum": (
        lambda m, patch: patch.setattr(Mode.FAST, "_value_", 3),
        "Mode: member FAST has changed",
    ),
    "a slot that was empty": (run(lambda m: setattr(m.slotted, "two", 4.0)), "slotted.two was not set"),
    "a value in a slot": (run(lambda m: setattr(m.slotted, "one", 4.0)), "slotted.one was 1.0"),
    "what is registered with an ABC": (reload_registered, "Kind: member register has changed"),
    "a sentinel": (lambda m, patch: patch.setattr(HERE, "MISSING", object()), "MISSING"),
    "a key that was absent": (run(lambda m: m.table.update(b=3.0)), "table"),
    "an attribute that was absent": (run(lambda m: setattr(m.plain, "late", 2.0)), "plain.late was not set"),
    "a global number": (on(HERE, "LIMIT", 4), "LIMIT was 3"),
    "a global that was absent": (on(HERE, "UNDEFINED", 4.0), "UNDEFINED was not set"),
    "a builtin shadowed by a global": (on(HERE, "max", min), "max was not set"),
    "a builtin replaced": (lambda m, patch: patch.setattr("builtins.max", min), "builtins.max was"),
    "an attribute of a function": (on(with_default, "extra", 1.0), r"with_default\.extra was 0\.5"),
    "a default of a function": (on(with_default, "__defaults__", (MISSING, 2.0)), "with_default"),
    "how a module is called": (
        on(nn.Module, "_call_impl", lambda self, *args, **kwargs: self.forward(*args, **kwargs)),
        "_call_impl",
    ),
    "an operator of torch.Tensor": (
        on(torch.Tensor, "__add__", lambda self, other: self),
        "Tensor.__add__ was not set",
    ),
    "a function of torch": (on(nn.functional, "linear", lambda x, *_: x), "linear"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_dynamo_folds_is_a_guard(warmed, name, monkeypatch):
    change, words = CHANGES[name]
    model = Model().eval()
    change(model, monkeypatch)
    with pytest.raises(CacheMissError) as caught:
        cgtool.load(model, cache_dir=warmed)
    assert re.search(words, "\n".join(caught.value.reasons)), caught.value.reasons


def test_what_no_code_names_is_no_guard(warmed, monkeypatch):
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
    """A cache that counts: Dynamo traces `inspect.unwrap` on the way, which asks for the recursion limit."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(16, 4))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        position = self.position.item()
        self.table[position : position + x.shape[0]] = x
        self.position += x.shape[0]
        return self.table.sum(0)


def test_a_limit_of_pythons_that_inductor_raises_is_no_fact_of_the_model(tmp_path):
    model, x, usual = Positioned(), torch.rand(3, 4), sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(usual + 1000)
        loaded = served(tmp_path, model, x, dynamic={"x": {0: ("rows", 2, None)}})
    finally:
        sys.setrecursionlimit(usual)
    with torch.no_grad():
        assert torch.equal(loaded(x), x.sum(0))


def test_what_an_object_keeps_to_itself_is_guarded_where_it_lies(tmp_path):
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


def test_a_dict_that_makes_what_it_gives_is_guarded_by_what_it_holds(tmp_path, monkeypatch):
    model, x = Choosing(), torch.ones(2)
    agree(served(tmp_path, model, x), model, x)
    monkeypatch.setitem(MAKERS, "silu", nn.GELU)
    with pytest.raises(CacheMissError, match="MAKERS"):
        cgtool.load(model, cache_dir=tmp_path)
