"""Models whose calls store tensors in attributes: compiled, each call stores what the model itself would."""

from __future__ import annotations

import copy
import functools

import pytest
from msgspec.structs import replace

pytest.importorskip("torch")

import kept_modules
import small_modules
import torch
from torch import nn

import cgtool
from cgtool.compiler import pipeline
from cgtool.config_values import CUDAGraphMode
from cgtool.errors import ArtifactError, CallMismatchError, GuardError, UsageError
from cgtool.runtime.call import LoadedModel
from cgtool.serving.forward_context import BatchDescriptor, ForwardContext, set_forward_context
from cgtool.serving.model import GraphedModel

pytestmark = pytest.mark.torch
FROM_2 = {"x": {0: ("rows", 2, None)}}
CONFIG = cgtool.CompilationConfig(adaptor="eager", jobs=0)
UNPROVED = CONFIG.replace(proof=False)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def made(name):
    function, parts, attributes = kept_modules.KEPT[name]
    module = small_modules.module(function, **copy.deepcopy(parts))
    for attribute, value in copy.deepcopy(attributes).items():
        setattr(module, attribute, value)
    return module.eval()


def held(module):
    """Return the attributes of all modules by name, without plain values of cached properties."""
    values = {}
    for path, part in module.named_modules():
        own = {name: value for name, value in vars(part).items() if not name.startswith("_") and name != "training"}
        for name in [name for name, value in own.items() if isinstance(value, int)]:
            if isinstance(getattr(type(part), name, None), functools.cached_property):
                del own[name]
        values |= {f"{path}.{name}": value for name, value in {**own, **part._buffers, **part._parameters}.items()}
    return values


def agree(ours, eager, sizes):
    for size in sizes:
        x = small_modules.rows(size)[0][0] + size
        torch.testing.assert_close(ours(x.clone()), eager(x.clone()))
        mine, theirs = held(getattr(ours, "module", ours)), held(eager)
        assert list(mine) == list(theirs)
        assert [value is None for value in mine.values()] == [value is None for value in theirs.values()]
        both = zip(mine.values(), theirs.values(), strict=True)
        for value, other in both:
            if not isinstance(value, nn.Module | type(None)):
                torch.testing.assert_close(value, other)


@pytest.mark.parametrize("adaptor", ["eager", pytest.param("aot_inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", kept_modules.KEPT)
def test_each_call_stores_what_the_model_itself_stores(tmp_path, name, adaptor):
    config = cgtool.CompilationConfig(adaptor=adaptor, jobs=0)
    (example,) = small_modules.rows(4)
    model, eager = made(name), made(name)
    dynamic, sizes = FROM_2, (4, 4, 2, 7, 3)
    if name in kept_modules.OF_THE_SIZE or adaptor == "aot_inductor":
        dynamic, sizes = {"x": {0: "rows"}}, (4, 4, 2, 7, 1, 1, 3)
    options = {"example_args": example, "dynamic": dynamic, "config": config, "cache_dir": tmp_path}
    before = held(model)
    run = cgtool.compile(model, **options)
    assert all(value is before[place] for place, value in held(model).items())
    for served in (run, cgtool.load(made(name), config=config, cache_dir=tmp_path)):
        agree(served, copy.deepcopy(eager), sizes)
    served.recheck()
    agree(cgtool.load(served.module, config=config, cache_dir=tmp_path), copy.deepcopy(served.module), (4, 2))


def compiled(name, root):
    (example,) = small_modules.rows(4)
    model = made(name)
    return cgtool.compile(model, example_args=example, dynamic=FROM_2, config=UNPROVED, cache_dir=root)


def test_the_next_call_reads_what_a_call_stored(tmp_path):
    loaded, x = compiled("a running mean", tmp_path), torch.ones(2, 8)
    first = loaded(x)
    kept = loaded.module.mean
    assert kept is not first
    loaded.module.mean = torch.full((8,), 3.0)
    torch.testing.assert_close(loaded(x), torch.full((2, 8), 1 - 2.8))
    torch.testing.assert_close(kept, torch.full((8,), 0.1))  # a stored tensor is not written to by later calls
    loaded.module.mean.zero_()
    torch.testing.assert_close(loaded(x), first)
    for other, words in ((torch.ones(4), "mean in dimension 0 is 4 and must be 8"), (None, "mean is None")):
        loaded.module.mean = other
        with pytest.raises(GuardError, match=words):
            loaded(x)
        assert loaded.module.mean is other


def test_load_state_dict_sets_a_buffer_that_calls_replace(tmp_path):
    loaded, eager = compiled("a buffer that is replaced", tmp_path), made("a buffer that is replaced")
    agree(loaded, eager, (4, 2))
    for model in (loaded.module, eager):
        model.load_state_dict({"count": torch.tensor(7.0)})
    agree(loaded, eager, (4, 3, 2))
    assert list(loaded.module.state_dict()) == ["count"]


def test_an_attribute_is_the_same_tensor_object_as_the_argument_or_output(tmp_path):
    class Both(nn.Module):
        def forward(self, x):
            y = x * 2
            self.given, self.output, self.part = x, y, y[:1]
            return y

    model = cgtool.compile(Both().eval(), example_args=(torch.ones(2, 2),), config=CONFIG, cache_dir=tmp_path)
    output = model(x := torch.ones(2, 2))
    assert model.module.given is x
    assert model.module.output is output
    output.zero_()
    assert model.module.part.tolist() == [[0, 0]]


def test_a_failed_call_leaves_the_model_unchanged(tmp_path, monkeypatch):
    loaded = compiled("a running mean", tmp_path)
    mean = loaded.module.mean
    loaded(torch.ones(2, 8))
    left = loaded.module.mean
    assert left is not mean
    with pytest.raises(GuardError):
        loaded(torch.ones(2, 9))

    def fail(*_):
        raise RuntimeError("as a kernel may")

    for served in loaded._variants:
        monkeypatch.setattr(served, "program", fail)
    with pytest.raises(RuntimeError, match="as a kernel may"):
        loaded(torch.ones(2, 8))
    assert loaded.module.mean is left


def test_stored_tensors_that_share_memory_are_not_written_to_as_if_separate(tmp_path):
    class Views(nn.Module):
        whole = part = None

        def forward(self, x):
            if self.whole is None:
                self.whole = x.sum(0).repeat(2, 1)
                self.part = self.whole[0]
                return x
            before = self.whole * 2
            self.part.add_(1)
            return x + self.whole.sum(0) + before.sum(0)

    model = cgtool.compile(Views().eval(), example_args=(torch.ones(2, 3),), config=CONFIG, cache_dir=tmp_path)
    model(torch.ones(2, 3))
    with pytest.raises(GuardError):
        model(torch.ones(2, 3))
    assert model.module.part.tolist() == [2, 2, 2]
    model.module.part = model.module.part.clone()
    assert model(torch.ones(2, 3)).tolist() == [[13, 13, 13]] * 2


def wrong_value(variant):
    [kept] = variant.kept
    return replace(variant, kept=(replace(kept, value=variant.output),))


def wrong_place(variant):
    [kept] = variant.kept
    return replace(variant, kept=(replace(kept, place="self.other"),))


def nothing(variant):
    return replace(variant, kept=())


@pytest.mark.parametrize("change", [wrong_value, wrong_place, nothing])
def test_a_plan_that_stores_something_else_is_refused_and_the_model_is_unchanged(tmp_path, monkeypatch, change):
    encode = pipeline.encode_plan

    def mutated(plan):
        return encode(replace(plan, variants=tuple(map(change, plan.variants))))

    monkeypatch.setattr(pipeline, "encode_plan", mutated)
    model = made("what was computed last")
    spec = cgtool.ModelSpec(module=model, calls=[cgtool.ExampleCall(args=small_modules.rows(4)[0])], dynamic=FROM_2)
    with pytest.raises(CallMismatchError, match=r"last|other"):
        pipeline.warm(spec, config=CONFIG, cache_dir=tmp_path)
    assert model.last is None
    assert not hasattr(model, "other")


@pytest.mark.parametrize("place", ["self|type.forward", "self.forward.__func__.x", "global:torch:x", "self"])
def test_a_plan_cannot_set_other_places_than_attributes_of_the_model(tmp_path, place):
    loaded = compiled("what was computed last", tmp_path)
    kept = [replace(variant, kept=(replace(variant.kept[0], place=place),)) for variant in loaded.plan.variants]
    plan = replace(loaded.plan, variants=tuple(kept))
    with pytest.raises((ArtifactError, GuardError)):
        LoadedModel(loaded.module, plan, loaded._opened)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE])
def test_cuda_graphs_refuse_a_model_whose_calls_store_tensors(tmp_path, mode):
    graphed, x = GraphedModel(compiled("a running mean", tmp_path), backend=None, piecewise=False), torch.ones(2, 8)
    for context_mode in (mode, CUDAGraphMode.NONE):
        context = ForwardContext(
            batch_descriptor=BatchDescriptor(2), cudagraph_runtime_mode=context_mode, capturing=True
        )
        with set_forward_context(context):
            if context_mode is mode:
                with pytest.raises(UsageError, match="Each call assigns a new tensor to mean of the model"):
                    graphed(x)
            else:
                assert graphed(x).shape == x.shape


class LeavesOrWrites(nn.Module):
    """Stores a part of its buffer in some calls, and writes to the buffer in others."""

    def __init__(self):
        super().__init__()
        self.register_buffer("whole", torch.zeros(2, 4))
        self.part = torch.ones(4)

    def forward(self, x, leaves):
        if leaves:
            self.part = self.whole[0]
            return x * 2
        before = x * self.part
        self.whole.add_(1)
        return before + x * self.part


def test_a_tensor_stored_by_another_example_may_share_memory_with_a_written_one(tmp_path):
    x = torch.ones(3, 4)
    calls = [cgtool.ExampleCall(name=str(leaves), args=(x, leaves)) for leaves in (True, False)]
    spec = cgtool.ModelSpec(module=LeavesOrWrites().eval(), calls=calls)
    pipeline.warm(spec, config=CONFIG, cache_dir=tmp_path)
    loaded, eager = cgtool.load(LeavesOrWrites().eval(), cache_dir=tmp_path), LeavesOrWrites().eval()
    for leaves in (False, False, True):
        torch.testing.assert_close(loaded(x, leaves), eager(x, leaves))
    with pytest.raises(GuardError):  # compiled code may read the part before it is written, and not after
        loaded(x, False)


def test_an_attribute_that_becomes_a_buffer_is_reported(tmp_path):
    module = made("a running mean")
    served = cgtool.compile(module, example_args=(torch.ones(3, 8),), config=CONFIG, cache_dir=tmp_path)
    served(torch.ones(3, 8))
    del module.mean
    module.register_buffer("mean", torch.zeros(8))
    with pytest.raises(GuardError, match=r"attributes that this call reads have moved since load; recheck\(\)"):
        served(torch.ones(3, 8))
    with pytest.raises(GuardError, match='_buffers did not have the key "mean" when this was compiled'):
        served.recheck()
