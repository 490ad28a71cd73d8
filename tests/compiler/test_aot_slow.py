"""Native code in separate processes: collectives of a group, and equal bytes wherever a piece is compiled."""

from __future__ import annotations

import subprocess

import pytest
from aot_packages import package_of
from piece_cases import CASES, in_a_process

from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.guards._torch import changed_inductor_settings
from cgtool.plan.grammar import sha256_hex
from cgtool.store.artifacts import unpack

pytestmark = [pytest.mark.torch, pytest.mark.slow]

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


def test_functional_collectives_run_in_native_code(tmp_path):
    assert in_a_process(COLLECTIVES, tmp_path / "store").strip() == "right"


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
from piece_cases import CASES
from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.plan.grammar import sha256_hex
from cgtool.guards._torch import changed_inductor_settings
print(sha256_hex(get_adaptor("aot_inductor").compile(CASES["a fact"].piece, options={}).artifact))
"""


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


def test_native_code_has_no_library_paths(tmp_path):
    """The paths in native code appear only in messages."""
    native = tmp_path / "native.so"
    native.write_bytes(unpack(package_of(CASES["a fact"].piece)).native)
    shown = subprocess.run(["readelf", "-d", native], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in shown
    assert "RPATH" not in shown
    assert "RUNPATH" not in shown
    needed = [line.partition("[")[2].rstrip("]") for line in shown.splitlines() if "(NEEDED)" in line]
    assert not any("/" in name for name in needed)


def test_a_compile_restores_the_settings_of_inductor():
    compiler = get_adaptor("aot_inductor")
    before = compiler.compute_hash({})
    compiler.compile(CASES["only views"].piece, options={})
    assert changed_inductor_settings() == {}
    assert compiler.compute_hash({}) == before
