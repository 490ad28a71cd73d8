"""Each system call of an action fails once: the error is reported and the cache stays consistent."""

from __future__ import annotations

import os
import random
import re
import resource
from functools import partial
from pathlib import Path

import pytest
from faults_harness import ACTIONS, TOLD, lay_start, state, told, wrong_in
from syscalls import ALL, CHANGES, Call, calls_of, copy_anew, ended_of, failed_at

#: Calls that write to an open descriptor.
BYTES = ("write", "pwrite64", "writev", "sendfile", "copy_file_range", "ftruncate", "fallocate", "fsync", "fdatasync")

Fault = tuple[Call, str]


def errors_of(call: Call) -> tuple[str, ...]:
    """Return the errors that a call can fail with."""
    if call.name == "openat":
        of_writing = ("EROFS",) if re.search("O_CREAT|O_RDWR|O_WRONLY", call.text) else ()
        of_making = ("ENOSPC",) if "O_CREAT" in call.text else ()
        return ("EIO", "EACCES", "EMFILE", *of_writing, *of_making)
    if call.name in BYTES:
        return ("EIO", "ENOSPC")
    if call.name in CHANGES.split(","):
        return ("EIO", "EACCES", "ENOSPC", "EROFS")
    return ("EIO", "EACCES") if call.name in ("newfstatat", "statx") else ("EIO",)


def one_of_each(faults: list[Fault], *, turn: int) -> list[Fault]:
    """Return a fault for each kind of call, with an error that depends on the turn."""
    kinds: dict[tuple[str, tuple[str, ...]], list[Call]] = {}
    for call, _ in faults:
        kinds.setdefault((call.name, errors_of(call)), []).append(call)
    draw = random.Random(turn)
    return [(draw.choice(calls), errors[turn % len(errors)]) for (_, errors), calls in kinds.items()]


def half(before: dict[str, object], after: dict[str, object], now: dict[str, object]) -> list[str]:
    """Return the parts that match neither the state before nor the one after."""
    return [part for part in {*before, *after, *now} if now.get(part) not in (before.get(part), after.get(part))]


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_failed_syscall_is_reported_and_leaves_the_cache_consistent(tmp_path: Path, name: str, every: bool) -> None:
    start, work, action = tmp_path / "start", tmp_path / "work", ACTIONS[name]
    lay_start(start, name)
    copy_anew(start, work)
    action(work)  # completes its imports, whose calls would be counted
    before, after = state(start), state(work)
    assert wrong_in(work) == []
    copy_anew(start, work)
    faults = [(call, e) for call in calls_of(lambda: action(work), names=ALL, under=work) for e in errors_of(call)]
    seen = set()
    for call, error in faults if every else one_of_each(faults, turn=[*ACTIONS].index(name)):
        where = f"{error} at {call}"
        copy_anew(start, work)
        ended = failed_at(call, error, partial(told, action, work))
        assert ended.code in (0, TOLD), f"{where}: {ended.said}"
        if ended.code == TOLD:
            assert str(work) in ended.said, where
            assert ended.said.endswith("."), where
        seen.add(ended.code)
        assert half(before, after, state(work)) == [], where
        assert wrong_in(work) == [], where
        action(work)
        assert state(work) == after, where
        assert wrong_in(work) == [], where
    assert TOLD in seen or not every


@pytest.mark.parametrize("name", ACTIONS)
def test_running_out_of_descriptors_is_reported(tmp_path: Path, name: str) -> None:
    start, work, action = tmp_path / "start", tmp_path / "work", ACTIONS[name]
    lay_start(start, name)
    copy_anew(start, work)
    before = state(start)
    action(work)
    after = state(work)
    ends = []

    def starved(spare: int) -> None:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, free + spare))
        told(action, work)

    for spare in (0, 3, 99):
        copy_anew(start, work)
        ended = ended_of(partial(starved, spare))
        assert ended.code in (0, TOLD), ended.said
        assert half(before, after, state(work)) == []
        assert wrong_in(work) == []
        ends.append(ended.code)
    assert (ends[0], ends[-1]) == (TOLD, 0)
