"""Children answer, report how they died, are ended in time, and leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from child_programs import Do, Told

from cgtool.child import descendants
from cgtool.processes import Child, ChildEndedError, Children, ClosedError

PROGRAM = "child_programs:main"


@pytest.fixture
def child():
    child = Child(PROGRAM)
    yield child
    child.close()


def ask(child, deed, *, timeout_secs=60.0, **how):
    return child.ask(Do(deed=deed), b"ab", answer=Told, note=Told, timeout_secs=timeout_secs, **how)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(check, secs=60.0):
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        if check():
            return
        time.sleep(0.05)
    pytest.fail("timed out")


def test_a_child_answers_with_notes_data_and_its_log(child):
    notes = []
    first = ask(child, "nothing", on_note=notes.append)
    assert int(first.record.word) in descendants(child.pid)
    assert (first.data, first.log) == (b"abab", ("doing nothing",))
    assert notes == [Told(word="did nothing")]
    assert ask(child, "print").log == tuple(f"line {number}" for number in range(38, 50))
    assert ask(child, "nothing").record == first.record


def test_the_setup_precedes_the_first_request():
    child = Child("child_programs:set_up", setup=Told(word="here"))
    assert ask(child, "nothing").record == Told(word="here")
    child.close()


@pytest.mark.parametrize(
    ("deed", "how", "name", "line"),
    [
        pytest.param("crash", "crashed with SIGSEGV", "SIGSEGV", "child_programs.py", id="SIGSEGV"),
        pytest.param("be killed", "was killed (SIGKILL), most likely by the kernel", "SIGKILL", "doing", id="SIGKILL"),
        pytest.param("leave", "ended with exit code 7", None, "some last words", id="exit"),
    ],
)
def test_the_error_of_a_dead_child_has_its_signal_and_log(child, deed, how, name, line):
    with pytest.raises(ChildEndedError) as caught:
        ask(child, deed)
    ending = caught.value.ending
    assert how in ending.how
    assert ending.signal_name == name
    assert line in "\n".join(ending.log)
    assert how in str(caught.value)
    assert not child.is_alive


@pytest.mark.parametrize("deed", ["sleep", "hold the lock"])
def test_a_child_that_times_out_is_ended(child, deed):
    pid = int(ask(child, "nothing").record.word)
    began = time.monotonic()
    with pytest.raises(ChildEndedError, match=r"took longer than 0\.2 s and was ended"):
        ask(child, deed, timeout_secs=0.2)
    assert time.monotonic() - began < 20
    assert not is_alive(pid)


def test_descendants_in_other_sessions_end_with_the_child(child):
    with pytest.raises(ChildEndedError, match="exit code 7") as caught:
        ask(child, "start far")
    far = next(int(line.split()[1]) for line in caught.value.ending.log if line.startswith("far"))
    assert not is_alive(far)


def test_a_child_exits_after_its_last_answer(child):
    ask(child, "last")
    assert not child.is_alive
    assert child.finish(60).code == 0


def test_ending_a_child_raises_in_the_waiting_thread(child):
    ask(child, "nothing")
    caught = []

    def wait():
        with pytest.raises(ChildEndedError) as raised:
            ask(child, "sleep", timeout_secs=None)
        caught.append(raised)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    child.end()
    thread.join(20)
    assert len(caught) == 1


@pytest.mark.parametrize("deed", ["sleep", "hold the lock"])
def test_no_child_outlives_its_parent(deed):
    program = f"""
import sys
sys.path[:] = {sys.path!r}
from child_programs import Do, Told
from cgtool.processes import Child
child = Child({PROGRAM!r})
print(child.pid, flush=True)
print(child.ask(Do(deed="nothing"), answer=Told, note=Told, timeout_secs=60).record.word, flush=True)
child.ask(Do(deed={deed!r}), answer=Told, timeout_secs=None)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        time.sleep(0.2)
        parent.kill()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_pool_reuses_children_and_replaces_dead_ones():
    children = Children(PROGRAM, limit=2)
    children.start(1)
    words = []
    threads = [threading.Thread(target=lambda: words.append(ask(children, "nothing").record.word)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(words) == 6
    assert 1 <= len(set(words)) <= 2
    for pid in set(words):
        os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: not any(child.is_alive for child in children._idle))
    assert ask(children, "nothing").record.word not in words
    with pytest.raises(ChildEndedError):
        ask(children, "crash")
    assert ask(children, "nothing").data == b"abab"
    children.close()
    with pytest.raises(ClosedError, match="Run it again"):
        ask(children, "nothing")


def test_closing_a_pool_leaks_no_process_or_descriptor():
    before, others = len(list(Path("/proc/self/fd").iterdir())), descendants(os.getpid())
    children = Children(PROGRAM, limit=2)
    children.start(2)
    pids = set(descendants(os.getpid())).difference(others)
    children.close()
    assert pids
    assert not any(map(is_alive, pids))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
