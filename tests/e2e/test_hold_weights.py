"""Weights that change after load, before it, or on a model built on the meta device: no call uses a stale value."""

from __future__ import annotations

import copy

import pytest
from hold_harness import fixture_spec, warm_model

pytest.importorskip("torch")

import torch
from e2e_compare import difference
from torch import nn
from torch._subclasses import FakeTensorMode

import cgtool

pytestmark = pytest.mark.torch

NAME = "layers.1.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def root(native_llama):
    return native_llama.root


@pytest.fixture
def spec():
    return fixture_spec("llama")


def state(module, factor=1.0):
    """Return new values with the same shapes for every tensor."""
    seed = torch.Generator().manual_seed(5)
    values = {}
    for name, value in module.state_dict().items():
        values[name] = torch.randn(value.shape, generator=seed) * factor / value.shape[-1] ** 0.5
    return values


def owner(module):
    return module.get_submodule(NAME.rpartition(".")[0])


def assigned(module):
    owner(module).weight = nn.Parameter(torch.randn_like(owner(module).weight))


def assigned_past_the_module(module):
    owner(module)._parameters["weight"] = nn.Parameter(torch.randn_like(owner(module).weight))


def copied(module):
    module.load_state_dict(state(module))


def copied_with_assign(module):
    module.load_state_dict(state(module), assign=True)


def written(module):
    owner(module).weight.mul_(-2)


def written_through_a_view(module):
    owner(module).weight[3:7].zero_()


def swapped_data(module):
    owner(module).weight.data = torch.randn_like(owner(module).weight)


def swapped_storage(module):
    weight = owner(module).weight
    weight.set_(torch.randn_like(weight))


def written_under_inference_mode(module):
    with torch.inference_mode():
        owner(module).weight.add_(1)


def made_in_inference_mode(module):
    with torch.inference_mode():
        fresh = torch.randn_like(owner(module).weight)
    owner(module).weight = nn.Parameter(fresh, requires_grad=False)


def buffer_assigned(module):
    rotary = module.layers[0].self_attn.rotary
    rotary.cos_sin = rotary.cos_sin.flip(0) + 0.5


def module_replaced(module):
    module.layers[1].mlp = copy.deepcopy(module.layers[0].mlp)


def moved_by_to_empty(module):
    values = state(module)
    kept = module.layers[0].self_attn.rotary.cos_sin.clone()
    module.to_empty(device="cpu")
    module.layers[0].self_attn.rotary.cos_sin.copy_(kept)  # it is not persistent
    module.load_state_dict(values)


def cast_and_back(module):
    module.to(torch.float64)
    module.float()
    owner(module).weight.mul_(-1.5)


CHANGES = [
    assigned,
    assigned_past_the_module,
    copied,
    copied_with_assign,
    written,
    written_through_a_view,
    swapped_data,
    swapped_storage,
    written_under_inference_mode,
    made_in_inference_mode,
    buffer_assigned,
    module_replaced,
    moved_by_to_empty,
    cast_and_back,
]


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_call_uses_the_new_values(root, spec, change):
    args = spec.calls[0].args
    loaded = cgtool.load(spec.module, cache_dir=root)
    before = loaded(*args)
    for mode in (torch.no_grad, torch.inference_mode):  # the first call after a change may be of either kind
        change(spec.module)
        with mode():
            output = loaded(*args)
            difference(output, spec.module(*args))
    assert (output - before).abs().max() > 1e-3


@pytest.mark.parametrize("assign", [False, True])
def test_weights_may_change_before_load(root, spec, assign):
    args = spec.calls[0].args
    spec.module.load_state_dict(state(spec.module), assign=assign)
    loaded = cgtool.load(spec.module, cache_dir=root)
    difference(loaded(*args), spec.module(*args))


def test_a_model_on_the_meta_device_is_served_after_to_empty_as_the_error_says(root):
    with torch.device("meta"):
        spec = fixture_spec("llama")
    args = [arg.new_ones(arg.shape, device="cpu") for arg in spec.calls[0].args]
    with pytest.raises(cgtool.CacheMissError, match=r"on the meta device .*to_empty.*load_state_dict"):
        cgtool.load(spec.module, cache_dir=root)
    real = fixture_spec("llama").module
    spec.module.to_empty(device="cpu")
    spec.module.load_state_dict(real.state_dict())
    for name, value in real.named_buffers():
        spec.module.get_buffer(name).copy_(value)
    difference(cgtool.load(spec.module, cache_dir=root)(*args), real(*args))


def test_a_model_on_the_meta_device_is_served_after_assignment_of_its_weights(root):
    with torch.device("meta"):
        module = fixture_spec("llama").module
    real = fixture_spec("llama")
    module.load_state_dict(real.module.state_dict(), assign=True)
    rotary = module.layers[0].self_attn.rotary
    rotary.cos_sin = real.module.layers[0].self_attn.rotary.cos_sin
    args = real.calls[0].args
    difference(cgtool.load(module, cache_dir=root)(*args), real.module(*args))


def test_a_fake_model_is_refused_with_an_error(root):
    with FakeTensorMode():
        module = fixture_spec("llama").module
    with pytest.raises(cgtool.CgtoolError, match="is of type FakeTensor"):
        cgtool.load(module, cache_dir=root)


def test_a_model_that_moves_to_another_device_and_back_is_served(root, spec):
    args = spec.calls[0].args
    loaded = cgtool.load(spec.module, cache_dir=root)
    values = copy.deepcopy(spec.module.state_dict())
    kept = spec.module.layers[0].self_attn.rotary.cos_sin.clone()
    expected = spec.module(*args)
    spec.module.to("meta")
    with pytest.raises(cgtool.GuardError):
        loaded(*args)
    spec.module.to_empty(device="cpu")
    spec.module.layers[0].self_attn.rotary.cos_sin.copy_(kept)
    spec.module.load_state_dict(values)
    difference(loaded(*args), expected)


@pytest.fixture(scope="module")
def tied_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("tied") / "cache"
    warm_model(f"{__file__.rpartition('/')[0]}/hold_models.py:tied", root, adaptor="eager")
    return root


@pytest.fixture
def tied(tied_root):
    import hold_models

    spec = hold_models.tied()
    return cgtool.load(spec.module, cache_dir=tied_root), spec.calls[0].args[0]


def test_tied_weights_change_together(tied):
    loaded, x = tied
    module = loaded.module
    difference(loaded(x), module(x))
    before = loaded(x)
    module.first.weight.mul_(2)
    difference(loaded(x), module(x))
    module.last.weight = module.first.weight = nn.Parameter(torch.randn(16, 16))
    difference(loaded(x), module(x))
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
    difference(loaded(x), module(x))
    assert (loaded(x) - before).abs().max() > 1e-3


@pytest.mark.parametrize("which", ["first", "last"])
def test_weights_that_are_no_longer_tied_are_refused(tied, which):
    loaded, x = tied
    getattr(loaded.module, which).weight = nn.Parameter(loaded.module.first.weight.clone())
    with pytest.raises(cgtool.GuardError, match=r"weight.*weight were one object when this was compiled"):
        loaded(x)
    loaded.module.last.weight = loaded.module.first.weight
    difference(loaded(x), loaded.module(x))


def test_weights_untied_by_load_state_dict_are_refused(tied):
    """`load_state_dict(assign=True)` gives each name its own parameter."""
    loaded, x = tied
    values = {name: value.clone() for name, value in loaded.module.state_dict().items()}
    loaded.module.load_state_dict(values, assign=True)
    with pytest.raises(cgtool.GuardError, match="were one object when this was compiled"):
        loaded(x)
