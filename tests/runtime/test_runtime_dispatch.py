"""A concrete size wins over a range, a range over the general shape, decided once per call."""

from __future__ import annotations

import hand_plans as hand
import pytest
import torch

from cgtool.errors import GuardError
from cgtool.runtime.call import LoadedModel
from cgtool.runtime.dispatch import PiecewiseBackend, ShapeTable
from cgtool.runtime.pieces import piece_function

pytestmark = pytest.mark.torch


def named(name):
    return lambda _args: [name]


BACKEND = PiecewiseBackend(
    general=named("general"),
    sizes={(("s0", 8),): named("8"), (("s0", 8), ("s1", 2)): named("8x2")},
    ranges=[({"s0": (4, 16)}, named("4-16")), ({"s0": (17, None)}, named("17-"))],
)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((3, 1), "general"), ((4, 1), "4-16"), ((16, 9), "4-16"), ((17, 9), "17-"), ((8, 1), "8"), ((8, 2), "8x2")],
)
def test_the_most_specific_function_is_chosen(sizes, expected):
    table = ShapeTable(["s0", "s1"], [BACKEND, PiecewiseBackend(general=named("same"))])
    for _ in range(2):
        assert [function([])[0] for function in table.choose(sizes)] == [expected, "same"]


def test_without_sizes_there_is_one_table():
    table = ShapeTable(["s0"], [PiecewiseBackend(general=named("a"))] * 3)
    assert table.choose((5,)) is table.choose((6,))


def test_sizes_that_nothing_was_compiled_for_are_refused_in_words():
    model = hand.Model()
    plan = hand.plan()
    functions = {key: backend.general for key, backend in hand.opened(plan).items()}
    opened = {
        key: PiecewiseBackend(general=None, sizes={(("s0", 8),): f}, ranges=[({"s0": (16, 32)}, f)])
        for key, f in functions.items()
    }
    loaded = LoadedModel(model, plan, opened)
    with torch.no_grad():
        for rows in (8, 16, 32):
            x = torch.randn(rows, hand.WIDTH)
            assert torch.equal(loaded(x), model(x))
        with pytest.raises(GuardError, match=r"sizes of this call were not compiled.*8, 16 to 32"):
            loaded(torch.randn(9, hand.WIDTH))


def test_a_variant_without_the_size_leaves_the_call_to_the_next():
    model = hand.Model()
    plan = hand.plan(hand.variant(name="sizes only"), hand.variant())
    used = []

    def noted(index, graph):
        function = piece_function(graph)

        def run(args):
            used.append(index)
            return function(args)

        return run

    opened = {}
    for index, item in enumerate(plan.variants):
        for step in item.steps:
            if not step.splitting:
                f = noted(index, plan.graphs[step.graph])
                opened[index, step.piece] = (
                    PiecewiseBackend(general=f) if index else PiecewiseBackend(general=None, sizes={(("s0", 8),): f})
                )
    loaded = LoadedModel(model, plan, opened)
    with torch.no_grad():
        loaded(torch.randn(8, hand.WIDTH))
        loaded(torch.randn(7, hand.WIDTH))
    assert used == [0, 0, 1, 1]
