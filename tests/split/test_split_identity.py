"""Equal pieces have equal identities in every process; pieces that compile to different code have different ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from split_reference import OPS, capture, toy_ops_in
from torch import nn

from cgtool.split.splitter import split_graph

pytestmark = pytest.mark.torch
HERE = Path(__file__).parent


class Layer(nn.Module):
    def __init__(self, width: int, index: int, label: str) -> None:
        super().__init__()
        setattr(self, f"{label}_qkv", nn.Linear(width, 3 * width, bias=False))
        setattr(self, f"{label}_out", nn.Linear(width, width, bias=False))
        self.label, self.layer_name = label, f"{label}.{index}"

    def forward(self, hidden, positions):
        q, k, v = getattr(self, f"{self.label}_qkv")(hidden).chunk(3, -1)
        q = q * torch.cos(positions)[:, None]
        out = torch.empty_like(q)
        OPS.fill(q + k * v, out, self.layer_name)
        return hidden + getattr(self, f"{self.label}_out")(out.view(hidden.shape[0], -1)) * 0.5


class Model(nn.Module):
    def __init__(self, layers: int, label: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Layer(8, i, label) for i in range(layers))

    def forward(self, ids, positions):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden, positions)
        return hidden.sum(-1)


class Renamed(Model):
    def forward(self, tokens, where):
        return super().forward(tokens, where)


def pieces_of(model: nn.Module) -> tuple[int, int, list[str]]:
    arguments = (torch.arange(6), torch.arange(6.0))
    graph_module = capture(model.forward, *arguments, dynamic=[(0, 0), (1, 0)])
    result = split_graph(graph_module, splitting_ops=toy_ops_in(graph_module))
    compiled = [step.graph for step in result.steps if not step.splitting]
    return len(result.steps), len(compiled), sorted(set(compiled))


@pytest.fixture(scope="module")
def two_layers() -> list[str]:
    return pieces_of(Model(2, "block"))[2]


@pytest.mark.parametrize("layers", [4, 12])
def test_a_decoder_of_any_depth_has_three_unique_compiled_pieces(layers: int, two_layers: list[str]) -> None:
    steps, compiled, unique = pieces_of(Model(layers, "block"))
    assert (steps, compiled, len(unique)) == (2 * layers + 1, layers + 1, 3)
    assert unique == two_layers


def test_a_decoder_of_one_layer_has_two_unique_compiled_pieces(two_layers: list[str]) -> None:
    assert len(pieces_of(Model(1, "block"))[2]) == 2


def test_names_of_arguments_layers_and_weights_do_not_affect_identity(two_layers: list[str]) -> None:
    assert pieces_of(Renamed(2, "tier"))[2] == two_layers


def test_identity_is_the_same_in_other_processes_and_folders(tmp_path: Path, two_layers: list[str]) -> None:
    script = dedent(
        """
        import sys, json
        sys.path.insert(0, sys.argv[1])
        from test_split_identity import Model, pieces_of
        print(json.dumps(pieces_of(Model(3, "block"))[2]))
        """
    )
    for name in ("test_split_identity.py", "split_reference.py"):
        (tmp_path / name).write_text((HERE / name).read_text())
    path = os.pathsep.join([*sys.path, str(HERE.parents[1])])
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == two_layers


def identity_of(function, *args, dynamic=()) -> list[str]:
    graph_module = capture(function, *args, dynamic=dynamic)
    result = split_graph(graph_module, splitting_ops=toy_ops_in(graph_module))
    return [step.graph for step in result.steps]


def a() -> torch.Tensor:
    return torch.arange(24.0).reshape(6, 4)


VARIANTS = {
    "base": (lambda x, y: x * 2 + y, (a(), a())),
    "constant": (lambda x, y: x * 3 + y, (a(), a())),
    "float constant": (lambda x, y: x * 2.0 + y, (a(), a())),
    "op": (lambda x, y: x * 2 - y, (a(), a())),
    "order of operands": (lambda x, y: y + x * 2, (a(), a())),
    "keyword": (lambda x, y: torch.add(x * 2, y, alpha=2), (a(), a())),
    "dtype": (lambda x, y: x * 2 + y, (a().half(), a().half())),
    "shape": (lambda x, y: x * 2 + y, (a()[:, :2].contiguous(), a()[:, :2].contiguous())),
    "stride": (lambda x, y: x * 2 + y, (torch.arange(24.0).reshape(4, 6).t(), a())),
    "same tensor": (lambda x, y: x * 2 + x, (a(), a())),
    "one output more": (lambda x, y: (x * 2 + y, x * 2), (a(), a())),
    "constant tensor": (lambda x, y: x * torch.tensor(2.0) + y, (a(), a())),
    "a branch": (lambda x, y: torch.cond(x.sum() > 0, lambda z: z + 1, lambda z: z, (x,)) + y, (a(), a())),
    "another branch": (lambda x, y: torch.cond(x.sum() > 0, lambda z: z + 2, lambda z: z, (x,)) + y, (a(), a())),
    "in place": (lambda x, y: (x * 2).add_(y), (a(), a())),
}


def test_everything_that_affects_code_affects_identity() -> None:
    seen = {name: tuple(identity_of(function, *args)) for name, (function, args) in VARIANTS.items()}
    assert len(set(seen.values())) == len(seen), seen
    function, args = VARIANTS["base"]
    assert tuple(identity_of(function, *args)) == seen["base"]
    assert tuple(identity_of(function, *args, dynamic=[(0, 0), (1, 0)])) not in seen.values()


def test_aliasing_of_inputs_affects_identity() -> None:
    def function(x, y):
        return x * 2 + y

    base = torch.arange(48.0)
    apart = identity_of(function, base[:24].clone(), base[24:].clone())
    shared = identity_of(function, *base.view(2, 24).unbind(0))
    assert apart != shared


def test_a_bound_on_a_size_affects_identity() -> None:
    def free(x):
        return x * 2

    def bound(x):
        torch._check(x.shape[0] <= 64)
        return x * 2

    assert identity_of(free, a(), dynamic=[(0, 0)]) != identity_of(bound, a(), dynamic=[(0, 0)])


def test_an_edited_fake_implementation_affects_identity() -> None:
    def function(x):
        return OPS.mix(x, x) + 1

    library = torch.library.Library("toysplit", "FRAGMENT")
    before = identity_of(function, a())
    library._register_fake("mix", lambda a, b: torch.empty_like(a) + 0, allow_override=True)
    after = identity_of(function, a())
    library._destroy()
    assert before[0] != after[0]
    assert before[1] == after[1], "the piece without the op stays"
    assert identity_of(function, a()) == before
