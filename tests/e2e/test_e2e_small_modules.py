"""Features of PyTorch code, each in a small module: compiled, they equal eager, or they are refused with a reason."""

from __future__ import annotations

import copy

import pytest
from e2e_harness import cgtool as command

pytest.importorskip("torch")

import small_modules
import torch
from e2e_compare import difference

import cgtool
from cgtool.compiler.pipeline import warm
from cgtool.errors import CgtoolError

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@pytest.mark.filterwarnings("ignore:.*return_lse:FutureWarning")
@pytest.mark.parametrize("adaptor", ["eager", pytest.param("aot_inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", small_modules.SERVED)
def test_compiled_and_loaded_modules_equal_eager_at_every_shape(tmp_path, name, adaptor):
    module, calls, dynamic = small_modules.SERVED[name]()
    config, root = cgtool.CompilationConfig(adaptor=adaptor, jobs=0), tmp_path / "cache"
    spec = cgtool.ModelSpec(module=module, calls=[cgtool.ExampleCall(args=calls[0])], dynamic=dynamic)
    notes = " ".join(warm(spec, config=config, cache_dir=root).notes)
    noted = small_modules.NOTED | (small_modules.NOTED_OF_NATIVE if adaptor == "aot_inductor" else {})
    assert noted.get(name, "") in notes
    assert (name in noted) == bool(notes), notes
    run = cgtool.compile(module, example_args=calls[0], dynamic=dynamic, config=config, cache_dir=root)
    loaded = cgtool.load(copy.deepcopy(module), config=config, cache_dir=root)
    for call in calls:
        eager = copy.deepcopy(module)
        torch.manual_seed(0)
        expected = eager(*(theirs := copy.deepcopy(call)))
        for model in (run, loaded):
            torch.manual_seed(0)
            difference(model(*(ours := copy.deepcopy(call))), expected)
            difference(ours, theirs)
            difference(model.module.state_dict(), eager.state_dict())


@pytest.mark.parametrize("name", small_modules.REFUSED)
def test_unsupported_modules_are_refused_with_the_reason(tmp_path, name):
    make, words = small_modules.REFUSED[name]
    module, (call, *_), dynamic = make()
    config = cgtool.CompilationConfig(adaptor="eager", jobs=0)
    with pytest.raises(CgtoolError, match=words):
        cgtool.compile(module, example_args=call, dynamic=dynamic, config=config, cache_dir=tmp_path / "cache")


def test_a_size_at_which_the_model_fails_is_left_out_with_a_note(tmp_path, caplog):
    module, (call, *_), dynamic = small_modules.SERVED["conv1d of a dynamic length"]()
    spec = cgtool.ModelSpec(module=module, calls=[cgtool.ExampleCall(args=call)], dynamic=dynamic)
    config = cgtool.CompilationConfig(adaptor="eager", jobs=0)
    result = warm(spec, config=config, cache_dir=tmp_path)
    left_out = "No variant serves length = 1, at which the model itself does not run: Calculated padded input size"
    assert any(note.startswith(left_out) for note in result.notes), result.notes
    assert warm(spec, config=config, cache_dir=tmp_path).hit
    loaded = cgtool.load(module, cache_dir=tmp_path)
    for length in (1, 4):
        with pytest.raises((cgtool.GuardError, RuntimeError)):
            loaded(call[0][:, :, :length])


def test_a_bound_method_has_its_own_entry(tmp_path):
    class Both(torch.nn.Module):
        def forward(self, x):
            return x + 1

        def encode(self, x):
            return x * 2

    model, x = Both().eval(), torch.arange(3.0)
    config = cgtool.CompilationConfig(adaptor="eager", jobs=0)
    runs = [
        cgtool.compile(part, example_args=(x,), config=config, cache_dir=tmp_path) for part in (model, model.encode)
    ]
    loaded = [cgtool.load(part, cache_dir=tmp_path) for part in (model, model.encode)]
    assert [run(x).tolist() for run in (*runs, *loaded)] == [[1, 2, 3], [0, 2, 4]] * 2
    entries = command("inspect", "cache", tmp_path, "--json").report["entries"]
    assert sorted(entry["prefix"] for entry in entries) == ["backbone", "encode"]
