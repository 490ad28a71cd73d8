"""Outputs that are views: they share the source's memory, and only the grammar's forms are accepted."""

from __future__ import annotations

import json

import pytest
import torch

from cgtool.errors import ArtifactError
from cgtool.plan.pieces import PieceGraph, SymbolRange, TensorMeta
from cgtool.runtime.aoti_package import with_views

pytestmark = pytest.mark.torch

META = TensorMeta(dtype="float32", shape=("s0", 8), stride=(8, 1), device="cpu")


def piece(num_outputs, symbols=("s0",), shape=("s0", 8)):
    meta = TensorMeta(dtype="float32", shape=shape, stride=(8, 1), device="cpu")
    return PieceGraph(
        symbols=tuple(SymbolRange(name=name, min=2, max=None) for name in symbols),
        facts=(),
        inputs=(meta, meta),
        aliases=(),
        nodes=(),
        outputs=("%0",) * num_outputs,
        results=(META,) * num_outputs,
        ops={},
    )


def native(inputs):
    """A stand-in for native code: empties the list, writes to an input, returns a list."""
    first, second = inputs[:2]
    inputs.clear()
    second.add_(1)
    return [first * 2]


def run(recipe, *inputs):
    graph = piece(len(recipe))
    return with_views(native, json.dumps(recipe), graph, num_constants=len(inputs) - 2)(list(inputs))


def test_views_and_whole_tensors_share_the_memory_of_their_source():
    x, y = torch.arange(24.0).view(3, 8), torch.zeros(3, 8)
    found = run(
        [["input", 1], ["native", 0], ["input", 1, [8, "s0"], [1, 8], 0], ["native", 0, ["2*s0"], [1], "s0"]], x, y
    )
    assert found[0] is y
    assert torch.equal(found[1], x * 2)
    assert torch.equal(found[2], torch.ones(8, 3))
    assert found[2].data_ptr() == y.data_ptr()
    assert torch.equal(found[3], (x * 2).flatten()[3:9])
    assert found[3].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


def test_an_input_may_have_any_storage_offset():
    x, y = torch.zeros(3, 8), torch.arange(48.0)[5:29].view(3, 8)
    (found,) = run([["input", 1, ["s0"], [8], 2]], x, y)
    assert torch.equal(found, y[:, 2])
    assert found.data_ptr() == y[:, 2].data_ptr()


def test_a_view_may_have_another_dtype():
    x, y = torch.zeros(3, 8), torch.zeros(49)[1:].view(6, 8).view(torch.int32)[:3]
    (found,) = run([["input", 1, ["s0"], [32], 2, "int8"]], x, y)
    assert found.tolist() == [0, 0, 0]
    y[1, 0] = 7 << 16
    assert found.tolist() == [0, 7, 0]


def test_an_output_may_be_a_constant():
    x, y, constant = torch.zeros(3, 8), torch.zeros(3, 8), torch.ones(4)
    assert run([["input", 2]], x, y, constant)[0] is constant


def test_a_piece_without_outputs_returns_an_empty_list():
    assert run([], torch.zeros(3, 8), torch.zeros(3, 8)) == []


@pytest.mark.parametrize(
    "recipe",
    [
        "",
        "{}",
        "null",
        "[",
        "[" * 100_000,
        "[1]",
        "[[]]",
        '[["input"]]',
        '[["input", "1"]]',
        '[["input", -1]]',
        '[["input", true]]',
        '[["input", 2]]',
        '[["output", 0]]',
        '[[["input"], 0]]',
        '[["input", 0, [1]]]',
        '[["input", 0, [1], [1], "s1"]]',
        '[["input", 0, [1], "8", 0]]',
        '[["input", 0, ["__import__(0)"], [1], 0]]',
        '[["input", 0, [1.5], [1], 0]]',
        '[["input", 0, [true], [1], 0]]',
        '[["input", 0, [1], [1], 0, "int9"]]',
        '[["input", 0, [1], [1], 0, 8]]',
        '[["input", 0], ["input", 1]]',
    ],
)
def test_outputs_outside_the_grammar_are_refused(recipe):
    with pytest.raises(ArtifactError, match=r"(?i)warm (the model )?again"):
        with_views(native, recipe, piece(1), num_constants=0)


def test_a_symbol_with_an_invalid_name_or_without_a_dimension_is_refused():
    recipe = '[["input", 0, ["s0"], [1], 0]]'
    for graph in (piece(1, shape=("2*s0", 8)), piece(1, symbols=("args", "s0"), shape=("args", "s0"))):
        with pytest.raises(ArtifactError, match=r"(?i)warm (the model )?again"):
            with_views(native, recipe, graph, num_constants=0)
