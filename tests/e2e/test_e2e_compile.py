"""`cgtool.compile` in the place of `torch.compile`, with Inductor: examples, signatures, outputs, configurations.

The first compile is done in workers, as is the default, and others in this process, which has imported Inductor once.
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
#: Makes code that is right for its own sizes alone, as the default does, in half the time.
QUICK = "inductor_standalone"


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Compile here, and prove nothing in another process: outputs are compared with eager's here."""
    monkeypatch.setenv("CGTOOL_JOBS", "0")
    monkeypatch.setenv("CGTOOL_PROOF", "0")


@pytest.fixture
def eager(monkeypatch):
    """For what is not about what is compiled."""
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")


def shapes(root):
    """The shapes that a cache's one entry has artifacts for."""
    return {shape_text(artifact["shape"]) for artifact in inspect(root)["artifacts"]}


def files(root):
    return sorted((str(p), p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file() and "state" not in p.parts)


def same(run, module, *args, **kwargs):
    """A call equals eager's."""
    expected = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    difference(run(*args, **kwargs), expected)


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    """A model that was compiled for an example in a worker, and its cache."""
    root, module = tmp_path_factory.mktemp("nested") / "cache", models.Nested().eval()
    example, config = (models.x_of(),), CompilationConfig(adaptor=QUICK, jobs=1)
    with torch.no_grad(), forking():
        run = cgtool.compile(module, example_args=example, dynamic=BATCH, config=config, cache_dir=root)
    return root, module, run


@pytest.fixture(scope="module")
def signature(tmp_path_factory):
    """The cache of a model that was compiled for an example by position."""
    root, module = tmp_path_factory.mktemp("signature") / "cache", models.Signature().eval()
    config = CompilationConfig(adaptor="eager", jobs=0)
    with torch.no_grad():
        cgtool.compile(module, example_args=(models.x_of(),), dynamic=BATCH, config=config, cache_dir=root)
    return root


def test_outputs_of_nested_containers_come_back_as_they_were(nested):
    _, module, run = nested
    for batch in range(1, 20):
        same(run, module, models.x_of(batch))


@pytest.mark.parametrize("spelled", ["by position", "by name", "with its defaults"])
def test_a_second_compile_loads_however_the_example_is_spelled(signature, eager, spelled):
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
    assert inspect(root)["variants"] == 2  # and one entry, whatever came first
    assert units(root) == 2


def test_a_fresh_process_loads_what_was_compiled_for_the_same_model(nested):
    root, model = nested[0], f"{HERE / 'e2e_models.py'}:nested"
    calls = [{"batch": n} for n in range(1, 10)]
    report = compare(model, root, calls)
    assert (report["calls"], report["failures"]) == (9, [])
    assert command("warm", model, "--cache-dir", root, "--check", "--weights", "real", "--adaptor", QUICK).code == 0


def test_what_dynamo_named_for_one_process_is_found_in_the_next(tmp_path):
    root, model = tmp_path / "cache", f"{HERE / 'e2e_models.py'}:asking"
    assert not warm(model, root, "--adaptor", "eager")["hit"]
    report = warm(model, root, "--adaptor", "eager")
    assert (report["hit"], report["reasons"]) == (True, [])
    assert compare(model, root, [{"batch": n} for n in (1, 2, 5)])["failures"] == []


def test_without_an_example_the_first_call_is_one(tmp_path, eager):
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
    assert files(root) == before  # nothing compiles behind a request


def test_the_cache_switched_off_compiles_and_leaves_nothing(tmp_path, monkeypatch):
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
def test_what_is_compiled_keeps_nothing_of_its_own_in_the_model(tmp_path, monkeypatch, otherwise):
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
def test_a_copy_runs_with_weights_of_its_own(tmp_path, monkeypatch, otherwise):
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")
    module, x = models.Signature().eval(), models.x_of()
    cgtool.compile(module, example_args=(x,), cache_dir=tmp_path)
    waiting = cgtool.compile(module, cache_dir=tmp_path, otherwise=otherwise)  # as its first call has not come
    for run in (cgtool.load(module, cache_dir=tmp_path, otherwise=otherwise), waiting):
        run(x)
        copied = copy.deepcopy(run)
        next(module.parameters()).mul_(2)
        same(copied, copied.module, x)
        same(run, module, x)
        assert (copied(x) != run(x)).any()
    same(pickle.loads(pickle.dumps(waiting)), module, x)  # as a DataLoader's workers send it


def test_a_list_of_parameters_that_grows_is_seen_by_the_next_call(tmp_path, monkeypatch):
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")
    module, x = models.Scales().eval(), torch.rand(3, 4)
    run = cgtool.compile(module, example_args=(x,), cache_dir=tmp_path)
    same(run, module, x)
    module.scales.append(torch.full((4,), 3.0))
    with pytest.raises(cgtool.GuardError, match="scales"):
        run(x)


def test_a_lazy_model_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("CGTOOL_ADAPTOR", "eager")
    with pytest.raises(ModelError, match=r"uninitialized parameters, as nn\.LazyLinear does\. Call the model once"):
        cgtool.compile(torch.nn.LazyLinear(3).eval(), example_args=(torch.rand(3, 4),), cache_dir=tmp_path)


def test_an_assertion_about_a_tensor_is_compiled_in(tmp_path, monkeypatch):
    """It stands in a loop of a kernel, where an error must not end the process."""
    monkeypatch.setenv("CGTOOL_ADAPTOR", QUICK)
    module, x = models.Positive().eval(), torch.rand(2000) + 1
    run = cgtool.compile(module, example_args=(x,), cache_dir=tmp_path)
    same(run, module, x)
    for model in (module, run):
        with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
            model(-x)
    same(run, module, x)


def test_what_was_loaded_cannot_be_pickled(tmp_path, monkeypatch):
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


def check_level(root, level, by, **fields):
    spec, config = models.attention(), CompilationConfig(level=level, jobs=0, proof=False, **fields)
    run = cgtool.compile(
        spec.module, example_args=spec.calls[0].args, dynamic=spec.dynamic, config=config, cache_dir=root
    )
    for batch, seq in itertools.product((1, 2, 5), (1, 2, 9)):
        same(run, spec.module, models.attention_x(batch, seq))
    entry = inspect(root)
    _, pieces, splitting, unique = LEVELS[level]
    assert (entry["level"], entry["adaptor"], entry["variants"]) == (level, by, 4)
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
def test_levels_are_what_they_are_whatever_compiles(tmp_path, level):
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
    root, spec = tmp_path / "cache", models.attention()
    with pytest.raises(UsageError, match="size_dim"):
        cgtool.compile(
            spec.module,
            example_args=spec.calls[0].args,
            dynamic=spec.dynamic,
            config=CompilationConfig(compile_sizes=[8]),
            cache_dir=root,
        )
    assert list(root.rglob("manifest.json")) == []
