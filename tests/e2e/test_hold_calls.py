"""Calls either equal eager or raise an error that says what to do."""

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
def vision(native_vision):
    """A loaded model of floating-point images, and its example images."""
    spec = fixture_spec("vision")
    with torch.no_grad():
        return cgtool.load(spec.module, cache_dir=native_vision.root), spec.calls[0].args[0]


@pytest.fixture(scope="module")
def llama(native_llama):
    """A loaded model of integer tokens and positions, and its example arguments."""
    spec = fixture_spec("llama")
    with torch.no_grad():
        return cgtool.load(spec.module, cache_dir=native_llama.root), spec.calls[0].args


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def check(loaded, *args):
    """Check that a call equals eager's for contiguous copies of the arguments."""
    expected = loaded.module(*(arg.detach().clone().contiguous() for arg in args))
    difference(loaded(*args), expected)


def misaligned(images):
    """Return the same values at an address that aligned vector instructions cannot read."""
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
def test_a_call_equals_eager(vision, make):
    loaded, images = vision
    check(loaded, make(images))
    with torch.inference_mode():
        check(loaded, make(images))


def test_one_tensor_may_be_passed_for_both_arguments(llama):
    loaded, (_, positions) = llama
    check(loaded, positions, positions)


def test_a_token_out_of_range_is_an_index_error(llama):
    """Native code checks indices in OpenMP loops, where a C++ exception would end the process."""
    loaded, (input_ids, positions) = llama
    for token in (loaded.embed_tokens.num_embeddings, -1):
        for model in (loaded.module, loaded):
            with pytest.raises(IndexError, match=r"(out of range in self|an index out of range)"):
                model(torch.full_like(input_ids, token), positions)
    check(loaded, input_ids, positions)


def test_dual_numbers_are_refused(vision):
    loaded, images = vision
    with torch.autograd.forward_ad.dual_level(), pytest.raises(cgtool.GuardError, match=r"^A dual level of"):
        loaded(images)
    check(loaded, images)


def test_torch_jit_trace_is_refused(vision):
    """It would record the results of native code as constants."""
    loaded, images = vision
    with pytest.raises(cgtool.GuardError, match=r"^torch\.jit\.trace cannot see ops inside compiled code"):
        torch.jit.trace(loaded, (images,))
    check(loaded, images)


def test_torch_modes_that_change_ops_are_refused(vision):
    loaded, images = vision
    with torch.device("meta"), pytest.raises(cgtool.GuardError, match="default device is 'meta'"):
        loaded(images)
    with pytest.raises(cgtool.GuardError, match="functorch transform"):
        torch.vmap(loaded)(images.unsqueeze(0))
    check(loaded, images)


def test_a_call_does_not_write_to_its_arguments_or_earlier_outputs(vision):
    """A piece may write to memory from another piece, but never to memory that the caller holds."""
    loaded, images = vision
    before = images.clone()
    first = loaded(images)
    second = loaded(images)
    assert torch.equal(images, before)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
    assert np.isfinite(first[0].numpy()).all()
