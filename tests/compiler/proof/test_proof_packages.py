"""Packages of native code: right ones pass, and ones that crash the process that opens them are named."""

from __future__ import annotations

import subprocess

import proof_doubles  # noqa: F401 - for the adaptor that it registers
import pytest
from piece_cases import CASES, X, call, graph, tensor, with_results
from proof_pieces import imports_of, pieces_of

from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.compiler.proof.prove import prove_artifact
from cgtool.compiler.proof.prover import Prover
from cgtool.errors import ProofCrashError, ProofMismatchError
from cgtool.store.artifacts import Package, pack

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("forked_children")]

PIECE = with_results(graph([X, tensor(8, 8)], [call("torch._C._nn.linear", "%0", "%1")], ["%2"]))
OTHER = with_results(graph([X, tensor(8, 8)], [call("torch.matmul", "%0", "%1")], ["%2"]))
METADATA = {"AOTI_DEVICE_KEY": "cpu"}
FIXTURES = ("tiny_llama", "tiny_moe", "tiny_encoder", "tiny_vision")


@pytest.fixture(scope="module")
def prover():
    with Prover(timeout_secs=300) as prover:
        yield prover


@pytest.fixture(scope="module", params=FIXTURES)
def pieces(request):
    """A fixture's name, and its pieces: those of tiny_llama's variants, and of the others' general variant."""
    if request.param == "tiny_llama":
        return request.param, pieces_of(request.param, build={"num_layers": 2})
    return request.param, pieces_of(request.param, general=True)


def package_of(tmp_path, source):
    """Return a package with native code compiled from `source`."""
    code, library = tmp_path / "a.c", tmp_path / "a.so"
    code.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O0", "-o", str(library), str(code)], check=True)
    return pack(Package(native=library.read_bytes(), metadata=METADATA))


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        pytest.param(
            "static void go(void) __attribute__((constructor)); static void go(void) { *(volatile int *)0 = 1; }",
            "SIGSEGV",
            "crashed with SIGSEGV while it opened the artifact.*libstdc.. statically: try CXX=/usr/bin/g",
            id="SIGSEGV",
        ),
        pytest.param(
            'static void go(void) __attribute__((constructor)); static void go(void) { __asm__("ud2"); }',
            "SIGILL",
            "crashed with SIGILL while it opened the artifact.*built on or for another CPU",
            id="SIGILL",
        ),
        pytest.param(
            "#include <stdlib.h>\nstatic void go(void) __attribute__((constructor)); static void go(void) { abort(); }",
            "SIGABRT",
            "crashed with SIGABRT while it opened the artifact",
            id="SIGABRT",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_native_code_that_crashes_when_opened_is_named(prover, tmp_path, source, name, message):
    with pytest.raises(ProofCrashError, match=message) as caught:
        prover.prove(package_of(tmp_path, source), adaptor="aot_inductor", graph=PIECE)
    assert caught.value.signal_name == name
    assert "Fatal Python error" in str(caught.value)


def test_native_code_without_a_model_is_a_mismatch(prover, tmp_path):
    with pytest.raises(ProofMismatchError, match="cannot be opened"):
        prover.prove(package_of(tmp_path, "int nothing;"), adaptor="aot_inductor", graph=PIECE)


@pytest.mark.slow
@pytest.mark.parametrize("adaptor", ["aot_inductor", "inductor_standalone"])
def test_a_compiled_artifact_passes_for_its_piece_only(prover, adaptor):
    compiled = get_adaptor(adaptor).compile(PIECE, options={})
    record = prover.prove(compiled.artifact, adaptor=adaptor, graph=PIECE, guards=compiled.guards)
    assert record.proved
    assert 0 < record.worst_error < 1e-6
    with pytest.raises(ProofMismatchError, match="output 0"):
        prover.prove(compiled.artifact, adaptor=adaptor, graph=OTHER)


@pytest.mark.slow
def test_compiled_pieces_with_special_features_pass(prover):
    for name in ("write to an input", "an output that is a view of an input", "bfloat16", "bool mask", "constants"):
        piece = with_results(CASES[name].piece)
        compiled = get_adaptor("aot_inductor").compile(piece, options={})
        assert prover.prove(compiled.artifact, adaptor="aot_inductor", graph=piece).proved, name


def test_every_piece_of_the_fixtures_passes_op_by_op(prover, pieces):
    fixture, graphs = pieces
    for piece in graphs:
        data = piece.canonical()
        record = prover.prove(data, adaptor="eager", graph=piece, imports=imports_of(fixture))
        assert record.proved, record.reason
        assert record.worst_error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_moe"])
def test_code_that_rounds_less_often_than_eager_passes(fixture):
    for piece in pieces_of(fixture, build={"dtype": "bfloat16"}):
        assert prove_artifact(b'"in float32"', adaptor="double", graph=piece).proved


@pytest.mark.slow
def test_every_compiled_general_piece_of_the_fixtures_passes(prover, pieces):
    fixture, graphs = pieces
    compiler = get_adaptor("aot_inductor")
    # pieces of fixed sizes are the same with fewer symbols
    most = max(len(piece.symbols) for piece in graphs)
    for piece in (piece for piece in graphs if len(piece.symbols) == most):
        compiled = compiler.compile(piece, options={})
        record = prover.prove(
            compiled.artifact,
            adaptor="aot_inductor",
            graph=piece,
            guards=compiled.guards,
            imports=imports_of(fixture),
        )
        assert record.proved, record.reason
