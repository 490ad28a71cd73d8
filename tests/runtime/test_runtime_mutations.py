"""Random changes to a plan with updated digests: each causes a cgtool error, or the model still runs.

A plan is a program. A modified and resealed plan is a different program, so it may compute something else if the change
is in its steps, pieces or outputs. After any other change (to a guard, a size or the source of a tensor), the model
must still equal eager.
"""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from json_changes import mutated_json
from torch import nn
from torch.utils import _pytree as pytree

import cgtool
from cgtool import CompilationConfig, ExampleCall, ModelSpec
from cgtool.compiler.pipeline import warm
from cgtool.errors import CgtoolError
from cgtool.store.entry import EntryWriter, read_entry
from cgtool.store.key import read_key
from cgtool.store.layout import CacheLayout, RankName

pytestmark = pytest.mark.torch

#: The parts of a plan that define the computation.
COMPUTED = re.compile(r"\.variants\[\]\.(output|steps|inputs)|\.(graphs|inputs|texts)")


class Output(NamedTuple):
    hidden: torch.Tensor
    rows: int
    scales: dict[str, list[float]]


class Layer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x).view(1, -1, 2, 2).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, scale=self.scale)
        return x + mixed.reshape(x.shape)


class Model(nn.Module):
    """A model split at attention, whose plan has every kind of row: two variants, sizes, and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(0.5), Layer(0.25)])

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> Output:
        for layer in self.layers:
            x = layer(x)
        rows = 2 * x.shape[0] if twice else x.shape[0] + 1
        return Output(x, rows, {"scales": [layer.scale for layer in self.layers]})


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def agree(left: object, right: object) -> bool:
    """Return whether two outputs have the same type and equal values."""
    leaves, structure = pytree.tree_flatten(left)
    expected_leaves, expected_structure = pytree.tree_flatten(right)
    return structure == expected_structure and all(
        type(a) is type(b) and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
        for a, b in zip(leaves, expected_leaves, strict=True)
    )


def changed(left: object, right: object) -> str:
    """Return the path of the only difference between two documents, without indices."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return next((f".{key}{changed(left[key], right[key])}" for key in left if left[key] != right[key]), "")
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return next((f"[]{changed(a, b)}" for a, b in zip(left, right, strict=True) if a != b), "")
    return ""


class Entry:
    """An entry whose plan can be replaced."""

    def __init__(self, root: Path) -> None:
        spec = ModelSpec(module=model(), calls=[ExampleCall(args=(torch.rand(6, 4),))], dynamic={"x": {0: "n"}})
        config = CompilationConfig(adaptor="eager", proof=False)
        with torch.no_grad():
            structure = warm(spec, config=config, cache_dir=root)
        layout = CacheLayout(root=root)
        self._root = root
        self._model = model()
        self._inputs = [torch.rand(rows, 4) for rows in (3, 5)]
        self._entry = read_entry(layout, RankName(hash=structure.hash, rank=0, prefix="backbone"))
        self._writer = EntryWriter(layout, read_key(layout, structure.hash), rank=0, prefix="backbone")
        self.plan = json.loads(self._entry.files["plan.json"])

    def outcome(self, plan: object) -> str:
        """Run the model from this plan; return "served", "different", or the name of the error."""
        data = json.dumps(plan).encode("utf-8", "surrogatepass")
        self._writer.publish(self._entry.manifest, {"plan.json": data})
        try:
            loaded = cgtool.load(self._model, cache_dir=self._root)
            same = [agree(loaded(x), self._model(x)) for x in self._inputs]
        except CgtoolError as error:
            return type(error).__name__
        return "served" if all(same) else "different"


@pytest.fixture(scope="module")
def entry(tmp_path_factory):
    return Entry(tmp_path_factory.mktemp("entry"))


def outcomes(entry: Entry, seeds: range) -> dict[str, int]:
    """Return the number of modified plans by outcome; fail if one raises an error that is not a CgtoolError."""
    found: dict[str, int] = {}
    strange: list[str] = []
    with torch.no_grad():
        for seed in seeds:
            try:
                plan = mutated_json(entry.plan, random.Random(seed))
                outcome = entry.outcome(plan)
                found[outcome] = found.get(outcome, 0) + 1
                if outcome == "different" and not COMPUTED.match(path := changed(entry.plan, plan)):
                    strange.append(f"seed {seed}: a change of {path} gives another output")
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no sentence
                strange.append(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}")
    assert not strange, "\n".join(strange)
    return found


def test_a_modified_plan_is_refused_or_gives_correct_results(entry):
    with torch.no_grad():
        assert entry.outcome(entry.plan) == "served"
    assert {"served", "CacheMissError"} <= outcomes(entry, range(300)).keys()


#: Malicious changes to the fields of the output's class: one missing, one more, one without a value or a name.
OUTPUTS = [
    pytest.param(lambda fields: fields[:-1], [], id="missing"),
    pytest.param(lambda fields: [*fields, fields[0]], [], id="more"),
    pytest.param(lambda fields: fields[:-1], [[]], id="empty"),
    pytest.param(lambda fields: fields[:-1], [["scale", ["const", 1]]], id="other name"),
    pytest.param(lambda fields: fields, [["scales", ["const", 1]]], id="twice"),
]


@pytest.mark.parametrize(("by_place", "by_name"), OUTPUTS)
def test_an_output_that_does_not_match_its_class_is_refused_at_load(entry, by_place, by_name):
    plan = copy.deepcopy(entry.plan)
    for variant in plan["variants"]:
        _, _, fields, _ = variant["output"]
        variant["output"][2:] = [by_place(fields), by_name]
    with torch.no_grad():
        assert entry.outcome(plan) == "ArtifactError"


@pytest.mark.slow
def test_ten_thousand_modified_plans_are_refused_or_give_correct_results(entry):
    outcomes(entry, range(300, 10_300))
