"""Synchronizes the ranks that warm one model together, and detects ranks that are gone.

Ranks meet through a torch.distributed store: that of the default group, or the launcher's. It holds

    beat/RANK     a counter that the rank increments while it is alive
    ended/RANK    how the rank ended: it finished, or it failed
    said/N/RANK   the topic of the rank's meeting N, and its message
    outcome/N     the outcome of meeting N, written by the first rank that knows it

In a meeting, each rank posts its message and waits for those of the others. The meeting is called off if a rank left
before it, failed, or has been silent for `_SILENT_SECS`. The outcome is written once and read by all ranks, including
late ones, so either all ranks go on together or none does. Silence is counted in polls, not by the clock: a process
that was itself stopped, or that gets little time on a busy machine, does not take others for dead.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import torch

from cgtool.errors import CgtoolError
from cgtool.guards import _torch as private
from cgtool.host import launched
from cgtool.plan.grammar import Record, decode, encode

#: The interval of a rank's heartbeat, and the silence after which it counts as dead, in seconds.
_BEAT_SECS, _SILENT_SECS = 1.0, 20.0
_POLL_SECS = 0.02
#: How long this process may take to fail by itself once another rank is gone; it may be blocked in a collective.
_GRACE_SECS = 5.0
_START_SECS = 120.0
_AGAIN = "Finished work is kept; start all ranks again."
_numbers = itertools.count()


class RankLostError(CgtoolError):
    """Another rank failed or died; this rank ends with the same exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankAbsentError(CgtoolError):
    """Another rank does not take part in a meeting: it has finished, or is in another meeting."""


class _Outcome(Record, frozen=True, kw_only=True):
    """The outcome of a meeting or of a rank; the defaults mean success.

    Args:
        absent: Which rank does not take part, and why.
        lost: Which rank failed or died, or how this rank failed.
        exit_code: The exit code of the failed rank.
    """

    absent: str = ""
    lost: str = ""
    exit_code: int = 1


class Ranks:
    """One rank of those that warm a model together; a context that lasts as long as this rank's part.

    Args:
        store: A store that only the ranks of this warm use.
        rank: The rank of this process.
        size: The number of ranks.
        ends_process: Whether to end this process if another rank is lost and nothing else ends it.
    """

    def __init__(self, store: Any, rank: int, size: int, *, ends_process: bool = False) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._others = [other for other in range(size) if other != rank]
        self.ends_process = ends_process
        #: The number of meetings that are over.
        self._meetings = 0
        #: Other rank → its last heartbeat, and how many polls in a row found the same one.
        self._beats: dict[int, tuple[str | None, int]] = {}
        self._lost: RankLostError | None = None
        #: Set once the store is lost, for good.
        self._store_error: RankLostError | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @classmethod
    def of_launch(cls) -> Self | None:
        """Return this process's rank among those that a launcher such as torchrun started; None without a launcher.

        Raises:
            RankLostError: The other ranks cannot be reached.
        """
        if not launched() or not torch.distributed.is_available():
            return None
        timeout = dt.timedelta(seconds=_START_SECS)
        try:
            store, rank, size = next(torch.distributed.rendezvous("env://", timeout=timeout))
        except (RuntimeError, ValueError) as error:
            msg = f"The launcher's other ranks cannot be reached ({str(error).splitlines()[0]}). {_AGAIN}"
            raise RankLostError(msg) from error
        return cls(_of_this_warm(store), rank, size, ends_process=True)

    @classmethod
    def of_group(cls) -> Self | None:
        """Return this process's rank in the default process group; None if there is no group, or a fake one."""
        if not private.exchanges():
            return None
        store = _of_this_warm(private.store_of_group())
        return cls(store, torch.distributed.get_rank(), torch.distributed.get_world_size())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with contextlib.suppress(RankLostError):
            self._end(error)
            # without an agent, rank 0 hosts the store: keep it until the other ranks have posted how they ended
            stays = self.rank == 0 and self.ends_process and (error is None or isinstance(error, Exception))
            while stays and any(self._ended(other) is None and not self._is_silent(other) for other in self._others):
                time.sleep(_POLL_SECS)
        self._left.set()
        self._thread.join()

    def meet(self, about: str, word: str, *, insists: bool = False) -> list[str]:
        """Wait until every rank has come to this meeting; return their messages, by rank.

        Args:
            about: The topic of the meeting, in one line; it must be the same for all ranks.
            word: This rank's message.
            insists: Whether to repeat this until all ranks meet about the same topic.

        Raises:
            RankLostError: A rank failed or died.
            RankAbsentError: A rank has left before this meeting, or is in another one.
        """
        while True:
            messages = [text.partition("\n") for text in self._exchange(f"{about}\n{word}")]
            elsewhere = [(rank, topic) for rank, (topic, *_) in enumerate(messages) if topic != about]
            if not elsewhere:
                return [text for *_, text in messages]
            if not insists:
                rank, topic = elsewhere[0]
                msg = f"rank {rank} is in another step ({topic!r}; rank {self.rank} is in {about!r})"
                raise RankAbsentError(msg)

    def agree(self, about: str, *, yes: bool) -> bool:
        """Return whether all ranks vote yes."""
        return all(word == "y" for word in self.meet(about, "y" if yes else "n"))

    def agree_launched(self, about: str, *, yes: bool) -> bool:
        """Return whether all ranks that a launcher started vote yes; a rank of any other group decides alone."""
        try:
            return self.agree(about, yes=yes) if self.ends_process else yes
        except RankAbsentError:
            return yes

    def _exchange(self, text: str) -> list[str]:
        """Post a message at the next meeting; return the messages of all ranks."""
        number = self._meetings
        self._post(f"said/{number}", text)
        awaited = set(self._others)
        while (outcome := self._outcome(number, awaited)) is None:
            time.sleep(_POLL_SECS)
        self._meetings += 1
        if outcome.lost:
            raise RankLostError(outcome.lost, outcome.exit_code)
        if outcome.absent:
            raise RankAbsentError(outcome.absent)
        return [self._read(f"said/{number}/{rank}") or "" for rank in range(self.size)]

    def _outcome(self, number: int, awaited: set[int]) -> _Outcome | None:
        """Return the outcome of a meeting once it is known; ranks that have come are removed from `awaited`."""
        key = f"outcome/{number}"
        failure = self._failure(number, awaited) if awaited else None
        if failure is None and awaited:
            text = self._read(key)
            return None if text is None else decode(text.encode(), _Outcome)
        text = encode(failure or _Outcome()).decode()
        # the first rank decides for all
        return decode(self._query(lambda: self._store.compare_set(key, "", text)), _Outcome)

    def _failure(self, number: int, awaited: set[int]) -> _Outcome | None:
        """Return why a meeting cannot be held, if so; ranks that have come are removed from `awaited`."""
        for other in sorted(awaited):
            if self._read(f"said/{number}/{other}") is not None:
                awaited.remove(other)
            elif (ended := self._ended(other)) is not None and not ended.lost:
                return _Outcome(absent=f"rank {other} has finished already")
            elif (lost := self._why_lost(other) or self._lost) is not None:
                return _Outcome(lost=str(lost), exit_code=lost.exit_code)
        return None

    def _why_lost(self, other: int) -> RankLostError | None:
        ended = self._ended(other)
        if ended is not None and ended.lost:
            return RankLostError(f"Rank {other} failed: {ended.lost}", ended.exit_code)
        if ended is None and self._is_silent(other):
            has_started = self._beats[other][0] is not None
            why = "it died, is stopped, or lost its machine" if has_started else "it died, or has not started to warm"
            return RankLostError(f"Rank {other} has been silent for {_SILENT_SECS:g} s: {why}. {_AGAIN}")
        return None

    def _watch(self) -> None:
        """Post this rank's heartbeat and check those of the others, until this rank leaves."""
        lost_secs = 0.0
        for beat in itertools.count():
            try:
                self._post("beat", str(beat))
                for other in self._others:
                    now, (before, times) = self._read(f"beat/{other}"), self._beats.get(other, (None, 0))
                    self._beats[other] = (now, times + 1 if now == before else 0)
                self._lost = next(filter(None, map(self._why_lost, self._others)), None)
            except RankLostError as error:
                self._lost = error
            if self._left.wait(_BEAT_SECS):
                return
            lost_secs = lost_secs + _BEAT_SECS if self._lost is not None else 0.0
            if self._lost is not None and self.ends_process and lost_secs >= _GRACE_SECS:
                with contextlib.suppress(RankLostError):
                    self._end(self._lost)
                sys.stderr.write(f"Error: {self._lost}\n")
                sys.stderr.flush()
                os._exit(self._lost.exit_code)

    def _is_silent(self, other: int) -> bool:
        return self._beats.get(other, (None, 0))[1] * _BEAT_SECS >= _SILENT_SECS

    def _end(self, error: BaseException | None) -> None:
        lost = "" if error is None else _printable(error).strip() or type(error).__name__
        self._post("ended", encode(_Outcome(lost=lost, exit_code=getattr(error, "exit_code", 1))).decode())

    def _ended(self, other: int) -> _Outcome | None:
        text = self._read(f"ended/{other}")
        return None if text is None else decode(text.encode(), _Outcome)

    def _post(self, key: str, text: str) -> None:
        self._query(lambda: self._store.set(f"{key}/{self.rank}", _printable(text)))

    def _read(self, key: str) -> str | None:
        found = self._query(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else found.decode()

    def _query(self, operation: Callable[[], Any]) -> Any:
        """Run an operation on the store in a thread: if the store's host is gone, the operation never returns."""
        if self._store_error is not None:
            raise self._store_error
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(operation())
            except Exception as error:  # noqa: BLE001 - raised below
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        lost = "The ranks have lost each other: the rank or launcher that hosts their store"
        try:
            for _ in range(int(_SILENT_SECS / _BEAT_SECS)):
                with contextlib.suppress(TimeoutError):
                    return answer.result(_BEAT_SECS)
        except RuntimeError as error:
            self._store_error = RankLostError(f"{lost} is gone. {_AGAIN}")
            raise self._store_error from error
        self._store_error = RankLostError(f"{lost} has been silent for {_SILENT_SECS:g} s. {_AGAIN}")
        raise self._store_error


def _of_this_warm(store: Any) -> Any:
    """Return the part of a store for this process's next warm, which is the same for every rank."""
    return torch.distributed.PrefixStore(f"cgtool/{next(_numbers)}", store)


def _printable(text: object) -> str:
    """Return a text as valid UTF-8; a path in it may hold other bytes."""
    return str(text).encode("utf-8", "backslashreplace").decode()
