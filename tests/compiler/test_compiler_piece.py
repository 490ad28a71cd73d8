"""Rebuilt pieces and Inductor's artifacts: reproducible, with the compiler's guards, and errors for invalid pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.fx.experimental._config as shape_config
from cli_harness import forked
from piece_cases import CASES, W, X, call, graph, in_a_process, method, size, tensor
from torch.utils._appending_byte_serializer import BytesReader, BytesWriter

from cgtool.compiler.adaptors import _torch
from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.compiler.fx_piece import rebuild
from cgtool.compiler.sizes import choose_hints
from cgtool.errors import ArtifactError, CompileError
from cgtool.graph.expressions import evaluate
from cgtool.guards._torch import changed_inductor_settings
from cgtool.runtime.op_by_op import piece_function

pytestmark = pytest.mark.torch


def test_the_module_computes_what_the_piece_computes():
    for name in ("two inputs", "arithmetic on sizes", "slices and assignment"):
        rebuilt = rebuild(CASES[name].piece)
        shapes = [[6 if isinstance(dim, torch.SymInt) else dim for dim in fake.shape] for fake in rebuilt.inputs]
        inputs = [torch.randn(shape) for shape in shapes]
        expected = piece_function(CASES[name].piece)([x.clone() for x in inputs])
        for left, right in zip(rebuilt.module(*inputs), expected, strict=True):
            torch.testing.assert_close(left, right)


def test_strides_dtypes_and_aliases_are_rebuilt():
    piece = graph(
        [tensor(8, "s0", stride=[1, 8]), tensor("s0", dtype="bool"), tensor("s0", dtype="bool")],
        [],
        ["%0", "%1"],
        aliases=[(1, 2)],
    )
    fakes = rebuild(piece).inputs
    assert fakes[0].stride() == (1, 8)
    assert fakes[1].dtype is torch.bool
    assert fakes[1].untyped_storage()._cdata == fakes[2].untyped_storage()._cdata
    assert fakes[0].untyped_storage()._cdata != fakes[1].untyped_storage()._cdata


def test_fixed_sizes_leave_no_symbols():
    piece = graph(
        [tensor(6, 8)],
        [size("%0", 0), call("_operator.mul", "%1", 4), method("view", "%0", "%2", 2)],
        ["%3"],
        symbols=(),
    )
    rebuilt = rebuild(piece)
    module = rebuilt.module
    assert not any(isinstance(d, torch.SymInt) for fake in rebuilt.inputs for d in fake.shape)
    assert [node.op for node in module.graph.nodes] == ["placeholder", "call_method", "output"]
    assert module(torch.ones(6, 8))[0].shape == (24, 2)


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
from piece_cases import CASES
from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.plan.grammar import sha256_hex
for name in ("two inputs", "a fact", "constants"):
    compiled = get_adaptor("inductor_standalone").compile(CASES[name].piece, options={})
    print(sha256_hex(compiled.artifact), compiled.kernels, compiled.guards)
"""


def test_two_processes_compile_a_piece_to_the_same_bytes(tmp_path):
    first = forked(COMPILE, Path(__file__).parents[1], compiles=True).out
    second = in_a_process(
        COMPILE, cwd=tmp_path, PYTHONHASHSEED="2", HOME=str(tmp_path), MASTER_PORT="1234", OMP_NUM_THREADS="1"
    )
    assert first == second
    assert len(set(first.splitlines())) == 3


LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
import pathlib, torch
from piece_cases import CASES, inputs_of
from cgtool.compiler.adaptors.interface import get_adaptor
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from cgtool.runtime.op_by_op import piece_function
case = CASES["two inputs"]
compile_fx._compile_fx_inner = compile_fx.fx_codegen_and_compile = None
run = get_adaptor(sys.argv[2]).load(pathlib.Path(sys.argv[3]).read_bytes(), case.piece)
for rows in (2, 9):
    inputs = inputs_of(case, {"s0": rows})
    torch.testing.assert_close(run(list(inputs)), piece_function(case.piece)(list(inputs)))
print(counters["inductor"]["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_miss"],
      counters["aot_autograd"]["not_ok"], counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow  # torch compiles its headers anew
@pytest.mark.parametrize("adaptor", ["inductor_standalone", "inductor"])
def test_an_artifact_loads_in_a_fresh_process_with_empty_torch_caches(adaptor, tmp_path):
    compiled = get_adaptor(adaptor).compile(CASES["two inputs"].piece, options={})
    (tmp_path / "elsewhere").write_bytes(compiled.artifact)
    found = in_a_process(
        LOAD, adaptor, str(tmp_path / "elsewhere"), cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "empty")
    )
    assert found.split() == ["0", "0", "0", "0"]


def test_an_artifact_does_not_contain_the_environment(monkeypatch):
    monkeypatch.setenv("TORCH_SECRET_TOKEN", "hunter2hunter2")
    artifact = get_adaptor("inductor_standalone").compile(CASES["two inputs"].piece, options={}).artifact
    assert b"hunter2hunter2" not in artifact
    assert str(Path.home()).encode() not in artifact


def test_an_artifact_of_another_torch_or_a_damaged_one_is_refused():
    compiler = get_adaptor("inductor_standalone")
    piece = CASES["only views"].piece
    artifact = compiler.compile(piece, options={}).artifact
    reader, writer = BytesReader(artifact), BytesWriter()
    header, _, body = reader.read_bytes(), reader.read_bytes(), reader.read_bytes()
    for part in (header, bytes(32), body):
        writer.write_bytes(part)
    with pytest.raises(ArtifactError, match="another build of torch"):
        compiler.load(writer.to_bytes(), piece)
    for torn in (b"", artifact[:20], artifact[: len(artifact) // 2]):
        with pytest.raises(ArtifactError, match="Warm again"):
            compiler.load(torn, piece)


@pytest.mark.parametrize(("adaptor", "message"), [("eager", "a different piece"), ("inductor", "Warm again")])
def test_an_artifact_of_another_piece_or_a_damaged_one_is_refused(adaptor, message):
    compiler = get_adaptor(adaptor)
    artifact = compiler.compile(CASES["two inputs"].piece, options={}).artifact
    with pytest.raises(ArtifactError, match=message):
        compiler.load(artifact, CASES["one output twice"].piece)
    with pytest.raises(ArtifactError, match="damaged"):
        compiler.load(artifact[:30], CASES["two inputs"].piece)


def test_a_piece_that_cannot_be_saved_is_an_error(monkeypatch):
    monkeypatch.delitem(_torch._CACHING, "unsafe_marked_cacheable_functions")
    for adaptor in ("inductor_standalone", "inductor"):
        with pytest.raises(CompileError, match=r"cannot save it: .*_enter_autocast.*eager"):
            get_adaptor(adaptor).compile(CASES["autocast"].piece, options={})


def test_sizes_that_torch_compares_in_python_can_be_saved():
    piece = graph(
        [X],
        [size("%0", 0), call("torch.sym_max", "%1", 5), call("torch.ones", "%2"), call("torch.sin", "%0")],
        ["%3", "%4"],
    )
    compiler = get_adaptor("inductor_standalone")
    run = compiler.load(compiler.compile(piece, options={}).artifact, piece)
    assert [run([torch.ones(rows, 8)])[0].shape[0] for rows in (2, 5, 9)] == [5, 5, 9]


def test_an_op_that_rejects_its_inputs_is_named():
    piece = graph([X, tensor(7, 7)], [call("torch.matmul", "%0", "%1")], ["%2"])
    with pytest.raises(CompileError, match=r"op 0 of the piece, torch.matmul"):
        rebuild(piece)


def test_guards_added_by_the_compiler_are_returned():
    nodes = [method("narrow", "%0", 0, 0, 5), method("sin", "%1")]
    for adaptor in ("inductor_standalone", "inductor"):
        compiled = get_adaptor(adaptor).compile(graph([X], nodes, ["%2"]), options={})
        holds = [rows for rows in range(2, 30) if all(evaluate(guard, {"s0": rows}) for guard in compiled.guards)]
        assert holds == list(range(5, 30))


def test_guards_implied_by_ranges_or_facts_are_not_returned():
    nodes = [method("narrow", "%0", 0, 0, 5), method("sin", "%1")]
    compiler = get_adaptor("inductor_standalone")
    for piece in (
        graph([X], nodes, ["%2"], symbols=(("s0", 5, None),)),
        graph([X], nodes, ["%2"], facts=("5 <= s0",)),
        graph([X], nodes, ["%2"], facts=("s0 > 10",)),
    ):
        assert compiler.compile(piece, options={}).guards == ()


def test_a_piece_that_serves_only_one_size_is_rejected():
    hint = choose_hints(graph([X], [], ["%0"]))["s0"]
    piece = graph([X], [method("view", "%0", hint, 2, 4), method("sin", "%1")], ["%2"])
    with pytest.raises(CompileError, match=f"fixed the size s0 to {hint}"):
        get_adaptor("inductor_standalone").compile(piece, options={})


def test_a_write_to_an_input_with_shared_storage_is_rejected():
    piece = graph([X, X], [method("add_", "%0", 1), call("torch.mul", "%0", "%1")], ["%3"], aliases=[(0, 1)])
    with pytest.raises(CompileError, match="shares its storage"):
        get_adaptor("inductor_standalone").compile(piece, options={})


def test_an_output_that_is_not_a_tensor_is_rejected():
    with pytest.raises(CompileError, match="is not a tensor"):
        rebuild(graph([X], [size("%0", 0)], ["%1"]))


def test_a_compile_restores_the_state_of_torch():
    get_adaptor("inductor_standalone").compile(CASES["only views"].piece, options={"epilogue_fusion": False})
    assert changed_inductor_settings() == {}
    assert torch.compiler.config.cache_key_tag == ""
    assert shape_config.backed_size_oblivious is False
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_a_failure_inside_autocast_restores_autocast():
    piece = graph(
        [X, W],
        [
            call("torch.amp.autocast_mode._enter_autocast", {"s": "cpu"}, {"dtype": "bfloat16"}, True, None),
            method("view", "%0", 3),
        ],
        ["%3"],
    )
    with pytest.raises(CompileError):
        rebuild(piece)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("symbols", "facts"),
    [
        ((("s0", 2, None),), ()),
        ((("s0", 2, None), ("s1", 2, None), ("s2", 2, None)), ()),
        ((("s0", 2, 16),), ("s0 % 16 == 0",)),
        ((("s0", 0, 1),), ()),
        ((("s0", 5000, 5003), ("s1", 2, 3)), ("s1 < s0",)),
        ((("s0", 2, None), ("s1", 2, None)), ("s1 == 3 * s0",)),
        ((("s0", 2, None), ("s1", 2, None)), ("2 * s0 * s1 < 400", "s0 % 8 == 0")),
        ((("s0", 2, None),), ("s0 % 12345 == 1",)),
    ],
)
def test_example_sizes_satisfy_ranges_and_facts(symbols, facts):
    piece = graph([tensor(*[name for name, _, _ in symbols])], [], ["%0"], symbols=symbols, facts=facts)
    if "12345" in str(facts):
        with pytest.raises(CompileError, match=r"No example sizes .* Narrow the dynamic dimensions"):
            choose_hints(piece)
        return
    hints = choose_hints(piece)
    assert hints == choose_hints(piece)
    assert all(low <= hints[name] and (high is None or hints[name] <= high) for name, low, high in symbols)
    assert all(evaluate(fact, hints) for fact in facts)
    assert len(set(hints.values())) == len(hints)
