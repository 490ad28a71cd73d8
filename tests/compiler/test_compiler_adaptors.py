"""Every adaptor computes what the piece computes op by op, whatever the piece does."""

from __future__ import annotations

import itertools

import pytest
import torch
from piece_cases import CASES, inputs_of

from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.errors import ConfigError
from cgtool.runtime.program import piece_function

pytestmark = pytest.mark.torch

ADAPTORS = ("eager", "inductor_standalone", "inductor")


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def sharing(inputs, outputs):
    """Return which outputs share their storage with which inputs and earlier outputs."""
    every = [*inputs, *outputs]
    return [[storage(one) == storage(other) for other in every[:n]] for n, one in enumerate(every)]


def pairs():
    """Every adaptor with every case; what `inductor` adds to `inductor_standalone` is seen with every fourth."""
    for adaptor, (number, name) in itertools.product(ADAPTORS, enumerate(CASES)):
        marks = [pytest.mark.slow] if adaptor == "inductor" and number % 4 else []
        yield pytest.param(adaptor, name, id=f"{adaptor}-{name}", marks=marks)


@pytest.mark.parametrize(("adaptor", "name"), pairs())
def test_an_adaptor_computes_what_the_piece_computes(adaptor, name):
    case = CASES[name]
    compiler = get_adaptor(adaptor)
    compiled = compiler.compile(case.piece, options={})
    assert compiled.guards == ()
    run = compiler.load(compiled.artifact, case.piece)
    eager = piece_function(case.piece)
    for sizes in case.sizes:
        ours, theirs = inputs_of(case, sizes), inputs_of(case, sizes)
        with torch.no_grad():
            found, expected = list(run(list(ours))), list(eager(list(theirs)))
        assert len(found) == len(expected) == len(case.piece.outputs)
        for left, right in zip([*found, *ours], [*expected, *theirs], strict=True):
            torch.testing.assert_close(left, right, atol=case.tolerance, rtol=case.tolerance)
        assert sharing(ours, found) == sharing(theirs, expected)


def test_inputs_are_taken_over():
    case = CASES["two inputs"]
    for adaptor in ADAPTORS:
        compiler = get_adaptor(adaptor)
        run = compiler.load(compiler.compile(case.piece, options={}).artifact, case.piece)
        boxed = inputs_of(case, {"s0": 3})
        run(boxed)
        assert boxed == []


def test_an_unknown_adaptor_is_named():
    with pytest.raises(ConfigError, match="inductor_standalone"):
        get_adaptor("inductr")
