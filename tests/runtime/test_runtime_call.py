"""A loaded model runs the calls that its variants accept, and explains why it refuses others."""

from __future__ import annotations

import functools
import inspect
import threading
import time

import hand_plans as hand
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import cgtool
from cgtool.compiler.pipeline import warm
from cgtool.errors import ArtifactError, GuardError
from cgtool.plan.pieces import SymbolRange
from cgtool.plan.records import Guard, Input
from cgtool.runtime.call import LoadedModel

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_grad")]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return hand.Model()


@pytest.fixture
def loaded(model):
    return hand.load(model, hand.variant(), hand.one())


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64])
def test_every_number_of_rows_equals_eager(model, loaded, rows):
    x = torch.randn(rows, hand.WIDTH)
    assert torch.equal(loaded(x), model(x))


def test_keywords_and_defaults_are_bound_as_the_model_binds_them(model, loaded):
    x = torch.randn(3, hand.WIDTH)
    want = model(x)
    for got in (loaded(x=x), loaded(x, None), loaded(x, mask=None, scale=1.0), loaded(scale=1.0, x=x)):
        assert torch.equal(got, want)
    assert inspect.signature(loaded) == inspect.signature(model.forward)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"nope": 1}), ((1,), {"x": 1})], ids=str
)
def test_a_call_that_does_not_match_the_signature_is_a_type_error(loaded, args, kwargs):
    with pytest.raises(TypeError, match="forward"):
        loaded(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda _x: torch.randn(0, 4), "num_tokens is 0 and must be at least 1", id="no rows"),
        pytest.param(lambda x: x.double(), "x has dtype float64 and was traced with float32", id="dtype"),
        pytest.param(lambda x: x[None], "x has 3 dimensions and was traced with 2", id="rank"),
        pytest.param(lambda x: x.to("meta"), "x is on meta and must be on cpu", id="device"),
        pytest.param(lambda _x: torch.randn(3, 5), "size of x in dimension 1 is 5 and must be 4", id="width"),
        pytest.param(
            lambda _x: torch.randn(4, 3).t(),
            r"x has the strides \(1, 3\) and was traced with \(4, 1\); pass x.contiguous\(\)",
            id="strides",
        ),
        pytest.param(lambda x: x.tolist(), "x is of type list and was traced as a plain tensor", id="list"),
        pytest.param(lambda _x: None, "x is None and was a tensor", id="none"),
        pytest.param(lambda x: x.to_sparse(), "x has the layout torch.sparse_coo", id="sparse"),
        pytest.param(lambda x: torch._neg_view(-x), "lazily conjugated or negated view", id="negative view"),
        pytest.param(lambda x: x.as_subclass(type("Odd", (torch.Tensor,), {})), "x is of type Odd", id="subclass"),
        pytest.param(
            lambda x: torch.nested.nested_tensor([*x]),
            "x is a nested tensor and was",
            id="nested",
            marks=pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
        ),
    ],
)
def test_a_refused_call_names_the_argument_and_what_is_wrong(loaded, change, message):
    with pytest.raises(GuardError, match=message) as error:
        loaded(change(torch.randn(3, hand.WIDTH)))
    assert "None of the 2 compiled variants accepts this call; the nearest is 'prefill'" in str(error.value)
    assert str(error.value).endswith("Change the call, or warm the model with an example like it.")


def test_the_nearest_variant_is_the_one_with_the_fewest_differences(model):
    masked = hand.variant(
        name="masked",
        inputs=(*hand.variant().inputs, Input(source="arg:mask", meta=hand.ROWS)),
        call_guards=(),
        steps=_shifted(hand.variant().steps),
        output=["v", 6],
    )
    loaded = hand.load(model, hand.variant(), masked)
    x = torch.randn(3, hand.WIDTH)
    assert torch.equal(loaded(x, torch.randn(3, hand.WIDTH)), model(x))
    with pytest.raises(GuardError, match=r"dimension 0 is 2 and must be 3.*nearest is 'masked'"):
        loaded(x, torch.randn(2, hand.WIDTH))
    with pytest.raises(GuardError, match=r"mask was None.*nearest is 'prefill'"):
        loaded(x, 7)


def _shifted(steps):
    """Make room for another input."""
    return tuple(
        replace(
            step,
            inputs=tuple(v + 1 if v > 2 else v for v in step.inputs),
            outputs=tuple(v + 1 for v in step.outputs),
        )
        for step in steps
    )


def test_bounds_and_relations_are_reported_with_the_users_names(model):
    bounded = hand.variant(symbols=(SymbolRange(name="s0", min=2, max=8),), relations=("s0 % 2 == 0",))
    loaded = hand.load(model, bounded, hand.one())
    with pytest.raises(GuardError, match="num_tokens is 9 and must be from 1 to 8"):
        loaded(torch.randn(9, hand.WIDTH))
    with pytest.raises(GuardError, match=r"the sizes \(num_tokens 3\) do not satisfy num_tokens % 2 == 0"):
        loaded(torch.randn(3, hand.WIDTH))
    assert loaded(torch.randn(8, hand.WIDTH)).shape == (8, hand.WIDTH)


def test_a_view_with_an_offset_and_the_right_strides_is_accepted(model, loaded):
    x = torch.randn(9, hand.WIDTH)[3:7]
    assert torch.equal(loaded(x), model(x))


def test_strides_of_a_single_row_are_ignored(model, loaded):
    x = torch.randn(hand.WIDTH, 1).t()
    assert x.stride() == (1, 1)
    assert torch.equal(loaded(x), model(x))


def test_gradients_and_training_are_refused_and_inference_mode_is_accepted(model, loaded):
    x = torch.randn(3, hand.WIDTH)
    with torch.enable_grad(), pytest.raises(GuardError, match=r"first.weight requires grad and grad mode is on"):
        loaded(x)
    model.requires_grad_(requires_grad=False)
    with torch.enable_grad():
        assert torch.equal(loaded(x), model(x))
        with pytest.raises(GuardError, match=r"^x requires grad"):
            loaded(x.requires_grad_())
    with torch.inference_mode():
        assert torch.equal(loaded(x), model(x))
        assert torch.equal(loaded(torch.ones(2, hand.WIDTH)), model(torch.ones(2, hand.WIDTH)))
    model.train()
    with pytest.raises(GuardError, match="training mode"):
        loaded(x)


def test_state_guards_are_checked_and_named(model):
    guards = (
        Guard(source="state:autocast", kind="state", expected={}),
        Guard(source="state:default_dtype", kind="state", expected="float32"),
        Guard(source="state:torch_function_mode", kind="state", expected=[]),
    )
    loaded = hand.load(model, hand.variant(call_guards=guards))
    x = torch.randn(3, hand.WIDTH)
    assert torch.equal(loaded(x), model(x))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(GuardError, match="autocast is on for cpu with bfloat16"):
        loaded(x)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(GuardError, match="default dtype is 'float64' and was 'float32'"):
            loaded(x)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("guard", "good", "bad"),
    [
        (Guard(source="arg:mask", kind="value", expected=["t", True, ["f", "0.5"]]), (True, 0.5), (1, 0.5)),
        (Guard(source="arg:mask", kind="value", expected=3), 3, True),
        (Guard(source="arg:mask", kind="value", expected=3), 3, 3.0),
        (Guard(source="arg:mask", kind="value", expected=["f", "0.0"]), 0.0, -0.0),
        (Guard(source="arg:mask", kind="value", expected=["f", "0.5"]), 0.5, np.float64(0.5)),
        (Guard(source="arg:mask", kind="value", expected=True), True, 1),
        (Guard(source="arg:mask", kind="value", expected="a'b"), "a'b", "ab"),
        (Guard(source="arg:mask", kind="type", expected="builtins:dict"), {}, []),
        (Guard(source="arg:mask", kind="type", expected="hand_plans:Output"), hand.Output(1), 1),
        (Guard(source="arg:mask", kind="keys", expected=["a", "b"]), {"a": 1, "b": 2}, {"b": 1, "a": 2}),
        (Guard(source="arg:mask", kind="empty", expected=True), {}, {"a": 1}),
        (Guard(source="arg:mask", kind='contains:"a"', expected=True), {"a": 1}, {}),
        (Guard(source='arg:mask["a"][0].hidden', kind="value", expected=1), {"a": [hand.Output(1)]}, {"a": []}),
        (Guard(source="arg:mask|type", kind="value", expected=["type", "builtins:int"]), 1, "x"),
    ],
    ids=str,
)
def test_guards_on_plain_arguments(model, guard, good, bad):
    loaded = hand.load(model, hand.variant(call_guards=(guard,)))
    x = torch.randn(3, hand.WIDTH)
    assert torch.equal(loaded(x, good), model(x))
    with pytest.raises(GuardError, match="mask"):
        loaded(x, bad)


def test_one_object_passed_twice_differs_from_two_objects(model):
    guards = (Guard(source="arg:mask", kind="same:arg:x", expected=True),)
    loaded = hand.load(model, hand.variant(call_guards=guards))
    x = torch.randn(3, hand.WIDTH)
    assert torch.equal(loaded(x, x), model(x))
    with pytest.raises(GuardError, match="mask and x were one object"):
        loaded(x, x.clone())


def test_a_wrapper_takes_positional_and_keyword_arguments():
    def wraps(function):
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            return function(self, *args, **kwargs)

        return wrapper

    class Wrapped(hand.Model):
        forward = wraps(hand.Model.forward)

    model = Wrapped()
    inputs = (Input(source='arg:kwargs["x"]', meta=hand.ROWS), *hand.variant().inputs[1:])
    guards = (
        Guard(source="arg:kwargs", kind="keys", expected=["x"]),
        Guard(source="arg:args", kind="empty", expected=True),
    )
    loaded = hand.load(model, hand.variant(inputs=inputs, call_guards=guards))
    x = torch.randn(3, hand.WIDTH)
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(loaded(x=x), model(x))
    with pytest.raises(GuardError, match=r"^x has dtype float64"):
        loaded(x.double())
    with pytest.raises(TypeError, match=r"forward\(\) got an unexpected keyword argument 'nope'"):
        loaded(x, nope=1)
    with pytest.raises(GuardError, match=r"^mask is passed now and was not when this was compiled\. "):
        loaded(x, mask=x)
    assert torch.equal(loaded(x, None, scale=1.0), model(x))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        loaded()


def test_a_piece_that_was_not_opened_is_named(model):
    plan = hand.plan()
    with pytest.raises(ArtifactError, match="incomplete: piece 2 of variant 0 has no artifact"):
        LoadedModel(model, plan, {key: value for key, value in hand.opened(plan).items() if key != (0, 2)})


def test_threads_share_one_loaded_model(model, loaded):
    problems = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for rows in [1, 2, 5, 33] * 10:
                x = torch.randn(rows, hand.WIDTH, generator=generator)
                if not torch.equal(loaded(x), model(x)):
                    problems.append((seed, rows))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_guards_cost_little(record_property):
    model = hand.Model()
    guards = (
        Guard(source="arg:mask", kind="value", expected=None),
        Guard(source="arg:scale", kind="value", expected=["f", "1.0"]),
        Guard(source="state:autocast", kind="state", expected={}),
        Guard(source="state:default_dtype", kind="state", expected="float32"),
        Guard(source="state:deterministic", kind="state", expected=False),
        Guard(source="state:float32_matmul_precision", kind="state", expected=torch.get_float32_matmul_precision()),
        Guard(source="state:torch_function_mode", kind="state", expected=[]),
        Guard(source="state:functorch", kind="state", expected=False),
    )
    served = hand.load(model, hand.variant(call_guards=guards))._variants[0]
    x = torch.randn(3, hand.WIDTH)
    assert served.accept(x, None, 1.0) is not None
    best = min(_timed(served.accept, x, None, 1.0) for _ in range(20))
    record_property("accept_us", best * 1e6)
    assert best < 100e-6


def _timed(function, *args, times=200):
    start = time.perf_counter()
    for _ in range(times):
        function(*args)
    return (time.perf_counter() - start) / times


def test_many_weights_cost_little(record_property):
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(9)) for _ in range(80))
    model.forward = hand.Model().forward
    model.eval()
    square = hand.tensor(2, 2)
    extra = [Input(source=f"self.layers.{i}.{j}.weight", meta=square) for i in range(80) for j in range(9)]
    from cgtool.runtime.weights import Weights

    weights = Weights(model, None, extra)
    assert len(weights.read()[0]) == 720
    best = min(_timed(weights.read, times=20) for _ in range(20))
    record_property("weights_us", best * 1e6)
    assert best < 2e-3


def _calls():
    generator = torch.Generator().manual_seed(7)
    base = torch.randn(12, hand.WIDTH, generator=generator)
    tensors = [base[:rows] for rows in (0, 1, 2, 3, 8, 9, 12)]
    tensors += [
        base[:4].double(),
        base[:, :3],
        base[:4].t(),
        base[:6].t().contiguous().t(),
        base[::2],
        base[:1].t().t(),
    ]
    tensors += [base[:3].to("meta"), base[0], base[None], base[:4].int(), base[:3].to_sparse(), None, 3, [base]]
    return [(x, mask) for x in tensors for mask in (None, 1, True, "m", base[:3], base[:4])]


def test_refused_calls_have_reasons_and_accepted_calls_have_none(model):
    from cgtool.runtime.explain import Explainer

    bounded = hand.variant(symbols=(SymbolRange(name="s0", min=2, max=9),), relations=("s0 % 2 == 0 or s0 == 3",))
    masked = hand.variant(
        inputs=(*hand.variant().inputs, Input(source="arg:mask", meta=hand.ROWS)),
        call_guards=(Guard(source="arg:scale", kind="value", expected=["f", "1.0"]),),
        steps=_shifted(hand.variant().steps),
        output=["v", 6],
    )
    loaded = hand.load(model, bounded, masked, hand.one())
    outcomes = set()
    for served in loaded._variants:
        explainer = Explainer(
            served.variant,
            served.call_inputs,
            variants=loaded.plan.variants,
            signature=loaded._signature,
            module=model,
            device_index=None,
        )
        for x, mask in _calls():
            accepted = loaded._prepare(served).accept(x, mask, 1.0) is not None
            failures = explainer.failures({"x": x, "mask": mask, "scale": 1.0})
            outcomes.add(accepted)
            assert accepted == (not failures.kinds and not failures.sizes), (served.variant.name, x, mask, failures)
    assert outcomes == {True, False}


def test_an_unaligned_view_is_accepted_on_the_cpu(model, loaded):
    x = torch.randn(4 * hand.WIDTH + 1)[1:].view(4, hand.WIDTH)
    assert x.data_ptr() % 16
    torch.testing.assert_close(loaded(x), model(x))


def test_an_unaligned_weight_is_warned_about_once_where_kernels_need_alignment(model, monkeypatch):
    monkeypatch.setattr("cgtool.runtime.weights.UNALIGNED_DEVICES", frozenset())
    name, weight = next(model.named_parameters())
    room = torch.zeros(weight.numel() + 1)
    room[1:] = weight.flatten()
    weight.data = room[1:].view(weight.shape)
    x = torch.randn(4, hand.WIDTH)
    with pytest.warns(UserWarning, match=rf"The memory of {name} is not aligned to 16 bytes.*Assign a clone"):
        loaded = hand.load(model)
    torch.testing.assert_close(loaded(x), model(x))


CONFIG = cgtool.CompilationConfig(adaptor="eager")


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.factor = 3

    def forward(self, x):
        return x * self.weight * self.factor


@pytest.fixture(scope="module")
def scale_cache(tmp_path_factory):
    """A cache that the first test fills."""
    return tmp_path_factory.mktemp("scale")


@pytest.fixture(params=["compiled", "loaded", "first call"])
def pair(request, scale_cache):
    module = Scale().eval()
    if request.param == "first call":
        return module, cgtool.compile(module, config=CONFIG, cache_dir=scale_cache)
    model = cgtool.compile(module, example_args=(torch.ones(4),), config=CONFIG, cache_dir=scale_cache)
    return module, cgtool.load(module, cache_dir=scale_cache) if request.param == "loaded" else model


def test_attributes_are_those_of_the_module(pair):
    module, model = pair
    assert model(torch.ones(4)).tolist() == [6.0] * 4
    assert list(model.state_dict()) == ["weight"]
    assert [name for name, _ in model.named_parameters()] == ["weight"]
    assert next(model.parameters()) is module.weight
    assert (model.factor, model.training) == (3, False)
    model.load_state_dict({"weight": torch.ones(4)})
    assert model(torch.ones(4)).tolist() == [3.0] * 4
    assert not hasattr(model, "no_such_attribute")


def test_chained_methods_return_the_compiled_model(pair):
    _, model = pair
    assert model.eval() is model
    assert model.to("cpu").requires_grad_(requires_grad=False) is model
    assert model(torch.ones(4)).tolist() == [6.0] * 4


def test_attributes_are_set_on_the_module(pair):
    module, model = pair
    model(torch.ones(4))
    model.weight = nn.Parameter(torch.ones(4), requires_grad=False)
    model.note = "mine"
    assert (module.weight is model.weight, module.note) == (True, "mine")
    assert model(torch.ones(4)).tolist() == [3.0] * 4
    del model.note
    assert not hasattr(module, "note")
    model.training = True
    with pytest.raises(GuardError, match="training mode"):
        model(torch.ones(4))


def test_a_deliberate_change_can_be_rechecked(pair):
    module, model = pair
    model.recheck()
    model(torch.ones(4))
    module.factor = 4
    with pytest.raises(GuardError, match="factor"):
        model.recheck()


class Square(nn.Module):
    def forward(self, x):
        return x @ x.T


def test_a_call_that_runs_out_of_memory_reports_its_sizes(tmp_path):
    model = Square().eval()
    spec = cgtool.ModelSpec(
        module=model, calls=[cgtool.ExampleCall(args=(torch.rand(4, 1),))], dynamic={"x": {0: ("rows", 2, None)}}
    )
    warm(spec, config=CONFIG, cache_dir=tmp_path)
    loaded = cgtool.load(model, cache_dir=tmp_path)
    rows = 1 << 24  # its square exceeds any address space
    with pytest.raises(
        torch.OutOfMemoryError, match=rf"A call of forward with rows = {rows} ran out of memory; .* 64 MiB"
    ):
        loaded(torch.empty(rows, 1))
    x = torch.rand(3, 1)
    torch.testing.assert_close(loaded(x), model(x))
