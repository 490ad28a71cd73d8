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


def test_one_tensor_for_both_arguments_is_right(llama):
    loaded, (_, positions) = llama
    assert right(loaded, positions, positions)


def test_a_token_that_the_model_does_not_have_is_an_index_error(llama):
    """Native code checks indices in loops that OpenMP runs, where an error would end the process."""
    loaded, (input_ids, positions) = llama
    for token in (loaded.embed_tokens.num_embeddings, -1):
        for model in (loaded.module, loaded):
            with pytest.raises(IndexError, match=r"(out of range in self|an index out of range)"):
                model(torch.full_like(input_ids, token), positions)
    assert right(loaded, input_ids, positions)


def test_dual_numbers_are_refused(vision):
    loaded, images = vision
    with torch.autograd.forward_ad.dual_level(), pytest.raises(cgtool.GuardError, match=r"^A dual level of"):
        loaded(images)
    assert right(loaded, images)


def test_what_records_ops_is_refused(vision):
    """Of native code it would record the numbers of one call."""
    loaded, images = vision
    with pytest.raises(cgtool.GuardError, match=r"^torch\.jit\.trace cannot see ops inside compiled code"):
        torch.jit.trace(loaded, (images,))
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
