"""Models whose calls set plain attributes: a compiled call sets them as the model would, and a load does not."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn

import cgtool
from cgtool.errors import CacheMissError, GuardError, TraceError

pytestmark = pytest.mark.torch
CONFIG = cgtool.CompilationConfig(adaptor="eager", jobs=0)
UNPROVED = CONFIG.replace(proof=False)


class Windowed(nn.Module):
    """Clamps its window to the size of its argument, as Swin does."""

    def __init__(self):
        super().__init__()
        self.window = 7
        self.inner = nn.Linear(4, 4)
        self.inner.shift = 3
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x):
        if x.shape[1] <= self.window:
            self.window = x.shape[1]
            self.inner.shift = 0
        self.table = self.table.to(x.dtype)
        return self.inner(x).view(-1, self.window) + self.inner.shift + self.table


class Inheriting(Windowed):
    """Sets an attribute to the value of its class, as SeamlessM4T does, and calls numpy, as CTRL does."""

    mode = "text"

    def forward(self, x):
        scale = np.sqrt(4) if self.mode == "text" else 0
        self.mode = "text"
        return x * scale


class Counting(Windowed):
    def forward(self, x):
        self.window = self.window + 1
        return x * self.window


class Replaced(Windowed):
    def forward(self, x):
        self.inner = nn.Identity()
        return self.inner(x)


class CountingInPlace(Windowed):
    def forward(self, x):
        self.table += 1  # writes in place; the attribute stays the same tensor
        return x + self.table


def made(cls):
    torch.manual_seed(0)
    return cls().eval().requires_grad_(requires_grad=False)


def compiled(model, root, config=UNPROVED):
    return cgtool.compile(
        model, example_args=(torch.rand(5, 4),), dynamic={"x": {0: ("rows", 2, None)}}, config=config, cache_dir=root
    )


def state(model):
    return model.window, model.inner.shift


def test_a_call_sets_what_the_model_sets_and_a_load_does_not(tmp_path):
    warmed, table = made(Windowed), torch.ones(4)
    warmed.table = table
    compiled(warmed, tmp_path, CONFIG)  # a proof calls the model, too
    assert (state(warmed), warmed.table is table) == ((7, 3), True)
    model = made(Windowed)
    loaded = cgtool.load(model, cache_dir=tmp_path)
    assert state(model) == (7, 3)
    for rows in (5, 2, 8):
        x = torch.rand(rows, 4)
        assert torch.equal(loaded(x), made(Windowed)(x))
        assert state(model) == (4, 0)
    loaded.recheck()
    again = cgtool.load(model, cache_dir=tmp_path)
    assert torch.equal(again(x), made(Windowed)(x))


def test_a_buffer_written_in_place_stays_the_same_tensor(tmp_path):
    model, eager = made(CountingInPlace), made(CountingInPlace)
    loaded, table, x = compiled(model, tmp_path), model.table, torch.rand(5, 4)
    for _ in range(3):
        assert torch.equal(loaded(x), eager(x))
    assert model.table is table
    assert torch.equal(table, eager.table)
    assert torch.equal(cgtool.load(model, cache_dir=tmp_path)(x), eager(x))


def test_an_attribute_may_belong_to_the_model_or_its_class(tmp_path):
    model, x = made(Inheriting), torch.rand(5, 4)
    compiled(model, tmp_path)
    assert "mode" not in vars(model)
    model(x)
    assert "mode" in vars(model)
    for served in (model, made(Inheriting)):
        assert torch.equal(cgtool.load(served, cache_dir=tmp_path)(x), x * 2)
    model.mode = "speech"
    with pytest.raises(CacheMissError, match="mode was 'text' when this was compiled and is 'speech' now"):
        cgtool.load(model, cache_dir=tmp_path)


def test_a_refused_call_sets_nothing(tmp_path):
    model = made(Windowed)
    loaded = compiled(model, tmp_path)
    with pytest.raises(GuardError):
        loaded(torch.rand(2, 5))
    assert state(model) == (7, 3)


def test_another_value_of_the_attribute_is_a_miss(tmp_path):
    compiled(made(Windowed), tmp_path)
    model = made(Windowed)
    model.window = 5
    with pytest.raises(CacheMissError, match=r"window was one of \[7,4\]"):
        cgtool.load(model, cache_dir=tmp_path)


def test_calls_that_leave_the_model_in_two_states_are_refused(tmp_path):
    calls = [cgtool.ExampleCall(args=(torch.rand(5, width),), name=f"width_{width}") for width in (4, 2)]

    class Two(Windowed):
        def forward(self, x):
            self.window = min(x.shape[1], self.window)
            return x.view(-1, self.window)

    from cgtool.compiler.pipeline import warm

    with pytest.raises(TraceError, match="changes window"), torch.no_grad():
        warm(cgtool.ModelSpec(module=made(Two), calls=calls), config=CONFIG, cache_dir=tmp_path)


@pytest.mark.parametrize(("cls", "name"), [(Counting, "window"), (Replaced, "inner")])
def test_other_changes_are_refused_and_leave_the_model_unchanged(tmp_path, cls, name):
    model = made(cls)
    before = {**vars(model), "table": model.table, "cache": dict(getattr(model, "cache", {}))}
    with pytest.raises(TraceError, match=f"The model changes {name} while it runs"):
        compiled(model, tmp_path)
    assert {**vars(model), "table": model.table, "cache": dict(getattr(model, "cache", {}))} == before
