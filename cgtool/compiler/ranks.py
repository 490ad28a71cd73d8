"""The ranks that warm one model together: where they meet, and how each learns that another one is gone.

They meet in a store of torch.distributed: that of the default group, or the launcher's. Each rank counts up in it while
it lives, and says there how it ended. So whoever waits for a rank learns within `_SILENT_SECS` that it waits in vain.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import itertools
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

import torch

from cgtool.errors import CgtoolError
from cgtool.guards import _torch as private
from cgtool.host import launched

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
    """Another rank was done before this one and takes no further part."""


class Ranks:
    """This process's place among the ranks that warm a model; a context, left when it has done its part.

    Args:
        store: What all ranks read and write.
        rank: This one.
        size: How many there are.
        ends_process: Whether a rank that is lost ends this process where nothing else does.
    """

    def __init__(self, store: Any, rank: int, size: int, *, ends_process: bool = False) -> None:
        self.rank, self.size = rank, size
        self._store = torch.distributed.PrefixStore(f"cgtool/{next(_numbers)}", store)
        self._others = [other for other in range(size) if other != rank]
        self.ends_process = ends_process
        self._meetings = itertools.count()
        self._lost: RankLostError | None = None
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
        return cls(store, rank, size, ends_process=True)

    @classmethod
    def of_group(cls) -> Self | None:
        """Return this process's place in the default process group; None where it has none, or one that is faked."""
        if not private.exchanges():
            return None
        return cls(private.store_of_group(), torch.distributed.get_rank(), torch.distributed.get_world_size())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        said = "" if error is None else f"{getattr(error, 'exit_code', 1)} {str(error).strip() or type(error).__name__}"
        with contextlib.suppress(RankLostError):
            self._say("ended", said)
            until = time.monotonic() + _GRACE_SECS
            # Where there is no agent, rank 0 keeps the store, which the others read this in and say theirs.
            stays = self.rank == 0 and self.ends_process and (error is None or isinstance(error, Exception))
            while stays and time.monotonic() < until:
                if all(self._said("ended", other) is not None for other in self._others):
                    break
                time.sleep(_LOOK_SECS)
        self._left.set()
        self._thread.join()

    def meet(self, word: str) -> list[str]:
        """Wait until every rank came to this meeting; return what they say, by rank.

        Raises:
            RankLostError: One failed or died.
            RankAbsentError: One has left without coming here.
        """
        number = next(self._meetings)
        self._say(f"met/{number}", word)
        words = {self.rank: word}
        seen = _Seen()
        while len(words) < self.size:
            for other in self._others:
                if other not in words:
                    said = self._said(f"met/{number}", other)
                    if said is None:
                        self._checked(other, seen)
                        said = self._said(f"met/{number}", other)
                    if said is not None:
                        words[other] = said
            time.sleep(_LOOK_SECS)
        return [words[rank] for rank in range(self.size)]

    def _checked(self, other: int, seen: _Seen) -> None:
        lost = self._lost or self._why_lost(other, seen)
        if lost is not None:
            raise lost
        # What it said as it came stands in the store before what it says as it leaves.
        if self._said("ended", other) is not None:
            msg = f"rank {other} was done before"
            raise RankAbsentError(msg)

    def agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes."""
        return all(word == "y" for word in self.meet("y" if yes else "n"))

    def _why_lost(self, other: int, seen: _Seen) -> RankLostError | None:
        ended = self._said("ended", other)
        if ended:
            code, _, message = ended.partition(" ")
            return RankLostError(f"Rank {other} failed: {message}", int(code))
        if ended is None and seen.secs_of_silence(other, self._said("beat", other)) > _SILENT_SECS:
            return RankLostError(
                f"Rank {other} has said nothing for {_SILENT_SECS:g} s: it died, or its machine is gone. {_AGAIN}"
            )
        return None

    def _watch(self) -> None:
        """Say that this rank lives, and look whether the others do."""
        seen = _Seen()
        for beat in itertools.count():
            try:
                self._say("beat", str(beat))
                self._lost = next(filter(None, (self._why_lost(other, seen) for other in self._others)), None)
            except RankLostError as error:
                self._lost = error
            if self._left.wait(_BEAT_SECS):
                return
            if self._lost is not None and self.ends_process:
                if not self._left.wait(_GRACE_SECS):
                    sys.stderr.write(f"Error: {self._lost}\n")
                    sys.stderr.flush()
                    os._exit(self._lost.exit_code)
                return

    def _say(self, key: str, word: str) -> None:
        self._ask(functools.partial(self._store.set, f"{key}/{self.rank}", f"={word}"))

    def _said(self, key: str, other: int) -> str | None:
        name = f"{key}/{other}"
        if not self._ask(functools.partial(self._store.check, [name])):
            return None
        word: str = self._ask(functools.partial(self._store.get, name)).decode()
        return word[1:]

    def _ask(self, question: Any) -> Any:
        try:
            return question()
        except RuntimeError as error:
            msg = f"The ranks have lost each other: the rank or launcher that keeps their store is gone. {_AGAIN}"
            raise RankLostError(msg) from error


class _Seen:
    """What was last heard from each rank, and when."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._words: dict[int, tuple[str | None, float]] = {}

    def secs_of_silence(self, other: int, word: str | None) -> float:
        now = time.monotonic()
        if self._words.get(other, (None, 0.0))[0] != word:
            self._words[other] = word, now
        return now - self._words.get(other, (None, self._begun))[1]
