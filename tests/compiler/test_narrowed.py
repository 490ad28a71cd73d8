"""Notes on sizes that a plan does not serve, with the user's line; there are none if nothing is narrowed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import cgtool
from cgtool import CompilationConfig, ExampleCall, ModelSpec
from cgtool.compiler.pipeline import warm
from cgtool.errors import CgtoolError

pytestmark = pytest.mark.torch


def branch(self, x):
    if x.shape[0] > 8:
        return torch.sin(x)
    return torch.cos(x)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.rand(64, 4))

    def forward(self, x):
        return x + self.rows[: x.shape[0]]


def groups(self, x):
    return x.view(-1, 4, 4) + 1


def product(self, x):
    if x.shape[0] * x.shape[1] <= 40:
        return torch.sin(x)
    return torch.cos(x)


def square(self, x):
    return torch.sin(x) if x.shape[0] * x.shape[0] <= 64 else torch.cos(x)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 2, 5, stride=2)

    def forward(self, x):
        return self.conv(x.t().unsqueeze(0))


def smallest(self, x):
    return x[: min(x.shape[0], 5)] * 2


class MaskOfAFixedSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(32, 32).tril().bool())

    def forward(self, x):
        return (x @ x.t()).masked_fill(~self.mask[: x.shape[0], : x.shape[0]], 0.0)


def branch_on_the_smaller(self, x):
    return torch.sin(x) if min(x.shape[0], 8) < 8 else torch.cos(x)


def halves(self, x):
    left, right = x.chunk(2)
    return left + right


def product_of_a_view(self, x):
    return x.reshape(-1)[:12].view(3, 4)


def loop(self, x):
    rows = x.shape[0]
    while rows > 4:
        rows -= 4
    return x * rows


def checked(self, x):
    torch._check(x.shape[0] < 100)
    return x + 1


def smallest_view(self, x):
    rows = min(x.shape[0], 8)
    return x[:rows].view(rows, 2, 2)


def padded(self, x):
    return torch.nn.functional.pad(x, (0, 0, 0, max(0, 10 - x.shape[0])))


def even(self, x):
    return x[: x.shape[0] // 2 * 2].view(-1, 2, 4).sum(1)


def multiples(self, x):
    return x * 2 if x.shape[0] % 3 == 0 else x


def plain(self, x):
    return torch.sin(x) @ x.t()


def made(model):
    """Return an instance of a class, or a model whose `forward` is the function."""
    return model() if isinstance(model, type) else type("Model", (nn.Module,), {"forward": model})()


def warmed(model, root, *sizes, dynamic=None):
    calls = [ExampleCall(args=(torch.rand(n, 4),), name=f"call_{n}") for n in sizes or (6,)]
    spec = ModelSpec(module=model.eval(), calls=calls, dynamic={"x": dynamic or {0: "n"}})
    with torch.no_grad():
        return warm(spec, config=CompilationConfig(adaptor="eager", splitting_ops=(), proof=False), cache_dir=root)


@pytest.mark.parametrize(
    ("model", "dynamic", "expected"),
    [
        (branch, {0: ("n", 1, 100)}, "n serves 1 to 8 because of `if x.shape[0] > 8` (test_narrowed.py:"),
        (Table, None, "n serves 1 to 64 because of `return x + self.rows[: x.shape[0]]` (test_narrowed.py:"),
        (
            groups,
            None,
            "only some sizes (8, 12, 16, ...) and not 9, 10, 11 because of `return x.view(-1, 4, 4) + 1`",
        ),
        (product, {0: "n", 1: "m"}, "because of `if x.shape[0] * x.shape[1] <= 40` (test_narrowed.py:"),
        (square, None, "because of `return torch.sin(x) if x.shape[0] * x.shape[0] <= 64 else torch.cos(x)`"),
        (Convolution, None, "because of `return self.conv(x.t().unsqueeze(0))` (test_narrowed.py:"),
        (branch_on_the_smaller, None, "and not 8, 9, 10 because of `return torch.sin(x) if min(x.shape[0], 8) < 8"),
        (
            halves,
            None,
            "n serves only some sizes (4, 6, 8, ...) and not 5, 7, 9 because of `return left + right`",
        ),
        (product_of_a_view, None, "n serves 3 to any because of `return x.reshape(-1)[:12].view(3, 4)`"),
        (loop, None, "5 to 8 because of `while rows > 4` (test_narrowed.py:"),
        (
            multiples,
            None,
            "n serves only some sizes (3, 6, 9, ...) and not 4, 5, 7 because of `return x * 2 if x.shape[0] %",
        ),
        (checked, None, "n serves 1 to 99 because of `torch._check(x.shape[0] < 100)`"),
    ],
)
def test_a_narrowed_range_is_noted_with_its_line(cache_root, model, dynamic, expected):
    size = 8 if model is groups else 6
    notes = warmed(made(model), cache_root, size, dynamic=dynamic).notes
    assert any(expected in note for note in notes), notes


def test_a_range_and_a_relation_are_noted_separately(cache_root):
    notes = warmed(MaskOfAFixedSize(), cache_root).notes
    for expected in ("n serves 1 to 32 because of", "n serves only some sizes (2, 3, 4, ...) and not 32 because of"):
        assert any(note.startswith(f"{expected} `return (x @ x.t()).masked_fill(") for note in notes), notes


@pytest.mark.parametrize(
    ("model", "dynamic"),
    [
        (plain, None),
        (smallest, None),
        (smallest_view, None),
        (padded, None),
        (even, None),
        (branch, {0: ("n", 2, 8)}),
        (Table, {0: ("n", 1, 64)}),
        (square, {0: ("n", 1, 8)}),
    ],
)
def test_there_is_no_note_if_nothing_is_narrowed(cache_root, model, dynamic):
    assert warmed(made(model), cache_root, dynamic=dynamic).notes == ()


def test_a_second_example_widens_the_range_as_the_note_advises(cache_root):
    (note,) = warmed(made(branch), cache_root).notes
    assert "require them (--require, ModelSpec.require) or add an example call of such a size (ModelSpec.calls)" in note
    assert warmed(made(branch), cache_root, 6, 20).notes == ()


def test_a_size_at_which_the_model_does_not_run_is_left_out(cache_root):
    model = Convolution()
    notes = warmed(model, cache_root).notes
    assert any(note.startswith("No variant serves n = 1, at which the model itself does not run: ") for note in notes)
    assert any("Kernel size can't be greater than actual input size" in note for note in notes)
    loaded = cgtool.load(model, cache_dir=cache_root)
    with torch.no_grad():
        for n in (5, 6, 31):
            x = torch.rand(n, 4)
            torch.testing.assert_close(loaded(x), model(x))
        with pytest.raises(CgtoolError):
            loaded(torch.rand(1, 4))


def test_a_model_that_does_not_run_at_any_size_is_an_error(cache_root):
    with pytest.raises(CgtoolError, match="Kernel size"):
        warmed(Convolution(), cache_root, dynamic={0: ("n", 1, 4)})
