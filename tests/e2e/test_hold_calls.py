"""Calls as users make them: right as eager, or refused in a sentence that says what to do, and nothing in between."""

from __future__ import annotations

import numpy as np
import pytest
from hold_harness import fixture_spec

pytest.importorskip("torch")

import torch
from e2e_compare import difference

import cgtool

pytestmark = pytest.mark.torch


class Subclass(torch.Tensor):
    """A tensor of a user's own class."""


@pytest.fixture(scope="module")
def vision(aot_cache):
    """A loaded model that takes floats, and what it takes."""
    spec = fixture_spec("vision")
    root = aot_cache("vision")
    with torch.no_grad():
        return cgtool.load(spec.module, cache_dir=root), spec.calls[0].args[0]


@pytest.fixture(scope="module")
def llama(aot_cache):
    """A loaded model that takes whole numbers, and what it takes."""
    spec = fixture_spec("llama")
    root = aot_cache("llama")
    with torch.no_grad():
        return cgtool.load(spec.module, cache_dir=root), spec.calls[0].args


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def right(loaded, *args):
    """The call gives what eager gives for contiguous copies of the same values."""
    expected = loaded.module(*(arg.detach().clone().contiguous() for arg in args))
    difference(loaded(*args), expected)
    return True


def misaligned(images):
    """The same values where no vector instruction that wants aligned memory may read them."""
    view = torch.empty(images.numel() + 1)[1:].view(images.shape).copy_(images)
    assert view.data_ptr() % 16
    return view


def wide(images):
    """Every second column of something larger."""
    return images.repeat_interleave(2, dim=-1)[..., ::2]


def in_inference_mode(x):
    with torch.inference_mode():
        return x.clone()


SERVED = {
    "contiguous": lambda x: x,
    "misaligned": misaligned,
    "a part of a larger batch": lambda x: torch.cat([x, x])[2:5],
    "one image": lambda x: x[:1],
    "made in inference mode": in_inference_mode,
}


@pytest.mark.parametrize("make", SERVED.values(), ids=SERVED)
def test_a_call_is_right(vision, make):
    loaded, images = vision
    assert right(loaded, make(images))
    with torch.inference_mode():
        assert right(loaded, make(images))


REFUSED = {
    "strides that say nothing, to code that names strides": (
        lambda x: x[:1].as_strided((1, *x.shape[1:]), (7, *x.stride()[1:])),
        r"^images was a tensor whose dimensions of size one have the strides",
    ),
    "channels last": (
        lambda x: x.contiguous(memory_format=torch.channels_last),
        r"^images has the strides .* pass images\.contiguous\(\)\.",
    ),
    "transposed": (lambda x: x.mT.contiguous().mT, r"^images has the strides .* pass images\.contiguous\(\)\."),
    "every second column": (wide, r"^images has the strides .* pass images\.contiguous\(\)\."),
    "one image shown often": (
        lambda x: x[:1].expand(3, -1, -1, -1),
        r"^images has the strides .* pass images\.contiguous\(\)\.",
    ),
    "lazily negated": (lambda x: torch._neg_view(-x), r"^images is a lazily conjugated or negated view.* resolved"),
    "a subclass": (lambda x: x.as_subclass(Subclass), r"^images is of type Subclass and was traced as a plain tensor"),
    "sparse": (lambda x: x.to_sparse(), r"^images has the layout torch\.sparse_coo and was traced as a strided tensor"),
    "on another device": (lambda x: x.to("meta"), r"^images is on meta and must be on cpu"),
    "another dtype": (lambda x: x.double(), r"^images has dtype float64 and was traced with float32"),
    "complex": (lambda x: x.to(torch.complex64).conj(), r"^images has dtype complex64 and was traced with float32"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        r"^images has dtype qint8 and was traced with float32",
    ),
    "no images": (lambda x: x[:0], r"^batch is 0 and must be at least 1"),
    "a dimension less": (lambda x: x[0], r"^images has 3 dimensions and was traced with 4"),
    "another size": (lambda x: x[..., :16], r"^the size of images in dimension 3 is 16 and must be 32"),
    "an array": (lambda x: x.numpy(), r"^images is of type ndarray and was traced as a plain tensor"),
    "a list": (lambda x: x.tolist(), r"^images is of type list and was traced as a plain tensor"),
    "nested": (
        lambda x: torch.nested.nested_tensor([*x]),
        r"^images is a nested tensor and was traced as a plain tensor",
    ),
    "nothing": (lambda _: None, r"^images is None and was a tensor"),
}


@pytest.mark.filterwarnings("ignore")  # torch deprecates quantized tensors as they are made
@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED)
def test_a_call_is_refused_in_a_sentence(vision, make, says):
    loaded, images = vision
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(cgtool.GuardError, match=says) as refused:
            loaded(make(images))
        assert str(refused.value).endswith("Change the call, or warm with an example like it.")
    assert right(loaded, images)


def test_zero_tokens_are_refused(llama):
    loaded, _ = llama
    with pytest.raises(cgtool.GuardError, match=r"^num_tokens is 0 and must be at least 1"):
        loaded(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def test_two_arguments_that_disagree_are_refused(llama):
    loaded, (input_ids, positions) = llama
    with pytest.raises(cgtool.GuardError, match=r"^the size of positions in dimension 0 is 15 and must be 16"):
        loaded(input_ids, positions[:-1])


def test_one_tensor_for_both_arguments_is_right(llama):
    loaded, (_, positions) = llama
    assert right(loaded, positions, positions)


def test_a_token_that_the_model_does_not_have_is_an_index_error(llama):
    """Native code checks indices in loops that OpenMP runs, where an error would end the process."""
    loaded, (input_ids, positions) = llama
    for token in (loaded.embed_tokens.num_embeddings, -1):
        for model in (loaded.module, loaded):
            with pytest.raises(IndexError, match=r"(out of range in self|outside of what it indexes)"):
                model(torch.full_like(input_ids, token), positions)
    assert right(loaded, input_ids, positions)


def test_autocast_is_refused_and_off_is_right(vision):
    loaded, images = vision
    for dtype in (torch.bfloat16, torch.float16):
        with (
            torch.autocast("cpu", dtype=dtype),
            pytest.raises(cgtool.GuardError, match=rf"^autocast is on for cpu with {str(dtype)[6:]} and was off when"),
        ):
            loaded(images)
    with torch.autocast("cpu", enabled=False):
        assert right(loaded, images)


def test_gradients_are_refused_whoever_wants_them(vision):
    loaded, images = vision
    advice = (
        r"requires grad and grad mode is on\. Compiled entries are for inference: call it under torch\.no_grad\(\)\."
    )
    with torch.enable_grad():
        with pytest.raises(cgtool.GuardError, match=rf"^stem\.weight {advice}"):
            loaded(images)
        loaded.module.requires_grad_(requires_grad=False)
        try:
            found = loaded(images)
            with pytest.raises(cgtool.GuardError, match=rf"^images {advice}"):
                loaded(images.clone().requires_grad_())
        finally:
            loaded.module.requires_grad_()
    difference(found, loaded.module(images))


def test_dual_numbers_are_refused(vision):
    loaded, images = vision
    with torch.autograd.forward_ad.dual_level(), pytest.raises(cgtool.GuardError, match=r"^A dual level of"):
        loaded(images)
    assert right(loaded, images)


def test_what_records_ops_is_refused(vision):
    """Of native code it would record the numbers of one call."""
    loaded, images = vision
    with pytest.raises(cgtool.GuardError, match=r"^torch\.jit\.trace sees no op of compiled code"):
        torch.jit.trace(loaded, (images,))
    assert right(loaded, images)


def test_training_is_refused(vision):
    loaded, images = vision
    loaded.module.train()
    try:
        with pytest.raises(cgtool.GuardError, match=r"^The model is in training mode\..* call model\.eval\(\) first"):
            loaded(images)
    finally:
        loaded.module.eval()
    assert right(loaded, images)


def test_modes_of_torch_that_change_what_ops_do_are_refused(vision):
    loaded, images = vision
    with torch.device("meta"), pytest.raises(cgtool.GuardError, match="default device is 'meta'"):
        loaded(images)
    with pytest.raises(cgtool.GuardError, match="functorch transform"):
        torch.vmap(loaded)(images.unsqueeze(0))
    assert right(loaded, images)


def test_what_was_given_is_left_as_it_was(vision):
    """A piece may write into memory that it was given by another piece, never into what the caller holds."""
    loaded, images = vision
    before = images.clone()
    first = loaded(images)
    second = loaded(images)
    assert torch.equal(images, before)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
    assert np.isfinite(first[0].numpy()).all()
