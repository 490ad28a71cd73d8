"""Native code of every case of the tables computes the same as op by op, and its outputs share the same memory."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import aot_cases
import pytest
import torch
from aot_packages import package_of, side_by_side
from piece_cases import CASES, Case, X, call, graph, in_a_process, inputs_of, method, same_as_eager, tensor

from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.guards._torch import changed_inductor_settings
from cgtool.plan.grammar import sha256_hex
from cgtool.runtime import _torch as private
from cgtool.runtime.aoti_package import open_package
from cgtool.store.artifacts import unpack

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
    tables = (CASES, aot_cases.PIECES, aot_cases.CUSTOM_OPS)
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
        monkeypatch.setattr("cgtool.runtime.aoti_package.UNALIGNED_DEVICES", frozenset())


@pytest.mark.usefixtures("loader")
def test_inputs_may_start_at_any_element(joined):
    run = open_package(package_of(joined.piece), joined.piece)
    together = {position for members in joined.piece.aliases for position in members}

    def moved(tensors):
        return [tensors[n] if n in together else tensor for n, tensor in enumerate(misaligned(tensors))]

    for sizes in joined.sizes:
        same_as_eager(run, joined, sizes, change=moved)


COLLECTIVES = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
import torch.distributed._functional_collectives
import torch.distributed.nn  # imported later, as by Dynamo, it would hold the group, and so its threads, until the end
from piece_cases import X, Case, call, graph, inputs_of
from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.runtime.aoti_package import open_package
from cgtool.runtime.op_by_op import piece_function
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 1), rank=0, world_size=1)
ops = "torch.ops._c10d_functional."
piece = graph(
    [X],
    [
        call("torch.sin", "%0"),
        call(ops + "all_reduce.default", "%1", {"s": "sum"}, {"s": "0"}),
        call(ops + "wait_tensor.default", "%2"),
        call("torch.cos", "%3"),
        call(ops + "all_gather_into_tensor.default", "%1", 1, {"s": "0"}),
        call(ops + "wait_tensor.default", "%5"),
    ],
    ["%4", "%6"],
)
run = open_package(get_adaptor("aot_inductor").compile(piece, options={}).artifact, piece)
for sizes in Case(piece=piece).sizes:
    inputs = inputs_of(Case(piece=piece), sizes)
    for found, expected in zip(run(list(inputs)), piece_function(piece)(list(inputs)), strict=True):
        torch.testing.assert_close(found, expected)
dist.destroy_process_group()
print("right")
"""


@pytest.mark.slow
def test_functional_collectives_run_in_native_code(tmp_path):
    assert in_a_process(COLLECTIVES, tmp_path / "store").strip() == "right"


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
from piece_cases import CASES
from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.plan.grammar import sha256_hex
print(sha256_hex(get_adaptor("aot_inductor").compile(CASES["a fact"].piece, options={}).artifact))
"""


@pytest.mark.slow
def test_a_piece_has_the_same_bytes_wherever_it_is_compiled(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    other = in_a_process(
        COMPILE,
        cwd=tmp_path,
        HOME=str(home),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
        PYTHONHASHSEED="7",
        MASTER_PORT="1234",
        OMP_NUM_THREADS="1",
    )
    assert other.strip() == sha256_hex(package_of(CASES["a fact"].piece))


def test_native_code_has_no_library_paths(joined, tmp_path):
    """The paths in native code appear only in messages."""
    native = tmp_path / "native.so"
    native.write_bytes(unpack(package_of(joined.piece)).native)
    shown = subprocess.run(["readelf", "-d", native], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in shown
    assert "RPATH" not in shown
    assert "RUNPATH" not in shown
    needed = [line.partition("[")[2].rstrip("]") for line in shown.splitlines() if "(NEEDED)" in line]
    assert not any("/" in name for name in needed)


@pytest.mark.slow
def test_a_compile_restores_the_settings_of_inductor():
    compiler = get_adaptor("aot_inductor")
    before = compiler.compute_hash({})
    compiler.compile(CASES["only views"].piece, options={})
    assert changed_inductor_settings() == {}
    assert compiler.compute_hash({}) == before
