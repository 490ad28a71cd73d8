"""The model's tensors: changes after load are used or refused, never ignored."""

from __future__ import annotations

import hand_plans as hand
import pytest
import torch
from torch import nn

import cgtool
from cgtool.config import CompilationConfig
from cgtool.errors import GuardError
from cgtool.plan.records import Guard, Input
from cgtool.runtime.call_guards import Reader
from cgtool.runtime.generate import Code

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_grad")]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return hand.Model()


@pytest.fixture
def x():
    return torch.randn(3, hand.WIDTH)


def sparse(model):
    model.first._parameters["weight"] = model.first.weight.detach().to_sparse()


def sparse_by_rows(model):
    dense = model.first.weight.detach()
    rows, columns = torch.arange(hand.WIDTH + 1) * hand.WIDTH, torch.arange(hand.WIDTH).repeat(hand.WIDTH)
    weight = torch.sparse_csr_tensor(rows, columns, dense.flatten(), dense.shape, check_invariants=False)
    model.first._parameters["weight"] = weight


def nested(model):
    model.first._parameters["weight"] = torch._nested_tensor_from_tensor_list([torch.ones(2), torch.ones(3)])


def negated_lazily(model):
    model.first._parameters["weight"] = torch._neg_view(model.first.weight.detach())


def transposed(model):
    model.first.weight.data = model.first.weight.data.t()


def reshaped(model):
    model.first.weight = nn.Parameter(torch.randn(2 * hand.WIDTH, hand.WIDTH))


def deleted(model):
    del model.first.weight


def emptied(model):
    model.first.weight = None


def subclassed(model):
    odd = type("Odd", (torch.Tensor,), {})
    model.first._parameters["weight"] = torch.randn(hand.WIDTH, hand.WIDTH).as_subclass(odd)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.half(), "first.weight has dtype float16 and was traced with float32"),
        (lambda m: m.to("meta"), "first.weight is on meta and must be on cpu"),
        (transposed, r"first.weight has the strides \(1, 4\) and was traced with \(4, 1\)"),
        (reshaped, r"first.weight has the shape \(8, 4\) and was traced with \(4, 4\)"),
        (deleted, "no longer exists"),
        (emptied, "first.weight is of type NoneType"),
        (subclassed, "first.weight is of type Odd"),
        (sparse, r"^first.weight has the layout torch\.sparse_coo"),
        (sparse_by_rows, r"^first.weight has the layout torch\.sparse_csr"),
        (nested, "^first.weight is a nested tensor"),
        (negated_lazily, "^first.weight is a lazily conjugated or negated view"),
    ],
    ids=[
        "half",
        "meta",
        "transposed",
        "reshaped",
        "deleted",
        "None",
        "subclass",
        "sparse",
        "sparse by rows",
        "nested",
        "negated",
    ],
)
def test_a_weight_of_another_kind_is_refused_by_the_next_call_and_by_load(model, x, change, message):
    loaded = hand.load(model)
    loaded(x)
    with torch.inference_mode():
        loaded(x)
    change(model)
    for attempt in range(2):
        with pytest.raises(GuardError, match=message) as error:
            loaded(x)
        assert "warm the model again" in str(error.value), attempt
    with torch.inference_mode(), pytest.raises(GuardError, match=message):
        loaded(x)
    with pytest.raises(GuardError):
        hand.load(model)


def test_requires_grad_is_detected_in_and_out_of_inference_mode(model, x):
    loaded = hand.load(model)
    loaded(x)
    model.requires_grad_(requires_grad=False)
    with torch.inference_mode():
        loaded(x)
    with torch.enable_grad():
        loaded(x)
        model.first.weight.requires_grad_()
        with pytest.raises(GuardError, match=r"first.weight requires grad"):
            loaded(x)


def test_replacing_a_module_rechecks_the_model(model, x):
    guards = (Guard(source="self.first|type", kind="value", expected=["type", "torch.nn.modules.linear:Linear"]),)
    loaded = hand.load(model, hand.variant(model_guards=guards))
    loaded(x)
    model.first = nn.Identity()
    model.first.weight = nn.Parameter(torch.randn(hand.WIDTH, hand.WIDTH))
    with pytest.raises(GuardError, match=r"first.*Linear when this was compiled"):
        loaded(x)


def test_adding_a_module_rechecks_the_model(model, x):
    guards = (Guard(source="self._modules", kind="keys", expected=["first", "last"]),)
    loaded = hand.load(model, hand.variant(model_guards=guards))
    loaded(x)
    model.more = nn.Identity()
    with pytest.raises(GuardError, match=r"keys first, last|keys 'first', 'last'"):
        loaded(x)
    del model.more
    assert torch.equal(loaded(x), model(x))


def test_recheck_detects_a_changed_plain_attribute(model, x):
    loaded = hand.load(model)
    loaded.recheck()
    model.eps = 0.25
    with pytest.raises(GuardError, match=r"eps was 0.5 when this was compiled and is 0.25 now"):
        loaded.recheck()
    model.eps = 0.5
    loaded.recheck()
    assert torch.equal(loaded(x), model(x))


def test_untied_weights_are_refused(model, x):
    model.last.weight = model.first.weight
    tied = (Guard(source="self.last.weight", kind="same:self.first.weight", expected=True),)
    inputs = hand.variant().inputs
    loaded = hand.load(model, hand.variant(model_guards=tied, inputs=(*inputs[:2], inputs[1])))
    assert torch.equal(loaded(x), model(x))
    model.last.weight = nn.Parameter(model.first.weight.clone())
    with pytest.raises(GuardError, match=r"last.weight and first.weight were one object"):
        loaded(x)


def test_weights_that_become_tied_are_refused(model, x):
    apart = (Guard(source="self.last.weight", kind="same:self.first.weight", expected=False),)
    loaded = hand.load(model, hand.variant(model_guards=apart))
    assert torch.equal(loaded(x), model(x))
    model.last.weight = model.first.weight
    with pytest.raises(GuardError, match=r"last.weight and first.weight were two objects"):
        loaded(x)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.full((4,), 2.0) for _ in range(2)])

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return x


def test_a_list_of_parameters_that_grows_is_refused_by_the_next_call(tmp_path):
    model, x = Scaled().eval(), torch.ones(4)
    config = CompilationConfig(adaptor="eager", proof=False)
    loaded = cgtool.compile(model, example_args=(x,), cache_dir=tmp_path, config=config)
    assert torch.equal(loaded(x), model(x))
    model.scales.append(torch.full((4,), 2.0))
    with pytest.raises(GuardError, match="was 2 when this was compiled and is 3 now"):
        loaded(x)


def test_buffers_plain_attributes_and_globals_are_read_live(model, x):
    model.register_buffer("scale", torch.ones(hand.WIDTH, hand.WIDTH))
    model.plain = {"w": [torch.ones(hand.WIDTH, hand.WIDTH)]}
    inputs = (
        hand.variant().inputs[0],
        Input(source="self.scale", meta=hand.WEIGHT),
        Input(source='self.plain["w"][0]', meta=hand.WEIGHT),
    )
    loaded = hand.load(model, hand.variant(inputs=inputs))
    expected = x @ model.scale.t() * 2 @ model.plain["w"][0].t()
    assert torch.allclose(loaded(x), expected)
    model.scale = torch.full_like(model.scale, 3.0)
    model.plain["w"][0] = torch.full_like(model.scale, 2.0)
    expected = x @ model.scale.t() * 2 @ model.plain["w"][0].t()
    assert torch.allclose(loaded(x), expected)
    model.plain["w"] = []
    with pytest.raises(GuardError, match="no longer exists"):
        loaded(x)


def test_a_tensor_in_a_closure_is_read_from_the_closure():
    held = {"part": [1]}

    class Closed(nn.Module):
        def forward(self, x):
            return x * held["part"][0]

    model, code = Closed(), Code("part")
    part = Reader(code, model, model.forward).read('free:held["part"]')
    code.add(f"return {part}")
    assert code.define("read")() is held["part"]
