"""`cgtool.compile` in place of `torch.compile`: examples, signatures, outputs and configurations.

The first compile runs in workers, as by default, and others in this process, which imports Inductor once.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path

import pytest
from cli_harness import forking
from e2e_harness import cgtool as command
from e2e_harness import compare, inspect, units, warm

pytest.importorskip("torch")

import e2e_models as models
import torch
from e2e_compare import difference

import cgtool
from cgtool import CompilationConfig
from cgtool.errors import ModelError, UsageError
from cgtool.plan.shapes import shape_text

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent
BATCH = {"x": {0: "batch"}}
FROM_2 = {"x": {0: ("batch", 2, None)}}
#: Generates native code for its own sizes, as the default does, in half the time.
QUICK = "inductor_standalone"


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Compile in this process and without proofs, because the tests compare outputs with eager's."""
    monkeypatch.setenv("CGTOOL_JOBS", "0")
    monkeypatch.setenv("CGTOOL_PROOF", "0")


@pytest.fixture
def eager(monkeypatch):
    """Use the adaptor `eager`, for tests that are not about native code."""
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")


def shapes(root):
    """Return the shapes that the only entry of a cache has artifacts for."""
    return {shape_text(artifact["shape"]) for artifact in inspect(root)["artifacts"]}


def files(root):
    return sorted((str(p), p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file() and "state" not in p.parts)


def same(run, module, *args, **kwargs):
    """Check that a call equals eager's."""
    expected = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    difference(run(*args, **kwargs), expected)


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    """A model that a worker compiled."""
    root, module = tmp_path_factory.mktemp("nested") / "cache", models.Nested().eval()
    example, config = (models.x_of(),), CompilationConfig(adaptor=QUICK, jobs=1)
    with torch.no_grad(), forking():
        return cgtool.compile(module, example_args=example, dynamic=FROM_2, config=config, cache_dir=root)


@pytest.fixture(scope="module")
def signature(tmp_path_factory):
    """The cache of a model that was compiled for a positional example."""
    root, module = tmp_path_factory.mktemp("signature") / "cache", models.Signature().eval()
    config = CompilationConfig(adaptor="eager", jobs=0)
    with torch.no_grad():
        cgtool.compile(module, example_args=(models.x_of(),), dynamic=BATCH, config=config, cache_dir=root)
    return root


def test_nested_outputs_have_the_containers_of_the_model(nested):
    for batch in range(2, 20):
        same(nested, nested.module, models.x_of(batch))


@pytest.mark.parametrize("spelled", ["by position", "by name", "with its defaults"])
def test_a_second_compile_hits_however_the_example_is_passed(signature, eager, spelled):
    root, module = signature, models.Signature().eval()
    x = models.x_of()
    before = files(root)
    args, kwargs = {
        "by position": ((x,), {}),
        "by name": ((), {"x": x}),
        "with its defaults": ((x, None), {"mode": "tanh"}),
    }[spelled]
    run = cgtool.compile(module, example_args=args, example_kwargs=kwargs, dynamic=BATCH, cache_dir=root)
    same(run, module, models.x_of(7))
    assert files(root) == before
    assert inspect(root)["variants"] == 2  # in a single entry
    assert units(root) == 2


def test_another_process_loads_the_entry_of_a_compile(tmp_path, eager):
    root, model, spec = tmp_path / "cache", f"{HERE / 'e2e_models.py'}:nested", models.nested()
    cgtool.compile(spec.module, example_args=spec.calls[0].args, dynamic=spec.dynamic, cache_dir=root)
    calls = [{"batch": n} for n in range(1, 10)]
    report = compare(model, root, calls)
    assert (report["calls"], report["failures"]) == (9, [])
    assert command("warm", model, "--cache-dir", root, "--check", "--weights", "real").code == 0


def test_a_name_that_dynamo_creates_does_not_cause_a_miss(tmp_path):
    root, model = tmp_path / "cache", f"{HERE / 'e2e_models.py'}:asking"
    assert not warm(model, root, "--adaptor", "eager")["hit"]
    report = warm(model, root, "--adaptor", "eager")
    assert (report["hit"], report["reasons"]) == (True, [])
    assert compare(model, root, [{"batch": n} for n in (1, 2, 5)])["failures"] == []


def test_without_an_example_the_first_call_is_the_example(tmp_path, eager):
    root, module = tmp_path / "cache", models.Signature().eval()
    run = cgtool.compile(module, dynamic=BATCH, cache_dir=root)
    assert not root.exists()
    x = models.x_of(4)
    same(run, module, x, scale=3.0)
    assert inspect(root)["pieces"] == 1
    for batch in (1, 2, 9):
        same(run, module, models.x_of(batch), scale=3.0)
    before = files(root)
    with pytest.raises(cgtool.GuardError, match="scale"):
        run(x)
    assert files(root) == before  # calls do not compile


def test_a_disabled_cache_compiles_and_writes_nothing(tmp_path, monkeypatch):
    root, module = tmp_path / "cache", models.Signature().eval()
    off = CompilationConfig(adaptor="eager", disable_cache=True, jobs=0)
    run = cgtool.compile(module, example_args=(models.x_of(),), dynamic=BATCH, config=off, cache_dir=root)
    same(run, module, models.x_of(5))
    assert not root.exists()
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")
    monkeypatch.setenv("CGTOOL_DISABLE_CACHE", "1")
    run = cgtool.compile(module, example_args=(models.x_of(),), dynamic=BATCH, cache_dir=root)
    same(run, module, models.x_of(5))
    assert not root.exists()
    with pytest.raises(cgtool.CacheMissError, match="switched off"):
        cgtool.load(module, cache_dir=root)
    monkeypatch.setenv("CGTOOL_DISABLE_CACHE", "0")
    monkeypatch.setenv("CGTOOL_CACHE_DIR", str(root))
    run = cgtool.compile(module, example_args=(models.x_of(),), dynamic=BATCH)
    same(run, module, models.x_of(5))
    assert inspect(root)["pieces"] == 1


@pytest.mark.parametrize("otherwise", ["raise", "eager", "warm", "background"])
def test_a_compiled_model_sets_no_attributes_on_the_original(tmp_path, monkeypatch, otherwise):
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")
    module, x = models.Signature().eval(), models.x_of()
    before = set(vars(module))
    run = cgtool.compile(module, cache_dir=tmp_path, otherwise=otherwise)
    for size in (3, 3, 5):
        run(x[:size])
    if otherwise == "background":
        run._background.join()
    run.recheck()
    assert set(vars(module)) == before


@pytest.mark.parametrize("otherwise", ["raise", "eager"])
def test_a_copy_runs_with_its_own_weights(tmp_path, monkeypatch, otherwise):
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")
    module, x = models.Signature().eval(), models.x_of()
    cgtool.compile(module, example_args=(x,), cache_dir=tmp_path)
    waiting = cgtool.compile(module, cache_dir=tmp_path, otherwise=otherwise)  # it has not been called yet
    for run in (cgtool.load(module, cache_dir=tmp_path, otherwise=otherwise), waiting):
        run(x)
        copied = copy.deepcopy(run)
        next(module.parameters()).mul_(2)
        same(copied, copied.module, x)
        same(run, module, x)
        assert (copied(x) != run(x)).any()
    same(pickle.loads(pickle.dumps(waiting)), module, x)  # as for a DataLoader's workers


def test_the_next_call_notices_that_a_parameter_list_has_grown(tmp_path, monkeypatch):
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")
    module, x = models.Scales().eval(), torch.rand(3, 4)
    run = cgtool.compile(module, example_args=(x,), cache_dir=tmp_path)
    same(run, module, x)
    module.scales.append(torch.full((4,), 3.0))
    with pytest.raises(cgtool.GuardError, match="scales"):
        run(x)


def test_an_uninitialized_lazy_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")
    with pytest.raises(ModelError, match=r"uninitialized parameters, as nn\.LazyLinear does\. Call the model once"):
        cgtool.compile(torch.nn.LazyLinear(3).eval(), example_args=(torch.rand(3, 4),), cache_dir=tmp_path)


def test_an_assertion_about_a_tensor_is_compiled(tmp_path, monkeypatch):
    """It is in the loop of a kernel, where an error must not end the process."""
    monkeypatch.setenv("CGTOOL_ADAPTOR", QUICK)
    module, x = models.Positive().eval(), torch.rand(2000) + 1
    run = cgtool.compile(module, example_args=(x,), cache_dir=tmp_path)
    same(run, module, x)
    for model in (module, run):
        with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
            model(-x)
    same(run, module, x)


def test_a_loaded_model_cannot_be_pickled(tmp_path, monkeypatch):
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")
    run = cgtool.compile(models.Signature().eval(), example_args=(models.x_of(),), cache_dir=tmp_path)
    with pytest.raises(UsageError, match=r"cannot be pickled\. Send the original model, and call cgtool\.load"):
        pickle.dumps(run)


def test_level_0_is_the_model_itself(tmp_path):
    module = models.Attention().eval()
    for config in (CompilationConfig(level=0), CompilationConfig(enforce_eager=True)):
        assert cgtool.compile(module, config=config, cache_dir=tmp_path / "cache") is module
        assert cgtool.load(module, config=config, cache_dir=tmp_path / "cache") is module
    assert list(tmp_path.iterdir()) == []


LEVELS = {1: ("eager", 1, 0, 1), 2: ("aot_inductor", 1, 0, 1), 3: ("aot_inductor", 5, 2, 3)}


def check_level(root, level, compiler, **fields):
    spec, config = models.attention_from_2(), CompilationConfig(level=level, jobs=0, proof=False, **fields)
    run = cgtool.compile(
        spec.module, example_args=spec.calls[0].args, dynamic=spec.dynamic, config=config, cache_dir=root
    )
    for batch, seq in itertools.product((2, 5), (2, 9)):
        same(run, spec.module, models.attention_x(batch, seq))
    entry = inspect(root)
    _, pieces, splitting, unique = LEVELS[level]
    assert (entry["level"], entry["adaptor"], entry["variants"]) == (level, compiler, 1)
    assert (entry["pieces"], entry["splitting_pieces"], entry["unique_pieces"]) == (pieces, splitting, unique)
    loaded = cgtool.load(spec.module, config=config, cache_dir=root)
    same(loaded, spec.module, models.attention_x(3, 4))
    other = CompilationConfig(level=5 - level if level != 1 else 3, **fields)
    with pytest.raises(cgtool.CacheMissError, match="level"):
        cgtool.load(spec.module, config=other, cache_dir=root)


@pytest.mark.parametrize("level", [1, *(pytest.param(level, marks=pytest.mark.slow) for level in (2, 3))])
def test_levels_1_to_3(tmp_path, level):
    check_level(tmp_path / "cache", level, LEVELS[level][0])


@pytest.mark.parametrize("level", [2, 3])
def test_levels_with_the_adaptor_eager(tmp_path, level):
    check_level(tmp_path / "cache", level, "eager", adaptor="eager")


CONFIGS = {
    "mappings of both dimensions, of one, and an integer of size_dim": (
        {"compile_sizes": [{"batch": 2, "seq": 8}, {"batch": 1, "seq": 8}, {"seq": 9}, 4], "size_dim": "seq"},
        {"batch=2:seq=8", "batch=1:seq=8", "seq=9", "seq=4"},
    ),
    "ranges of size_dim, and a size within one": (
        {"compile_sizes": [{"batch": 2, "seq": 8}], "compile_ranges": [[2, 7], [8, 32]], "size_dim": "seq"},
        {"batch=2:seq=8", "seq=2-7", "seq=8-32", "batch=1:seq=2-7", "batch=1:seq=8-32"},
    ),
}


@pytest.mark.parametrize("adaptor", ["eager", pytest.param(QUICK, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_and_ranges_of_two_dimensions(tmp_path, name, adaptor):
    fields, added = CONFIGS[name]
    root, spec = tmp_path / "cache", models.attention()
    config = CompilationConfig(adaptor=adaptor, jobs=0, proof=False, **fields)
    run = cgtool.compile(
        spec.module, example_args=spec.calls[0].args, dynamic=spec.dynamic, config=config, cache_dir=root
    )
    found = shapes(root)
    assert added <= found
    assert found - added <= {"general", "batch=1", "seq=1", "batch=1:seq=1"}
    for batch, seq in itertools.product((1, 2, 3), (1, 2, 4, 7, 8, 9, 32, 33)):
        same(run, spec.module, models.attention_x(batch, seq))


def test_an_integer_size_of_two_dimensions_needs_size_dim(tmp_path):
    root, spec = tmp_path / "cache", models.attention_from_2()
    with pytest.raises(UsageError, match="size_dim"):
        cgtool.compile(
            spec.module,
            example_args=spec.calls[0].args,
            dynamic=spec.dynamic,
            config=CompilationConfig(compile_sizes=[8]),
            cache_dir=root,
        )
    assert list(root.rglob("manifest.json")) == []
