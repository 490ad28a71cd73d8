"""Warms that follow one another: a range names its dimension, and autotuning is part of an artifact's place."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("torch")

import torch
from standing_adaptor import SERVED, Standing

import cgtool
from cgtool import adaptor_registry
from cgtool.cli.main import main

pytestmark = pytest.mark.torch

MODEL = """
import torch
import cgtool


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x) * 2


def build():
    call = cgtool.ExampleCall(args=(torch.rand(3, 5, 4),))
    return cgtool.ModelSpec(module=Model().eval(), calls=[call], dynamic={"x": {0: "batch", 1: "seq"}})
"""


@pytest.fixture(autouse=True)
def standing(monkeypatch):
    monkeypatch.setitem(adaptor_registry._registered, "inductor_standalone", Standing)
    SERVED.clear()
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "chained_model.py"
    path.write_text(MODEL)
    return path


def warm(model, root, capsys, *flags):
    """Run `cgtool warm` in this process; return its report."""
    capsys.readouterr()
    how = ["--cache-dir", str(root), "--adaptor", "inductor_standalone", "--jobs", "0", "--no-proof"]
    code = main(["warm", f"{model}:build", *how, "--json", "--quiet", *flags])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out)


def served(model, root, *sizes):
    """What serves a call of these sizes, whose result is eager's."""
    module = sys.modules[model.stem].build().module
    x = torch.rand(*sizes, 4)
    run = cgtool.load(module, cache_dir=root)
    SERVED.clear()
    torch.testing.assert_close(run(x), module(x))
    return SERVED[-1]


@pytest.mark.parametrize("dim", ["batch", "seq"])
def test_a_range_serves_the_dimension_that_it_was_compiled_for(model, cache_root, capsys, dim):
    assert warm(model, cache_root, capsys)["hit"] is False
    again = warm(model, cache_root, capsys, "--compile-ranges", "2-64", "--size-dim", dim)
    assert again["hit"] is False
    within, beyond = {"batch": ((9, 99), (99, 9)), "seq": ((99, 9), (9, 99))}[dim]
    assert [high for _, high in served(model, cache_root, *within)["symbols"]].count(64) == 1
    assert [high for _, high in served(model, cache_root, *beyond)["symbols"]].count(64) == 0
    assert warm(model, cache_root, capsys, "--compile-ranges", "2-64", "--size-dim", dim)["hit"] is True


def test_ranges_of_two_dimensions_stand_side_by_side(model, cache_root, capsys):
    for dim in ("batch", "seq"):
        warm(model, cache_root, capsys, "--compile-ranges", "2-64", "--size-dim", dim)
    limited = [[high for _, high in served(model, cache_root, *sizes)["symbols"]] for sizes in ((9, 99), (99, 9))]
    assert [highs.index(64) for highs in limited] == [0, 1]
    assert [highs.count(64) for highs in limited] == [1, 1]


def test_a_size_that_is_a_variant_is_tuned_when_it_is_asked_for(model, cache_root, capsys):
    warm(model, cache_root, capsys)
    assert served(model, cache_root, 1, 1)["tuned"] is False
    sizes = "batch=1:seq=1"
    tuned = warm(model, cache_root, capsys, "--compile-sizes", sizes)
    assert (tuned["hit"], tuned["compiled"]) == (False, 1)
    assert served(model, cache_root, 1, 1)["tuned"] is True
    assert warm(model, cache_root, capsys, "--compile-sizes", sizes)["hit"] is True
    assert warm(model, cache_root, capsys)["hit"] is True  # what is tuned serves who asked for nothing, too
