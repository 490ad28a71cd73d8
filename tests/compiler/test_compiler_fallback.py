"""A piece that the compiler rejects runs eagerly; if it rejects only a concrete size, the warm fails."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import cgtool
from cgtool import CompilationConfig, ExampleCall, ModelSpec, adaptor_registry
from cgtool.compiler.adaptors.eager import EagerAdaptor
from cgtool.compiler.pipeline import warm
from cgtool.errors import CompileError, UsageError
from cgtool.plan.shapes import shape_text

pytestmark = pytest.mark.torch

COMPILED = []


class Refusing(EagerAdaptor):
    """Stands in for Inductor: rejects graphs for which `refuses` is true, and compiles the rest as eager does."""

    name = "inductor_standalone"
    refuses = staticmethod(lambda graph: False)

    def compile(self, graph, *, options, max_autotune=False):
        COMPILED.append(graph)
        if Refusing.refuses(graph):
            raise CompileError("The compiler does not know the op; write another.")
        return super().compile(graph, options=options, max_autotune=max_autotune)


@pytest.fixture(autouse=True)
def refusing(monkeypatch):
    monkeypatch.setitem(adaptor_registry._registered, "inductor_standalone", Refusing)
    monkeypatch.setattr(Refusing, "refuses", staticmethod(lambda graph: False))
    COMPILED.clear()
    with torch.no_grad():
        yield Refusing


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x).unsqueeze(0)
        y = nn.functional.scaled_dot_product_attention(y, y, y)
        return torch.sin(y.squeeze(0))


def spec_of(model):
    return ModelSpec(module=model.eval(), calls=[ExampleCall(args=(torch.rand(3, 4),))], dynamic={"x": {0: "n"}})


def run(model, root, **fields):
    config = CompilationConfig(**{"adaptor": "inductor_standalone", "jobs": 0, "proof": False, **fields})
    return warm(spec_of(model), config=config, cache_dir=root)


def manifest(root):
    (path,) = root.glob("torch_compile_cache/*/rank_0/backbone/manifest.json")
    return json.loads(path.read_bytes())


def rows(root):
    return sorted(
        (r["variant"], r["piece_index"], shape_text(r["shape"]), r["adaptor"]) for r in manifest(root)["rows"]
    )


def agree(model, root):
    loaded = cgtool.load(model, cache_dir=root)
    for n in (1, 2, 3, 8, 9):
        x = torch.rand(n, 4)
        torch.testing.assert_close(loaded(x), model(x))


def has_sin(graph):
    return any(node.target == "torch.sin" for node in graph.nodes)


def test_a_piece_rejected_for_all_sizes_runs_eagerly(tmp_path, monkeypatch):
    monkeypatch.setattr(Refusing, "refuses", staticmethod(has_sin))
    model = Model()
    result = run(model, tmp_path, compile_sizes=[1, 8])
    assert not result.hit
    adaptors = {(variant, piece): adaptor for variant, piece, _, adaptor in rows(tmp_path)}
    assert adaptors == {
        (0, 0): "inductor_standalone",
        (0, 2): "eager",
        (1, 0): "inductor_standalone",
        (1, 2): "eager",
    }
    assert [shape for variant, piece, shape, _ in rows(tmp_path) if piece == 2] == ["general", "n=1"]
    agree(model, tmp_path)
    notes = [note for note in result.notes if "runs eagerly" in note]
    assert len(notes) >= 1
    assert all("Piece 2" in note and "does not know the op" in note for note in notes)


def test_a_rejected_piece_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Refusing, "refuses", staticmethod(has_sin))
    model = Model()
    run(model, tmp_path, compile_sizes=[8])
    COMPILED.clear()
    second = run(model, tmp_path, compile_sizes=[8])
    assert (second.hit, second.compiled) == (True, 0)
    third = run(model, tmp_path, compile_sizes=[8, 9])
    assert (third.hit, third.trace_secs, third.compiled) == (False, 0, 1)
    assert len(COMPILED) == 1
    agree(model, tmp_path)


def test_a_size_that_is_rejected_is_an_error_and_nothing_is_published(tmp_path, monkeypatch):
    monkeypatch.setattr(Refusing, "refuses", staticmethod(lambda graph: graph.inputs[0].shape[:1] == (8,)))
    model = Model()
    with pytest.raises(CompileError, match="does not know the op"):
        run(model, tmp_path, compile_sizes=[8])
    assert list(tmp_path.rglob("manifest.json")) == []
    assert list(tmp_path.rglob("*.tmp")) == []
    with pytest.raises(cgtool.CacheMissError):
        cgtool.load(model, cache_dir=tmp_path)
    COMPILED.clear()
    result = run(model, tmp_path, compile_sizes=[9])
    assert (result.hit, len(COMPILED)) == (False, 2)  # the general pieces were stored before
    agree(model, tmp_path)


def test_a_size_that_is_rejected_later_leaves_the_entry_unchanged(tmp_path, monkeypatch):
    model = Model()
    run(model, tmp_path)
    before = manifest(tmp_path)
    monkeypatch.setattr(Refusing, "refuses", staticmethod(lambda graph: graph.inputs[0].shape[:1] == (8,)))
    with pytest.raises(CompileError):
        run(model, tmp_path, compile_sizes=[8])
    assert manifest(tmp_path) == before
    agree(model, tmp_path)


@pytest.mark.parametrize("fields", [{"level": 0}, {"enforce_eager": True}])
def test_level_0_leaves_nothing_to_compile(tmp_path, fields):
    with pytest.raises(UsageError, match=r"Level 0 runs the model eagerly.*Choose level 1, 2 or 3"):
        run(Model(), tmp_path, **fields)
    assert list(tmp_path.iterdir()) == []
