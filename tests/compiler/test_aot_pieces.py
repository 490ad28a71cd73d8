"""Pieces as native code compute what they compute op by op, and share memory as they do: every case of the tables."""

from __future__ import annotations

from types import SimpleNamespace

import aot_cases
import piece_cases
import pytest
import torch
from aot_packages import package_of, side_by_side
from piece_cases import same_as_eager, with_results

from cgtool.runtime import _torch as private
from cgtool.runtime.aoti_package import open_package

pytestmark = pytest.mark.torch

CASES = {**piece_cases.CASES, **aot_cases.PIECES}
_WRITES = [name for name in CASES if any(word in name for word in ("write", "output", "input", "view", "nothing"))]
_DTYPES = [name for name in CASES if name.startswith("dtype ")]
#: What stands side by side in one package.
GROUPS = {
    "custom ops": [*aot_cases.CUSTOM_OPS.values()],
    "writes and views": [CASES[name] for name in _WRITES],
    "dtypes": [CASES[name] for name in _DTYPES],
    "the rest": [CASES[name] for name in CASES if name not in {*_WRITES, *_DTYPES}],
}


@pytest.mark.parametrize("group", GROUPS)
def test_native_code_computes_what_the_piece_computes(group):
    case = side_by_side(GROUPS[group])
    run = open_package(package_of(case.piece), case.piece)
    for sizes in case.sizes:
        same_as_eager(run, case, sizes)


def test_a_scatter_out_of_range_raises():
    inputs = [piece_cases.X, piece_cases.tensor("s0", 8, dtype="int64")]
    zeros = piece_cases.call("torch.zeros_like", "%0")
    scatter = piece_cases.method("scatter_add", "%2", 0, "%1", "%0")
    piece = with_results(piece_cases.graph(inputs, [zeros, scatter], ["%3"]))
    run, values = open_package(package_of(piece), piece), torch.ones(3, 8)
    with torch.no_grad():
        assert torch.equal(run([values, torch.ones(3, 8, dtype=torch.int64)])[0][1], torch.full((8,), 3.0))
        with pytest.raises(RuntimeError, match="index 3 is out of bounds"):
            run([values, torch.full((3, 8), 3)])


def misaligned(tensors):
    """The same values, each a single element after where an allocator would begin."""
    found = []
    for tensor in tensors:
        held = tensor.untyped_storage().nbytes() // tensor.element_size()
        room = torch.zeros(held + 1, dtype=tensor.dtype)
        room[1:] = tensor.as_strided((held,), (1,))
        found.append(room.as_strided(tensor.shape, tensor.stride(), 1))
    return found


@pytest.fixture(params=["of the CPU", "of accelerators"])
def loader(request, monkeypatch):
    """Has packages opened as they are, or as code for accelerators is, which works on copies of such inputs."""
    if request.param == "of accelerators":
        opened = private.open_package

        def open_package_that_copies(*args):
            run = opened(*args).boxed_run

            def copied(tensor):
                if not tensor.data_ptr() % 16:
                    return tensor
                span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)

            return SimpleNamespace(boxed_run=lambda inputs: run(list(map(copied, inputs))))

        monkeypatch.setattr(private, "open_package", open_package_that_copies)
        monkeypatch.setattr("cgtool.runtime.aoti_package.ANYWHERE", frozenset())


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize("group", ["writes and views", "dtypes", "the rest"])
def test_inputs_may_start_at_any_element(group):
    case = side_by_side(GROUPS[group])
    run = open_package(package_of(case.piece), case.piece)
    together = {position for members in case.piece.aliases for position in members}

    def moved(tensors):
        return [tensors[n] if n in together else tensor for n, tensor in enumerate(misaligned(tensors))]

    for sizes in case.sizes:
        same_as_eager(run, case, sizes, change=moved)
