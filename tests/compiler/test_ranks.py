"""Meetings of ranks: all go on together or none does, even if some are late, finished, elsewhere, failed or gone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from cgtool.compiler import ranks as module
from cgtool.compiler.ranks import RankAbsentError, RankLostError, Ranks

pytestmark = pytest.mark.torch


@pytest.fixture
def store():
    return torch.distributed.HashStore()


@pytest.fixture
def impatient(monkeypatch):
    """Make ranks take silent ones for dead soon."""
    monkeypatch.setattr(module, "_BEAT_SECS", 0.05)
    monkeypatch.setattr(module, "_SILENT_SECS", 1.0)


def came_of(*calls):
    """Make calls in parallel; return what each returned or raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        made = [pool.submit(call) for call in calls]
        return [call.exception() or call.result() for call in made]


class Failed(module.CgtoolError):
    exit_code = 3


class HookedStore:
    """A store that calls a hook after the first check for a key."""

    def __init__(self, store, key, hook):
        self._store, self._key, self._hook = store, key, hook

    def __getattr__(self, name):
        return getattr(self._store, name)

    def check(self, keys):
        found = self._store.check(keys)
        if keys == [self._key] and self._hook is not None:
            hook, self._hook = self._hook, None
            hook()
        return found


def test_ranks_exchange_messages(store):
    def say(rank):
        with Ranks(store, rank, 3) as ranks:
            messages = ranks.meet("sizes", f"{rank}\n{rank}")
            return messages, ranks.agree("yes", yes=True), ranks.agree("no", yes=rank != 1)

    assert came_of(*(lambda rank=rank: say(rank) for rank in range(3))) == [(["0\n0", "1\n1", "2\n2"], True, False)] * 3


def test_a_rank_that_comes_and_leaves_during_a_poll_counts(store):
    def come_and_leave():
        with Ranks(store, 1, 2) as other:
            assert other.agree("last", yes=True)

    with Ranks(HookedStore(store, "said/0/1", come_and_leave), 0, 2) as ranks:
        assert ranks.agree("last", yes=True)


def test_ranks_in_different_meetings_learn_it_and_meet_later(store):
    def prove(ranks):
        with pytest.raises(RankAbsentError, match=r"rank 1 is in another step \('the report'; rank 0 is in 'calls'\)"):
            ranks.meet("calls", "y")
        return ranks.meet("the report", "zero", insists=True)

    with Ranks(store, 0, 2) as first, Ranks(store, 1, 2) as second:
        outcomes = came_of(lambda: prove(first), lambda: second.meet("the report", "one", insists=True))
    assert outcomes == [["zero", "one"]] * 2


@pytest.mark.parametrize(
    ("error", "kind", "message", "code"),
    [
        (None, RankAbsentError, "rank 1 has finished already", 1),
        (Failed("no weights in \udcff"), RankLostError, r"Rank 1 failed: no weights in \\udcff", 3),
    ],
)
def test_a_rank_that_left_is_not_awaited(store, error, kind, message, code):
    def leave():
        with Ranks(store, 1, 2):
            if error is not None:
                raise error

    came_of(leave)
    with Ranks(store, 0, 2) as ranks, pytest.raises(kind, match=message) as raised:
        ranks.meet("calls", "y")
    assert raised.value.exit_code == code


@pytest.mark.usefixtures("impatient")
def test_a_meeting_that_was_called_off_is_off_for_a_late_rank(store):
    late = Ranks(store, 1, 2)  # is silent until the other rank has given up
    gave_up = r"Rank 1 has been silent for 1 s: it died, or has not started to warm"
    with Ranks(store, 0, 2) as first, pytest.raises(RankLostError, match=gave_up):
        first.meet("calls", "y")
    with pytest.raises(RankLostError, match=gave_up):
        late.meet("calls", "y")


@pytest.mark.usefixtures("impatient")
def test_a_store_that_never_answers_is_an_error(store):
    over = threading.Event()
    stopped = HookedStore(store, "said/0/1", over.wait)
    try:
        with (
            Ranks(stopped, 0, 2) as ranks,
            pytest.raises(RankLostError, match="their store has been silent for 1 s"),
        ):
            ranks.meet("calls", "y")
    finally:
        over.set()
