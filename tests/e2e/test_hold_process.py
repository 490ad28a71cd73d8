"""Processes without standard streams, a home, much memory or many files, and processes that are interrupted."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import pytest
from hold_harness import CHILD, Bare

pytestmark = pytest.mark.torch


def succeeded(report):
    """Return whether a start imported no compiler and its output equals eager's."""
    is_close = report["worst"] is not None and report["worst"] < 2e-5
    return is_close and report == {"error": None, "heavy": [], "worst": report["worst"]}


@pytest.fixture
def bare(tmp_path):
    return Bare(tmp_path / "bare")


@pytest.fixture(scope="module")
def root(native_llama):
    return native_llama.root


#: Closes the standard streams as a daemon does, so that the next files to be opened get their descriptors.
DAEMON = """
import os, runpy, sys
for descriptor in (0, 1, 2):
    os.close(descriptor)
sys.stdin = sys.stdout = sys.stderr = None
report = sys.argv.pop()
del sys.argv[0]
import builtins
builtins.print = lambda text: open(report, "w").write(text)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_process_with_closed_standard_streams_serves(bare, root, tmp_path):
    answer = tmp_path / "answer.json"
    program = ["-c", DAEMON, str(CHILD), json.dumps(["llama", str(root)]), str(answer)]
    ran = bare.run([sys.executable, *program], env={"HOME": None})
    assert ran.code == 0
    assert succeeded(json.loads(answer.read_text()))


#: Allows little more memory than torch itself needs, few open files, and no core dumps.
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""


def test_a_process_with_little_memory_and_few_files_serves(bare, root):
    report = bare.start("llama", root, before=LIMITED)
    assert succeeded(report), report


#: Interrupts each load at another instant, as Ctrl-C does, and loads once more at the end.
INTERRUPTED = """
import os, signal, sys, time, torch, tiny_llama, cgtool
spec = tiny_llama.build()
def load():
    return cgtool.load(spec.module, cache_dir=sys.argv[1])
with torch.inference_mode():
    expected, secs = load()(*spec.calls[0].args), []
    for _ in range(5):
        start = time.perf_counter()
        load()
        secs.append(time.perf_counter() - start)
    took, before = min(secs), len(os.listdir("/proc/self/fd"))
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    for step in range(40):
        try:
            signal.setitimer(signal.ITIMER_REAL, took * (step + 1) / 50)
            load()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
    same = torch.equal(load()(*spec.calls[0].args), expected)
print(interrupted > 5, same, len(os.listdir("/proc/self/fd")) - before)
"""


def test_ctrl_c_at_any_instant_of_a_load_leaves_no_files(bare, root):
    ran = bare.fork(INTERRUPTED, root)
    assert ran.out == "True True 0\n", ran.err
    assert bare.written() == []


def test_ctrl_c_while_loading_ends_the_process(bare, root):
    program = "import sys, torch, tiny_llama, cgtool; module = tiny_llama.build().module; print(1, flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program + "while True: cgtool.load(module, cache_dir=sys.argv[1])", str(root)],
        env=bare.environment(),
        cwd=bare.places["work"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "1\n"
        err = None
        for _ in range(5):  # Python drops a KeyboardInterrupt that is raised in a finalizer
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, err = process.communicate(timeout=20)
                break
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT
    assert err.strip().endswith("KeyboardInterrupt")


#: Loads and calls the model in a forked child, after the parent has loaded it.
FORK = """
import os, sys, threading, torch, tiny_llama, cgtool
spec = tiny_llama.build()
args = spec.calls[0].args
torch.set_num_threads(1)
with torch.inference_mode():
    loaded = cgtool.load(spec.module, cache_dir=sys.argv[1])
    expected = loaded(*args)
child = os.fork()
with torch.inference_mode():
    fresh = cgtool.load(spec.module, cache_dir=sys.argv[1])
    same = torch.equal(loaded(*args), expected) and torch.equal(fresh(*args), expected)
if child == 0:
    os._exit(0 if same else 3)
print(same, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_serves_its_parents_model_and_can_load_it_again(bare, root):
    ran = bare.fork(FORK, root)
    assert ran.out == "True 0\n", ran.err


def test_many_loads_leave_no_open_files_and_no_files_on_disk(bare, root):
    program = """
import os, sys, torch, tiny_llama, cgtool
module = tiny_llama.build().module
counts = []
for _ in range(12):
    cgtool.load(module, cache_dir=sys.argv[1])
    counts.append(len(os.listdir("/proc/self/fd")))
print(counts[1] == counts[-1], counts)
"""
    ran = bare.fork(program, root)
    assert ran.out.startswith("True"), (ran.out, ran.err)
    assert bare.written() == []
