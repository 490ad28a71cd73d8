"""The proving process answers; its crashes are reported with advice, and it is restarted."""

from __future__ import annotations

import json
import os

import pytest
from cli_harness import forked
from piece_cases import CASES, X, call, graph, tensor, with_results
from proof_doubles import IMPORTS

from cgtool.child import descendants
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
    ("word", "name", "said"),
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
def test_a_crash_of_the_child_is_named(prover, word, name, said):
    with pytest.raises(ProofCrashError, match=said) as caught:
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
