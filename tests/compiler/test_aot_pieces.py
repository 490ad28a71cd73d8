"""Native code of every case of the tables computes the same as op by op, and its outputs share the same memory."""

from __future__ import annotations

from types import SimpleNamespace

import aot_cases
import piece_cases
import pytest
import torch
from aot_packages import package_of, side_by_side
from piece_cases import Case, X, call, graph, inputs_of, method, same_as_eager, tensor

from cgtool.runtime import _torch as private
from cgtool.runtime.aoti_package import open_package

pytestmark = pytest.mark.torch

SCATTER = Case(
    piece=graph(
        [X, tensor("s0", 8, dtype="int64")],
        [call("torch.zeros_like", "%0"), method("scatter_add", "%2", 0, "%1", "%0")],
        ["%3"],
    )
)


@pytest.fixture(scope="module")
def joined():
    """All cases in one package, since each C++ compile is slow; the inputs of `SCATTER` come first."""
    tables = (piece_cases.CASES, aot_cases.PIECES, aot_cases.CUSTOM_OPS)
    return side_by_side([SCATTER, *(case for table in tables for case in table.values())])


def test_native_code_computes_what_the_piece_computes(joined):
    run = open_package(package_of(joined.piece), joined.piece)
    for sizes in joined.sizes:
        same_as_eager(run, joined, sizes)


def test_a_scatter_out_of_range_raises(joined):
    run = open_package(package_of(joined.piece), joined.piece)
    values, index, *others = inputs_of(joined, joined.sizes[0])
    with torch.no_grad(), pytest.raises(RuntimeError, match="index 2 is out of bounds"):
        run([values, torch.full_like(index, 2), *others])


def misaligned(tensors):
    """Return the same values, each shifted by one element from an aligned start."""
    found = []
    for given in tensors:
        held = given.untyped_storage().nbytes() // given.element_size()
        room = torch.zeros(held + 1, dtype=given.dtype)
        room[1:] = given.as_strided((held,), (1,))
        found.append(room.as_strided(given.shape, given.stride(), 1))
    return found


@pytest.fixture(params=["of the CPU", "of accelerators"])
def loader(request, monkeypatch):
    """Open packages as usual, or like code for accelerators, which works on copies of misaligned inputs."""
    if request.param == "of accelerators":
        opened = private.open_package

        def open_package_that_copies(*args):
            run = opened(*args).boxed_run

            def copied(given):
                if not given.data_ptr() % 16:
                    return given
                span = 1 + sum((n - 1) * step for n, step in zip(given.shape, given.stride(), strict=True))
                return given.as_strided((span,), (1,)).clone().as_strided(given.shape, given.stride(), 0)

            return SimpleNamespace(boxed_run=lambda inputs: run(list(map(copied, inputs))))

        monkeypatch.setattr(private, "open_package", open_package_that_copies)
        monkeypatch.setattr("cgtool.runtime.aoti_package.ANYWHERE", frozenset())


@pytest.mark.usefixtures("loader")
def test_inputs_may_start_at_any_element(joined):
    run = open_package(package_of(joined.piece), joined.piece)
    together = {position for members in joined.piece.aliases for position in members}

    def moved(tensors):
        return [tensors[n] if n in together else tensor for n, tensor in enumerate(misaligned(tensors))]

    for sizes in joined.sizes:
        same_as_eager(run, joined, sizes, change=moved)
