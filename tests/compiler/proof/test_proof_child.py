"""The proving process answers; its crashes are reported with advice, and it is restarted."""

from __future__ import annotations

import json
import os

import pytest
import torch
from cli_harness import forked
from piece_cases import CASES, X, call, graph, tensor, with_results
from proof_doubles import IMPORTS

import cgtool
from cgtool import CompilationConfig, ExampleCall, ModelSpec
from cgtool.child import descendants
from cgtool.compiler.pipeline import warm
from cgtool.compiler.proof.prover import Prover
from cgtool.compiler.request import Provider
from cgtool.errors import ProofCrashError, ProofMismatchError
from cgtool.processes import ClosedError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("forked_children")]

PIECE = with_results(graph([X, tensor(8, 8)], [call("torch._C._nn.linear", "%0", "%1")], ["%2"]))


@pytest.fixture(scope="module")
def prover():
    with Prover(timeout_secs=120) as prover:
        yield prover


def prove(prover, word, piece=PIECE):
    return prover.prove(json.dumps(word).encode(), adaptor="double", graph=piece, imports=IMPORTS)


def test_a_mismatch_raises_and_the_child_survives(prover):
    record = prove(prover, "right")
    assert record.proved
    assert record.shapes[0] == {"s0": 2}
    children = descendants(os.getpid())
    with pytest.raises(ProofMismatchError, match="output 0"):
        prove(prover, "a factor of 1.01")
    assert prove(prover, "right").worst_error == record.worst_error
    assert descendants(os.getpid()) == children


@pytest.mark.parametrize(
    ("word", "name", "message"),
    [
        pytest.param(
            "SIGSEGV",
            "SIGSEGV",
            "SIGSEGV while it opened.*statically.*CXX=/usr/bin/g",
            id="SIGSEGV at open",
            marks=pytest.mark.slow,  # as a real package does it in test_proof_packages.py
        ),
        pytest.param("late SIGSEGV", "SIGSEGV", "while it ran the artifact.*outside its tensors", id="SIGSEGV at run"),
        pytest.param("SIGKILL", "SIGKILL", "because memory ran out.*--jobs", id="SIGKILL"),
        pytest.param("exit", None, "exit code 7(.|\n)*some last words", id="exit"),
    ],
)
def test_a_crash_of_the_child_is_named(prover, word, name, message):
    with pytest.raises(ProofCrashError, match=message) as caught:
        prove(prover, word)
    assert caught.value.signal_name == name


def test_a_proof_that_hangs_times_out():
    with Prover(timeout_secs=2) as prover:
        assert prove(prover, "right").proved
        with pytest.raises(ProofCrashError, match=r"took longer than 2 s.*while it opened.*--compile-timeout"):
            prove(prover, "sleep")


def test_a_failed_import_is_reported_as_unproved(prover):
    record = prover.prove(b"{}", adaptor="eager", graph=PIECE, imports=(Provider(module="no_such_ops"),))
    assert record.verdict == "later"
    assert "no_such_ops" in record.reason


def test_eager_artifacts_are_proved_without_dynamo_and_inductor():
    piece = with_results(CASES["bfloat16"].piece)
    program = f"""
import json, sys
from cgtool.plan.grammar import decode
from cgtool.plan.pieces import PieceGraph
from cgtool.compiler.proof.prove import prove_artifact
data = {piece.canonical()!r}
graph = decode(data, PieceGraph)
assert prove_artifact(data, adaptor="eager", graph=graph).proved
print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "triton") if name in sys.modules])
"""
    done = forked(program)
    assert done.out.strip() == "[]", done.err


def test_a_closed_prover_starts_no_process():
    with Prover(timeout_secs=120) as late:
        pass
    with pytest.raises(ClosedError):
        late.start()
    with pytest.raises(ClosedError):
        prove(late, "right")


def warmed_in(dtype, root, **options):
    model = torch.nn.Linear(8, 8).to(dtype).eval()
    spec = ModelSpec(
        module=model,
        calls=[ExampleCall(args=(torch.rand(3, 8, dtype=dtype),))],
        dynamic={"input": {0: ("rows", 2, 64)}},
    )
    config = CompilationConfig(adaptor="double", jobs=0, inductor_compile_config=options)
    return model, warm(spec, config=config, cache_dir=root)


@torch.no_grad()
def test_a_mismatch_in_half_precision_is_compiled_again_with_rounding(tmp_path):
    model, result = warmed_in(torch.bfloat16, tmp_path)
    assert result.manifest.fallbacks == ()
    assert [row.artifact.proved for row in result.manifest.rows] == [True]
    x = torch.rand(5, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(cgtool.load(model, cache_dir=tmp_path)(x), model(x))


@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {"rounds": False})])
def test_no_second_compile_for_float32_or_if_the_user_sets_the_option(tmp_path, dtype, options):
    _, result = warmed_in(dtype, tmp_path, **options)
    assert [fallback.adaptor for fallback in result.manifest.fallbacks] == ["eager"]
