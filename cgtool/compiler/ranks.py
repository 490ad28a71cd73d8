"""The ranks that warm one model together: where they meet, and how each learns that another one is gone.

They meet in a store of torch.distributed: that of the default group, or the launcher's. It holds

    beat/RANK     a number that the rank counts up while it lives
    ended/RANK    how the rank ended: it is done, or it failed
    said/N/RANK   what the rank's meeting N is about, and what it says there
    outcome/N     whether meeting N was held; the first rank that knows says so for all

A rank says its word and waits for those of the others. Where one left before it came, failed, or says nothing for
`_SILENT_SECS`, the meeting is called off. Its outcome is written once and read by all, by a rank that comes late too:
so either all ranks go on together or none does. Waiting is counted in looks and not by the clock: a process that was
stopped itself, or that a busy machine lets run now and then, takes nobody for dead.
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

#: How often a rank says that it lives, and after how many seconds without a word it is taken for dead.
_BEAT_SECS, _SILENT_SECS = 1.0, 20.0
_LOOK_SECS = 0.02
#: How long the work of this process gets to end by itself once another rank is gone: it may wait in a collective.
_GRACE_SECS = 5.0
_START_SECS = 120.0
_AGAIN = "What was finished is kept: start all ranks again."
_numbers = itertools.count()


class RankLostError(CgtoolError):
    """Another rank failed or died; this one ends with the same exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankAbsentError(CgtoolError):
    """Another rank takes no part in a meeting: it was done before, or it is at something else."""


class _Outcome(Record, frozen=True, kw_only=True):
    """How a meeting or a rank ended; all is well where nothing is said.

    Args:
        absent: Which rank takes no part, and why.
        lost: Which rank failed or died, or how this one failed.
        exit_code: That of the rank that failed.
    """

    absent: str = ""
    lost: str = ""
    exit_code: int = 1


class Ranks:
    """This process's place among the ranks that warm a model; a context, left when it has done its part.

    Args:
        store: What all ranks of this warm read and write, and nobody else.
        rank: This one.
        size: How many there are.
        ends_process: Whether a rank that is lost ends this process where nothing else does.
    """

    def __init__(self, store: Any, rank: int, size: int, *, ends_process: bool = False) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._others = [other for other in range(size) if other != rank]
        self.ends_process = ends_process
        #: How many meetings this rank knows the outcome of.
        self._meetings = 0
        #: Of each other rank: its last beat, and how often in a row it was found there.
        self._beats: dict[int, tuple[str | None, int]] = {}
        self._lost: RankLostError | None = None
        #: That the store is, which does not come back.
        self._gone: RankLostError | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @classmethod
    def of_launch(cls) -> Self | None:
        """Return this process's place among those that a launcher such as torchrun started; None where it is alone.

        Raises:
            RankLostError: The others are not to be found.
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
        """Return this process's place in the default process group; None where it has none, or one that is faked."""
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
            # Where there is no agent, rank 0 keeps the store, which the others read this in and say theirs.
            stays = self.rank == 0 and self.ends_process and (error is None or isinstance(error, Exception))
            while stays and any(self._ended(other) is None and not self._is_silent(other) for other in self._others):
                time.sleep(_LOOK_SECS)
        self._left.set()
        self._thread.join()

    def meet(self, about: str, word: str, *, insists: bool = False) -> list[str]:
        """Wait until every rank came to this meeting; return what they say, by rank.

        Args:
            about: What the meeting is about, in one line; all ranks must mean the same.
            word: What this rank says.
            insists: Whether to wait for the next meeting, and the next, while other ranks are at something else.

        Raises:
            RankLostError: One failed or died.
            RankAbsentError: One has left without coming here, or is at something else.
        """
        while True:
            said = [text.partition("\n") for text in self._heard(f"{about}\n{word}")]
            elsewhere = [(rank, theirs) for rank, (theirs, *_) in enumerate(said) if theirs != about]
            if not elsewhere:
                return [text for *_, text in said]
            if not insists:
                rank, theirs = elsewhere[0]
                msg = f"rank {rank} is at something else ({theirs!r}; rank {self.rank} is at {about!r})"
                raise RankAbsentError(msg)

    def agree(self, about: str, *, yes: bool) -> bool:
        """Return whether all ranks say yes."""
        return all(word == "y" for word in self.meet(about, "y" if yes else "n"))

    def agree_launched(self, about: str, *, yes: bool) -> bool:
        """Return whether all ranks that a launcher started say yes; one of another group speaks for itself alone."""
        try:
            return self.agree(about, yes=yes) if self.ends_process else yes
        except RankAbsentError:
            return yes

    def _heard(self, text: str) -> list[str]:
        """Say something at the next meeting; return what all ranks say there."""
        number = self._meetings
        self._say(f"said/{number}", text)
        awaited = set(self._others)
        while (outcome := self._outcome(number, awaited)) is None:
            time.sleep(_LOOK_SECS)
        self._meetings += 1
        if outcome.lost:
            raise RankLostError(outcome.lost, outcome.exit_code)
        if outcome.absent:
            raise RankAbsentError(outcome.absent)
        return [self._read(f"said/{number}/{rank}") or "" for rank in range(self.size)]

    def _outcome(self, number: int, awaited: set[int]) -> _Outcome | None:
        """Return how a meeting ended, once that is known; those who came are awaited no more."""
        key = f"outcome/{number}"
        mine = self._trouble(number, awaited) if awaited else None
        if mine is None and awaited:
            said = self._read(key)
            return None if said is None else decode(said.encode(), _Outcome)
        words = encode(mine or _Outcome()).decode()
        # whoever is first says it for all
        return decode(self._ask(lambda: self._store.compare_set(key, "", words)), _Outcome)

    def _trouble(self, number: int, awaited: set[int]) -> _Outcome | None:
        """Return why a meeting cannot be held, where it cannot; those who came are awaited no more."""
        for other in sorted(awaited):
            if self._read(f"said/{number}/{other}") is not None:
                awaited.remove(other)
            elif (ended := self._ended(other)) is not None and not ended.lost:
                return _Outcome(absent=f"rank {other} was done before")
            elif (lost := self._why_lost(other) or self._lost) is not None:
                return _Outcome(lost=str(lost), exit_code=lost.exit_code)
        return None

    def _why_lost(self, other: int) -> RankLostError | None:
        ended = self._ended(other)
        if ended is not None and ended.lost:
            return RankLostError(f"Rank {other} failed: {ended.lost}", ended.exit_code)
        if ended is None and self._is_silent(other):
            came = self._beats[other][0] is not None
            why = "it died, it is stopped, or its machine is gone" if came else "it died, or has not begun to warm yet"
            return RankLostError(f"Rank {other} has said nothing for {_SILENT_SECS:g} s: {why}. {_AGAIN}")
        return None

    def _watch(self) -> None:
        """Say that this rank lives, and look whether the others do."""
        lost_secs = 0.0
        for beat in itertools.count():
            try:
                self._say("beat", str(beat))
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
        self._say("ended", encode(_Outcome(lost=lost, exit_code=getattr(error, "exit_code", 1))).decode())

    def _ended(self, other: int) -> _Outcome | None:
        said = self._read(f"ended/{other}")
        return None if said is None else decode(said.encode(), _Outcome)

    def _say(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(f"{key}/{self.rank}", _printable(text)))

    def _read(self, key: str) -> str | None:
        found = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else found.decode()

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Ask the store something, in a thread: where the machine that keeps it is gone, no answer comes for ever."""
        if self._gone is not None:
            raise self._gone
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except Exception as error:  # noqa: BLE001 - raised below, by whoever asks
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        try:
            for _ in range(int(_SILENT_SECS / _BEAT_SECS)):
                with contextlib.suppress(TimeoutError):
                    return answer.result(_BEAT_SECS)
        except RuntimeError as error:
            msg = f"The ranks have lost each other: the rank or launcher that keeps their store is gone. {_AGAIN}"
            self._gone = RankLostError(msg)
            raise self._gone from error
        msg = (
            "The ranks have lost each other: the rank or launcher that keeps their store has said nothing for "
            f"{_SILENT_SECS:g} s. {_AGAIN}"
        )
        self._gone = RankLostError(msg)
        raise self._gone


def _of_this_warm(store: Any) -> Any:
    """Return the part of a store that belongs to this process's next warm, and to the same one of every rank."""
    return torch.distributed.PrefixStore(f"cgtool/{next(_numbers)}", store)


def _printable(text: object) -> str:
    """Return a text as UTF-8 has it: a path in it may hold bytes that are none."""
    return str(text).encode("utf-8", "backslashreplace").decode()
