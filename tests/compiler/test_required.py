"""Required sizes get further variants if others do not serve them; sizes that the model cannot run are noted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import cgtool
from cgtool import CacheMissError, CompilationConfig, ExampleCall, GuardError, ModelSpec
from cgtool.compiler import stitch
from cgtool.compiler.pipeline import warm
from cgtool.compiler.required import required_sizes
from cgtool.errors import TraceError, UsageError

pytestmark = pytest.mark.torch

EAGER = CompilationConfig(adaptor="eager", proof=False)  # the tests compare the results themselves


class Branch(torch.nn.Module):
    """Has a different branch for each of three kinds of sizes."""

    def forward(self, x):
        if x.shape[0] > 8:
            return x * 2
        return x + 1 if x.shape[0] % 2 == 0 else x - 1


class Conv(torch.nn.Module):
    """Cannot run below 3; returns one column at 3, which Dynamo fixes; torch chooses another kernel from 10,241 on."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(2, 2, 3)

    def forward(self, x):
        return self.conv(x.T.unsqueeze(0)).relu()


class Both(torch.nn.Module):
    """Branches on the product of both dimensions."""

    def forward(self, x):
        return x * 2 if x.shape[0] * x.shape[1] <= 40 else x + 3


class Steps(torch.nn.Module):
    """Has a different branch for every second size."""

    def forward(self, x):
        for step in range(2, 200, 2):
            if x.shape[0] <= step:
                return x + step
        return x


class Fixed(torch.nn.Module):
    """Accepts one number of rows, and any number of columns."""

    def forward(self, x):
        return x.sum(1) + torch.arange(4.0)


def spec(model, require, *, rows=4, columns=2, dynamic=None, **more):
    call = ExampleCall(args=(torch.rand(rows, columns),))
    return ModelSpec(module=model.eval(), calls=[call], dynamic={"x": dynamic or {0: "n"}}, require=require, **more)


def compare(model, root, shapes):
    loaded = cgtool.load(model, cache_dir=root)
    with torch.no_grad():
        for shape in shapes:
            x = torch.rand(*shape)
            assert torch.equal(loaded(x), model(x)), shape


@pytest.mark.parametrize(
    ("model", "require", "dynamic", "shapes", "variants"),
    [
        (Branch, {"n": (1, 512)}, None, [(n, 2) for n in (1, 2, 3, 4, 7, 8, 9, 10, 11, 512, 4000)], 4),
        (Conv, {"n": (3, 30000)}, None, [(n, 2) for n in (3, 4, 5, 100, 10240, 10241, 30000)], 3),
        (Both, {"n": (2, 30), "m": (2, 30)}, {0: "n", 1: "m"}, [(4, 2), (4, 10), (4, 11), (2, 21), (30, 30)], 5),
    ],
    ids=["a branch and a rest", "a convolution", "two dimensions"],
)
def test_every_required_size_is_served(cache_root, model, require, dynamic, shapes, variants):  # noqa: PLR0917
    model = model().eval()
    result = warm(spec(model, require, dynamic=dynamic), config=EAGER, cache_dir=cache_root)
    assert len(result.manifest.variants) == variants
    compare(model, cache_root, shapes)
    again = warm(spec(model, require, dynamic=dynamic), config=EAGER, cache_dir=cache_root, check=True)
    assert again.hit


def test_an_entry_that_serves_less_is_a_miss_and_one_that_serves_more_a_hit(cache_root):
    model = Branch().eval()
    first = warm(spec(model, {}), config=EAGER, cache_dir=cache_root)
    assert any("--require" in note for note in first.notes)
    wanted = spec(model, {"n": (1, 8)})
    with pytest.raises(CacheMissError) as missed:
        warm(wanted, config=EAGER, cache_dir=cache_root, check=True)
    assert missed.value.reasons[0] == "n = 3 is required of the call 'default', and no variant serves it"
    second = warm(wanted, config=EAGER, cache_dir=cache_root)
    assert (second.hit, second.compiled) == (False, 1)
    assert warm(wanted, config=EAGER, cache_dir=cache_root).hit
    for less in ({}, {"n": (2, 7)}):
        assert warm(spec(model, less), config=EAGER, cache_dir=cache_root).hit
    assert not warm(spec(model, {"n": (1, 9)}), config=EAGER, cache_dir=cache_root).hit
    compare(model, cache_root, [(n, 2) for n in range(1, 12)])


def test_required_sizes_that_the_model_cannot_run_are_noted_and_fail_a_check(cache_root):
    model = Conv().eval()
    wanted = spec(model, {"n": (1, 64)})
    result = warm(wanted, config=EAGER, cache_dir=cache_root)
    (note,) = (note for note in result.notes if "n = 2" in note)
    assert note.startswith("No variant serves n = 2, at which the model itself does not run: Calculated padded input")
    assert warm(wanted, config=EAGER, cache_dir=cache_root).hit  # another trace would leave out the same
    with pytest.raises(CacheMissError):
        warm(wanted, config=EAGER, cache_dir=cache_root, check=True)
    compare(model, cache_root, [(3, 2), (64, 2)])


def test_tracing_stops_if_too_many_sizes_need_their_own_variant(cache_root, monkeypatch):
    monkeypatch.setattr(stitch, "_MAX_FURTHER", 4)
    model = Steps().eval()
    result = warm(spec(model, {"n": (1, 100)}), config=EAGER, cache_dir=cache_root)
    (note,) = (note for note in result.notes if note.startswith("Tracing stopped at n = "))
    last = int(note.partition(":")[0].split()[-1]) - 1
    compare(model, cache_root, [(n, 2) for n in range(1, last + 1)])
    with pytest.raises(GuardError):
        compare(model, cache_root, [(last + 1, 2)])


@pytest.mark.parametrize(
    ("require", "message"),
    [
        ({"m": (1, 8)}, "m is required but is not a dynamic dimension of this model"),
        ({"n": (8, 1)}, "n is required from 8 to 1 but is declared as 1 to any"),
        ({"n": (0, 1)}, "n is required from 0 to 1 but is declared as 1 to any"),
    ],
)
def test_invalid_required_sizes_are_errors(cache_root, require, message):
    with pytest.raises(UsageError, match=message):
        warm(spec(Branch(), require), config=EAGER, cache_dir=cache_root)
    assert not list(Path(cache_root).rglob("manifest.json"))


def test_of_very_many_sizes_only_small_ones_and_the_ends_are_checked():
    points = [point["n"] for point in required_sizes({"n": (1, 10**9)}, {"n": 4}, ())]
    assert points == [*range(1, 257), 10**9]
    assert list(required_sizes({"n": (7, 8)}, {"n": 4, "m": 3}, ())) == [{"n": 7, "m": 3}, {"n": 8, "m": 3}]


BOTH = {0: "n", 1: "m"}


def test_static_where_fixed_makes_a_fixed_dimension_static(cache_root):
    model = Fixed().eval()
    given = spec(model, {}, columns=3, dynamic=BOTH, static_where_fixed=True)
    result = warm(given, config=EAGER, cache_dir=cache_root)
    (note,) = (note for note in result.notes if note.startswith("n serves"))
    because = r"`return x\.sum\(1\) \+ torch\.arange\(4\.0\)` \(test_required\.py:\d+\)\."
    assert re.fullmatch(rf"n serves only 4, the example's size, because of {because}", note)
    compare(model, cache_root, [(4, 1), (4, 2), (4, 9)])
    with pytest.raises(GuardError):
        cgtool.load(model, cache_dir=cache_root)(torch.rand(5, 3))
    assert warm(given, config=EAGER, cache_dir=cache_root).hit


@pytest.mark.parametrize(("more", "require"), [({}, {}), ({"static_where_fixed": True}, {"n": (2, 8)})])
def test_a_fixed_dimension_is_an_error_otherwise(cache_root, more, require):
    with pytest.raises(TraceError, match=r"x, dimension 0, is always 4 in this model because of"):
        warm(spec(Fixed(), require, columns=3, dynamic=BOTH, **more), config=EAGER, cache_dir=cache_root)
