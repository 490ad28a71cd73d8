"""An interrupt at any instant loses no descriptor."""

from __future__ import annotations

import dis
import itertools
import os
import sys
from pathlib import Path

import pytest

from cgtool.store import files, leases
from cgtool.store.files import opened
from cgtool.store.layout import CacheLayout

WATCHED = {module.__file__ for module in (files, leases, sys.modules[__name__])}
#: After these Python looks for signals.
LOOKS = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}


def held():
    """The numbers of the open files, less that of the list of them."""
    return {path.name for path in list(Path("/proc/self/fd").iterdir()) if path.exists()}


def interrupted_at(step, action):
    """Run an action with a KeyboardInterrupt where Python looks for signals the step-th time; return whether it was."""
    left = step
    last = {}

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in WATCHED or frame.f_code in (trace.__code__, interrupted_at.__code__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            looked = last.get(frame) in LOOKS
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            left -= looked
            if looked and left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        last.clear()
    return False


def lost(action):
    """Interrupt an action wherever Python would; return how often that was, and what it left open."""
    before, open_still = held(), set()
    for step in itertools.count(1):
        interrupted = interrupted_at(step, action)
        open_still |= held() - before
        if not interrupted:
            return step - 1, open_still
    raise AssertionError


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    return tmp_path / "file"


def test_whoever_reads_a_file_loses_no_descriptor(path):
    times, open_still = lost(lambda: files.read_bytes(path))
    assert times > 8
    assert open_still == set()


def test_whoever_takes_a_lease_loses_no_descriptor(tmp_path):
    taken = []
    times, open_still = lost(lambda: taken.append(leases.hold_writing(CacheLayout(root=tmp_path), "ab" * 32)))
    assert times > 8
    for lease in taken:
        open_still.remove(str(lease._files[0]))
        lease.release()
    assert open_still == set()


def test_a_bare_number_is_lost(path):
    """The instrument sees what it is there for."""

    def used():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.read(descriptor, 1)
        finally:
            os.close(descriptor)

    _, open_still = lost(used)
    assert len(open_still) == 1
    os.close(int(open_still.pop()))


def test_it_is_open_while_the_block_runs(path):
    before = held()
    with opened(os.open, path, os.O_RDONLY) as descriptor:
        assert os.read(descriptor, 3) == b"abc"
        assert held() == {*before, str(descriptor)}
    assert held() == before


def test_what_cannot_be_opened_is_not_held(tmp_path):
    before = held()
    with pytest.raises(FileNotFoundError), opened(os.open, tmp_path / "none", os.O_RDONLY):
        pass
    assert held() == before
