"""Data-dependent sizes and numbers pass between pieces, and results for other data equal eager's."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")

import data_modules
import torch
from e2e_compare import difference

import cgtool
from cgtool.compiler.pipeline import warm

pytestmark = pytest.mark.torch


def _warmed(name, adaptor, root, *, proof=False):
    module, calls, dynamic = data_modules.CASES[name]()
    config = cgtool.CompilationConfig(adaptor=adaptor, jobs=0, proof=proof)
    spec = cgtool.ModelSpec(module=module, calls=[cgtool.ExampleCall(args=calls[0])], dynamic=dynamic)
    with torch.no_grad():
        result = warm(spec, config=config, cache_dir=root)
        return module, calls, cgtool.load(module, config=config, cache_dir=root), result


@pytest.mark.parametrize("name", data_modules.CASES)
@pytest.mark.parametrize("adaptor", ["eager", pytest.param("aot_inductor", marks=pytest.mark.slow)])
def test_results_for_other_data_equal_eagers(tmp_path, name, adaptor):
    module, calls, loaded, result = _warmed(name, adaptor, tmp_path, proof=True)
    assert any(note.startswith("The results of these ops have data-dependent sizes") for note in result.notes)
    with torch.no_grad():
        for call in calls:
            difference(loaded(*copy.deepcopy(call)), module(*copy.deepcopy(call)))


@pytest.mark.parametrize(
    ("name", "stays", "apart"),
    [
        ("split by tolist", {"torch.relu", "torch.cat"}, "item"),
        ("written by a mask", {"torch.relu", "_operator.add"}, "_operator.setitem"),
        ("two takes by one mask", {"torch.relu", "exp", "_operator.mul"}, "_operator.getitem"),
    ],
)
def test_ops_without_data_dependent_sizes_stay_in_compiled_pieces(tmp_path, name, stays, apart):
    _, _, loaded, _ = _warmed(name, "eager", tmp_path)
    plan = loaded.plan
    for variant in plan.variants:
        compiled = [step for step in variant.steps if not step.splitting]
        called = {node.target for step in compiled for node in plan.graphs[step.graph].nodes}
        assert stays <= called
        assert apart not in called


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("split by tolist", lambda x, counts: (x, counts + 1)),
        ("a slice that is checked", lambda x, n: (x, n + 100)),
        ("a slice that is checked", lambda x, n: (x, n - 100)),
    ],
)
def test_data_that_the_model_rejects_are_rejected(tmp_path, name, wrong):
    module, calls, loaded, _ = _warmed(name, "eager", tmp_path)
    with torch.no_grad():
        for model in (module, loaded):
            with pytest.raises(RuntimeError):
                model(*wrong(*copy.deepcopy(calls[0])))


def test_data_dependent_sizes_outside_the_traced_range_are_refused(tmp_path):
    """The relations of a plan are checked when the program computes these sizes."""
    module, calls, loaded, _ = _warmed("rows by a mask", "eager", tmp_path)
    plan = loaded.plan
    variant = plan.variants[0]
    size = next(
        text
        for step in variant.steps
        for text in step.symbols.values()
        if text not in {s.name for s in variant.symbols}
    )
    from msgspec.structs import replace

    from cgtool.runtime.call import LoadedModel

    narrower = replace(plan, variants=(replace(variant, relations=(*variant.relations, f"{size} <= 1")),))
    strict = LoadedModel(module, narrower, loaded._opened)
    with torch.no_grad():
        with pytest.raises(cgtool.GuardError, match=r"found sizes in the data of this call.*otherwise='eager'"):
            strict(*calls[1])
        difference(strict(-data_modules.numbers(4).abs()), module(-data_modules.numbers(4).abs()))
