"""Models built with einops and diffusers load in fresh processes, whose hashes of strings differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import diffusers
import torch
from einops import einsum, rearrange, reduce
from einops.layers.torch import Rearrange
from torch import nn

import cgtool

pytestmark = pytest.mark.torch

EAGER = cgtool.CompilationConfig(adaptor="eager")


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.split = Rearrange("batch (heads width) -> batch heads width", heads=2)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        heads = self.split(self.linear(x))
        scores = einsum(heads, heads, "batch i width, batch j width -> batch i j")
        return rearrange(scores, "batch i j -> batch (i j)") + reduce(x, "batch width -> batch 1", "mean")


def image_transformer():
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, num_embeds_ada_norm=10
    )


MODELS = {
    "einops": (Heads, {"x": (4, 8)}, {}),
    "diffusers": (
        image_transformer,
        {"hidden_states": (2, 4, 8, 8)},
        {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([3, 4]), "return_dict": False},
    ),
}


def model_and_call(name):
    torch.manual_seed(0)
    make, shapes, others = MODELS[name]
    return make().eval(), {key: torch.randn(shape) for key, shape in shapes.items()} | others


def load_and_compare(name: str, root: str) -> None:
    """Load a model as a fresh process does, and compare it with itself."""
    model, call = model_and_call(name)
    with torch.no_grad():
        loaded = cgtool.load(model, cache_dir=root)  # before the model has run once
        got, expected = loaded(**call), model(**call)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_fresh_process_loads_the_model(name, tmp_path):
    model, call = model_and_call(name)
    cgtool.compile(model, example_kwargs=call, config=EAGER, cache_dir=tmp_path)
    code = "import sys, test_libraries; test_libraries.load_and_compare(*sys.argv[1:])"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "78"}
    subprocess.run([sys.executable, "-c", code, name, str(tmp_path)], env=environment, check=True)
