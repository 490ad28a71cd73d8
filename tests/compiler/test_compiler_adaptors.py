"""Every adaptor computes what a piece computes op by op."""

from __future__ import annotations

import itertools

import pytest
import torch
from aot_packages import package_of
from msgspec.structs import replace
from piece_cases import CASES, OTHERWISE_LAID, inputs_of, same_as_eager, tensor, with_results
from torch._inductor.codegen.cpp import CppKernel

from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.errors import ArtifactError, ConfigError

pytestmark = pytest.mark.torch

ADAPTORS = ("eager", "inductor_standalone", "inductor")


def pairs():
    """Yield every adaptor with every case; for `inductor`, which resembles `inductor_standalone`, every fourth."""
    for adaptor, (number, name) in itertools.product(ADAPTORS, enumerate(CASES)):
        marks = [pytest.mark.slow] if adaptor == "inductor" and number % 4 else []
        yield pytest.param(adaptor, name, id=f"{adaptor}-{name}", marks=marks)


@pytest.mark.parametrize(("adaptor", "name"), list(pairs()))
def test_an_adaptor_computes_what_the_piece_computes(adaptor, name):
    case = CASES[name]
    piece = with_results(case.piece)
    compiler = get_adaptor(adaptor)
    compiled = compiler.compile(piece, options={})
    assert compiled.guards == ()
    run = compiler.load(compiled.artifact, piece)
    for sizes in case.sizes:
        same_as_eager(run, case, sizes, strides=False)


def test_an_index_out_of_range_raises_in_threaded_loops():
    before = dict(vars(CppKernel))
    piece = with_results(CASES["indices"].piece)
    compiler = get_adaptor("inductor_standalone")
    run = compiler.load(compiler.compile(piece, options={}).artifact, piece)
    with pytest.raises(RuntimeError, match="index out of bounds"):
        run([torch.full((1 << 14,), 8), torch.randn(8, 8)])
    assert dict(vars(CppKernel)) == before


def test_the_list_of_inputs_is_emptied():
    case = CASES["two inputs"]
    piece = with_results(case.piece)
    for adaptor in ADAPTORS:
        compiler = get_adaptor(adaptor)
        run = compiler.load(compiler.compile(piece, options={}).artifact, piece)
        boxed = inputs_of(case, {"s0": 3})
        run(boxed)
        assert boxed == []


@pytest.mark.parametrize("adaptor", [*ADAPTORS, "aot_inductor"])
def test_outputs_have_the_strides_of_the_trace_and_not_those_of_eager(adaptor):
    piece = OTHERWISE_LAID
    compiler = get_adaptor(adaptor)
    native = adaptor == "aot_inductor"  # its package is cached, since the compile is slow
    run = compiler.load(package_of(piece) if native else compiler.compile(piece, options={}).artifact, piece)
    inputs = [torch.randn(5, 3, 4, 4), torch.randn(5, 3, 4, 4).to(memory_format=torch.channels_last)]
    eager = torch.cat(inputs, 1)
    with torch.no_grad():
        (found,) = run(list(inputs))
    assert found.stride() == (96, 1, 24, 6) != eager.stride()
    assert torch.equal(found, eager)


def test_an_eager_piece_checks_the_promised_shapes():
    piece = replace(OTHERWISE_LAID, results=(tensor("s0", 7, 4, 4),))
    compiler = get_adaptor("eager")
    run = compiler.load(compiler.compile(piece, options={}).artifact, piece)
    with pytest.raises(ArtifactError, match=r"shape \(5, 6, 4, 4\).*promised float32 of shape \(5, 7, 4, 4\)"):
        run([torch.randn(5, 3, 4, 4), torch.randn(5, 3, 4, 4).to(memory_format=torch.channels_last)])


def test_an_unknown_adaptor_is_named():
    with pytest.raises(ConfigError, match="inductor_standalone"):
        get_adaptor("inductr")
