"""The proving process: it answers, dies with a name, is started again, and never outlives its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from piece_cases import CASES, X, call, graph, tensor
from proof_doubles import IMPORTS
from proof_with_results import with_results

from cgtool.build.proof import ProofCrashError, ProofMismatchError, Prover
from cgtool.digests import canonical_json
from cgtool.errors import WorkerError

pytestmark = pytest.mark.torch

PIECE = with_results(graph([X, tensor(8, 8)], [call("torch._C._nn.linear", "%0", "%1")], ["%2"]))


@pytest.fixture(scope="module")
def prover():
    with Prover(timeout_secs=120) as prover:
        yield prover


def prove(prover, word, piece=PIECE):
    return prover.prove(json.dumps(word).encode(), adaptor="double", graph=piece, imports=IMPORTS)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_child_proves_many_artifacts(prover):
    record = prove(prover, "right")
    pid = prover._child.pid
    assert record.proved
    assert record.shapes[0] == {"s0": 2}
    assert prove(prover, "right").worst_error == record.worst_error
    assert prover._child.pid == pid


def test_a_mismatch_is_told_and_the_child_goes_on(prover):
    prove(prover, "right")
    pid = prover._child.pid
    with pytest.raises(ProofMismatchError, match="output 0"):
        prove(prover, "a factor of 1.01")
    assert prove(prover, "right").proved
    assert prover._child.pid == pid


@pytest.mark.parametrize(
    ("word", "name", "said"),
    [
        pytest.param("SIGSEGV", "SIGSEGV", "opened the artifact.*statically.*CXX=/usr/bin/g", id="SIGSEGV at open"),
        pytest.param("late SIGSEGV", "SIGSEGV", "ran the artifact.*outside of its tensors", id="SIGSEGV at run"),
        pytest.param("SIGKILL", "SIGKILL", "too little memory", id="SIGKILL"),
        pytest.param("exit", None, "exit code 7(.|\n)*some last words", id="exit"),
    ],
)
def test_a_death_is_named(prover, word, name, said):
    with pytest.raises(ProofCrashError, match=said) as caught:
        prove(prover, word)
    assert caught.value.signal_name == name


def test_a_proof_that_does_not_end_is_ended():
    with Prover(timeout_secs=2) as prover:
        assert prove(prover, "right").proved
        pid = prover._child.pid
        with pytest.raises(ProofCrashError, match="did not end within 2 s"):
            prove(prover, "sleep")
        assert not is_alive(pid)


def test_a_child_that_was_killed_between_two_proofs_is_no_error(prover):
    prove(prover, "right")
    os.kill(prover._child.pid, signal.SIGKILL)
    time.sleep(0.2)  # no answer is awaited that could tell
    assert prove(prover, "right").proved


def test_threads_take_turns(prover):
    records = []
    threads = [threading.Thread(target=lambda: records.append(prove(prover, "right"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.proved for record in records] == [True] * 4


def test_a_child_started_by_a_thread_outlives_it():
    with Prover(timeout_secs=120) as prover:
        thread = threading.Thread(target=prover.start)
        thread.start()
        thread.join()
        pid = prover._child.pid
        assert prove(prover, "right").proved
        assert prover._child.pid == pid


def test_an_import_that_fails_proves_nothing_and_says_so(prover):
    record = prover.prove(b"{}", adaptor="eager", graph=PIECE, imports=({"module": "no_such_ops", "file": None},))
    assert not record.proved
    assert "no_such_ops" in record.reason
    assert record.may_pass_later


def test_close_leaves_no_process_and_no_descriptor():
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Prover(timeout_secs=60) as prover:
        prover.start()
        pid = prover._child.pid
    assert not is_alive(pid)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_child_dies_with_its_parent_even_while_it_holds_pythons_lock():
    program = f"""
import json, sys, threading, time
sys.path[:] = {sys.path!r}
from cgtool.build.proof import Prover
from proof_doubles import IMPORTS
from cgtool.pieces import PieceGraph
prover = Prover(timeout_secs=None)
prover.start()
print(prover._child.pid, flush=True)
graph = PieceGraph.from_json(json.loads({json.dumps(PIECE.to_json())!r}))
prover.prove(json.dumps("hold the lock").encode(), adaptor="double", graph=graph, imports=IMPORTS)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        for _ in range(900):
            if "libc_sleep" in Path(f"/proc/{pid}/comm").read_text():
                break
            time.sleep(0.1)
        else:
            parent.kill()
            pytest.fail("the child never got to its sleep")
        parent.kill()
    for _ in range(600):
        if not is_alive(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child outlived its parent")


def test_eager_artifacts_are_proved_without_dynamo_and_inductor():
    piece = with_results(CASES["bfloat16"].piece)
    program = f"""
import json, sys
from cgtool.pieces import PieceGraph
import cgtool.build.proof.serve
from cgtool.build.proof.run import prove_artifact
data = {canonical_json(piece.to_json())!r}
graph = PieceGraph.from_json(json.loads(data))
assert prove_artifact(data, adaptor="eager", graph=graph).proved
print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "triton") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_thread_that_asks_too_late_starts_no_other_process():
    with Prover(timeout_secs=120) as late:
        pass
    with pytest.raises(WorkerError, match="ended before"):
        late.start()
    with pytest.raises(WorkerError, match="ended before"):
        prove(late, "right")
