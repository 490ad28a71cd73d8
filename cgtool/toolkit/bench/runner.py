"""Runs a bench: prepares what the ways start from, then starts them in turn, round by round.

Must not import torch: each start is a process of its own. The order within a round is drawn anew, so that no way always
runs after the same one. What must not be repeated often, a cold compile, is a preparation and not part of a round.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import asdict, replace

from cgtool.errors import ModelError
from cgtool.events import Event, OnEvent
from cgtool.processes import Child, ChildEndedError, Ending, log_words
from cgtool.toolkit.bench.request import Answer, ModelText, Request, Start
from cgtool.toolkit.bench.ways import BASE, WAYS, Way, sources_of
from cgtool.toolkit.bench.workspace import Caches, Workspace, bytes_of

#: A way that failed so often is not started again.
_ENOUGH_FAILURES = 2
_PREPARED_BY: Mapping[str, Literal["start", "warm", "precompile"]] = {"torch": "start", "precompile": "precompile"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a bench does.

    Args:
        model: The model.
        config: cgtool's configuration as JSON, for every adaptor; its own adaptor and cache are replaced.
        ways: What is compared, eager among them.
        starts: How often each way starts, by name.
        warm_ups: Starts of each way before those that count.
        cold_starts: How often everything is compiled with nothing cached.
        tokens: Sizes of the dynamic dimension whose steps are timed.
        dimension: Which dynamic dimension; None takes the only or the last one.
        repeats: Steps of each size in each start.
        seed: Of the weights, of the order of starts and of the bounds.
        limit_secs: How long one process may take.
    """

    model: ModelText
    config: Mapping[str, Any]
    ways: tuple[Way, ...]
    starts: Mapping[str, int]
    warm_ups: int = 1
    cold_starts: int = 1
    tokens: tuple[int, ...] = ()
    dimension: str | None = None
    repeats: int = 30
    seed: int = 0
    limit_secs: float = 1800.0


@dataclass(kw_only=True)
class Measured:
    """What one way, or one preparation, gave.

    Attributes:
        starts: The answers.
        error: Why it has none, or no more; one line.
        log: The last lines that a failed process printed.
        num_bytes: Size of what a start needs on the disk.
    """

    starts: list[Start] = field(default_factory=list)
    error: str | None = None
    log: tuple[str, ...] = ()
    num_bytes: int = 0

    @property
    def failures(self) -> int:
        """How many starts failed."""
        return sum(start.error is not None for start in self.starts)


class Runner:
    """One bench.

    Attributes:
        ways: What each way gave.
        sources: What each preparation gave.
    """

    def __init__(self, settings: Settings, workspace: Workspace, on_event: OnEvent) -> None:
        self._settings = settings
        self._workspace = workspace
        self._on_event = on_event
        self.ways: dict[str, Measured] = {way.name: Measured() for way in settings.ways}
        self.sources: dict[str, Measured] = {source: Measured() for source in sources_of(settings.ways)}

    def run(self) -> None:
        """Do it all.

        Raises:
            ModelError: The model does not even run eagerly.
        """
        self._reference()
        self._prepare()
        self._rounds()
        self._take_cold_starts()
        self._measure_bytes()

    def _reference(self) -> None:
        with self._workspace.start() as caches:
            start = self._process(self._request(WAYS[BASE], caches, write_reference=True), caches, number=None)
        self._event("start", "eager, whose outputs the others are compared with", secs=start.process_secs)
        if start.failed_in == "build" and start.sentence is not None:
            raise ModelError(start.sentence, path=self._settings.model.text)  # as `warm` would say it
        if start.error is not None:
            message = f"The model does not run eagerly: {start.error}{log_words(start.log or ())}"
            raise ModelError(f"{message}\nMend the model or its arguments first.", path=self._settings.model.text)
        self.ways[BASE].starts.append(start)

    def _prepare(self) -> None:
        sources = list(self.sources)
        for number in range(self._settings.cold_starts if sources else 0):
            turned = sources[number % len(sources) :] + sources[: number % len(sources)]
            for source in turned if number else sources:
                if self.sources[source].error is None:
                    self._prepare_one(source, number)

    def _prepare_one(self, source: str, number: int) -> None:
        measured = self.sources[source]
        kept = self._workspace.answer_of(source) if number == 0 else None
        if kept is not None:
            measured.starts.append(replace(kept, reused=True))
            return
        words = next(way.label for way in self._settings.ways if way.source == source) if source != "torch" else "torch"
        self._event("prepare", words)
        with self._folders(source, number) as caches:
            start = self._process(self._preparation(source, caches), caches, number=number)
            start = replace(start, reused=False)
        measured.starts.append(start)
        if number == 0 and start.error is None:
            self._workspace.finish(source, start)
        elif number == 0:
            measured.error, measured.log = start.error, start.log or ()
        self._event("prepare", words, secs=start.process_secs)

    @contextlib.contextmanager
    def _folders(self, source: str, number: int) -> Iterator[Caches]:
        """The folder that stays for the first time that something is prepared, one that goes for every other time."""
        if number == 0:
            yield self._workspace.anew(source)
        else:
            with self._workspace.start() as caches:
                yield caches

    def _preparation(self, source: str, caches: Caches) -> Request:
        way = next(way for way in self._settings.ways if way.source == source)
        action = _PREPARED_BY.get(source, "warm")
        return self._request(
            WAYS["compile-cold"] if source == "torch" else way, caches, action=action, save_artifacts=source == "torch"
        )

    def _rounds(self) -> None:
        settings = self._settings
        ways = [way for way in settings.ways if not way.is_cold and settings.starts[way.name] > 0]
        for way in ways:
            if way.source:
                self.ways[way.name].error = self.sources[way.source].error
                self.ways[way.name].log = self.sources[way.source].log
        total = sum(settings.starts[way.name] for way in ways)
        for number in range(-settings.warm_ups, max((settings.starts[way.name] for way in ways), default=0)):
            for way in self._shuffled(ways, number):
                if number < settings.starts[way.name] and self.ways[way.name].error is None:
                    self._start(way, number, total)

    def _shuffled(self, ways: Sequence[Way], number: int) -> list[Way]:
        order = list(ways)
        random.Random(f"{self._settings.seed}/{number}").shuffle(order)  # noqa: S311  a reproducible order, no secret
        return order

    def _start(self, way: Way, number: int, total: int) -> None:
        measured = self.ways[way.name]
        words = f"round {number + 1}: {way.label}" if number >= 0 else f"not counted: {way.label}"
        done = sum(start.counted for one in self.ways.values() for start in one.starts)
        self._event("start", words, done=done, total=total)
        with self._workspace.start() as empty:
            kept = self._workspace.prepared(way.source) if way.source else empty
            request = self._request(way, kept)
            caches = kept if way.torch_caches else empty
            start = self._process(request, caches, number=number if number >= 0 else None, cgtool=kept)
        measured.starts.append(start)
        if measured.failures and (number < 0 or measured.failures >= _ENOUGH_FAILURES):
            measured.error, measured.log = start.error, start.log or ()
        self._event("start", words, done=done + (number >= 0), total=total, secs=start.process_secs)

    def _request(
        self,
        way: Way,
        caches: Caches,
        *,
        action: Literal["start", "warm", "precompile"] = "start",
        write_reference: bool = False,
        save_artifacts: bool = False,
    ) -> Request:
        settings = self._settings
        adaptor = {} if way.adaptor is None else {"adaptor": way.adaptor, "use_inductor": way.adaptor != BASE}
        return Request(
            action=action,
            kind=way.kind,
            model=settings.model,
            config={**settings.config, **adaptor, "cache_dir": "", "disable_cache": False},
            seed=settings.seed,
            tokens=settings.tokens,
            dimension=settings.dimension,
            repeats=settings.repeats,
            cache=str(caches.cgtool),
            artifact=str(caches.artifact),
            save_artifacts=save_artifacts,
            reference=str(self._workspace.reference),
            write_reference=write_reference,
        )

    def _process(self, request: Request, caches: Caches, *, number: int | None, cgtool: Caches | None = None) -> Start:
        """Run one process; what it answered, with the end of its log where it failed."""
        variables = caches.variables()
        if cgtool is not None:
            variables["CGTOOL_CACHE_DIR"] = str(cgtool.cgtool)
        limit = self._settings.limit_secs
        child = Child("cgtool.toolkit.bench.child:main", variables=variables)
        try:
            answered = child.ask(replace(request, spawned=child.started), answer=Answer, timeout_secs=limit)
            answer, log = answered.record, answered.log
            ending = child.finish(limit)
            # What a process measured that then crashed may be sound; how it ends is not.
            if ending.code is None or ending.code < 0:
                answer, log = Answer(error=_error(ending)), ending.log
        except ChildEndedError as error:
            answer, log = Answer(error=_error(error.ending)), error.ending.log
        finally:
            child.close()
        return Start(
            **asdict(answer),
            round=number,
            counted=number is not None,
            process_secs=time.monotonic() - child.started,
            log=None if answer.error is None else log,
        )

    def _take_cold_starts(self) -> None:
        for way in self._settings.ways:
            if way.is_cold:
                cold = self.sources[way.source]
                self.ways[way.name] = Measured(starts=list(cold.starts), error=cold.error, log=cold.log)

    def _measure_bytes(self) -> None:
        for way in self._settings.ways:
            if not way.source or way.is_cold:
                continue
            caches = self._workspace.prepared(way.source)
            needed = {
                "cgtool": [caches.cgtool],
                "mega": [caches.artifact],
                "precompile": [caches.artifact],
            }.get(way.kind, [])
            needed += [caches.inductor, caches.triton] if way.torch_caches else []
            self.ways[way.name].num_bytes = bytes_of(*needed)

    def _event(self, phase: Literal["prepare", "start"], message: str, **counts: Any) -> None:
        self._on_event(Event(phase=phase, message=message, **counts))


def _error(ending: Ending) -> str:
    """Return why there is no answer, in one line."""
    if ending.code is None:
        return f"it {ending.how} (--timeout gives it more)"
    return f"it {ending.how}: {ending.last_words}" if ending.last_words else f"it {ending.how}"
