"""`bench`: prepare what the ways start from, start them in turn, round by round, and report what each costs.

Prints nothing and must not import torch: each start is a process of its own. The order within a round is drawn anew,
so that no way always runs after the same one. What must not be repeated often, a cold compile, is a preparation and
not part of a round.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from msgspec import to_builtins
from msgspec.structs import asdict, replace

from cgtool.errors import ModelError
from cgtool.events import Event, OnEvent, ignore
from cgtool.processes import Child, ChildEndedError, Ending, log_words
from cgtool.toolkit.bench.page import page
from cgtool.toolkit.bench.report import (
    SCHEMA,
    BenchReport,
    Measured,
    load_average,
    machine_facts,
    notes_on,
    report_ways,
    version_facts,
)
from cgtool.toolkit.bench.ways import BASE, WAYS, Action, Answer, Request, Settings, Start, Way
from cgtool.toolkit.bench.workspace import Caches, Workspace, bytes_of, opened

#: A way that failed so often is not started again.
_ENOUGH_FAILURES = 2
_PREPARED_BY: Mapping[str, Action] = {"torch": "start", "precompile": "precompile"}


def bench(
    settings: Settings,
    *,
    keep: Path | None = None,
    html: Path | None = None,
    command: Sequence[str] = (),
    on_event: OnEvent = ignore,
) -> BenchReport:
    """Measure every way, and write the page where one is asked for.

    Args:
        settings: What is measured.
        keep: A folder for what is prepared, used again by the next bench of the same; None keeps nothing.
        html: Where the page goes; None writes none.
        command: The command line, for the report.
        on_event: Told of each preparation and start as it goes.

    Returns:
        What was found; a way that failed is part of it.

    Raises:
        UsageError: The folder to keep holds something else.
        ModelError: The model does not even run eagerly.
        OSError: A folder or the page cannot be written.
    """
    if html is not None:
        _check_writable(html)
    machine = {**machine_facts(), "load_before": load_average()}
    began, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    versions = version_facts()
    about = {  # what preparations depend on: a kept folder serves a bench of the same alone
        "model": to_builtins(settings.model),
        "configuration": dict(settings.config),
        "tokens": list(settings.tokens),
        "size-dim": settings.dimension,
        "seed": settings.seed,
        "Python": versions["python"],
    }
    with opened(keep, about) as workspace:
        runner = _Runner(settings, workspace, on_event)
        runner.run()
    torch: dict[str, Any] = runner.first("torch") or {}
    machine |= {"load_after": load_average(), "gpu": torch.get("gpu"), "threads": torch.get("threads")}
    ways = report_ways(settings, runner.ways, runner.sources)
    report = BenchReport(
        schema=SCHEMA,
        model=settings.model.text,
        about={**about, "starts": {way.name: settings.starts[way.name] for way in settings.ways}},
        command=command,
        machine=machine,
        versions={**versions, **{name: torch.get(name) for name in ("torch", "triton", "cuda")}},
        dimension=runner.first("dimension"),
        ways=ways,
        notes=notes_on(ways, machine),
        began=began,
        secs=time.monotonic() - clock,
    )
    if html is not None:
        html.write_text(page(report), encoding="utf-8")
    return report


def _check_writable(file: Path) -> None:
    """Let a page that cannot be written be known before minutes are spent."""
    file.parent.mkdir(parents=True, exist_ok=True)
    existed = file.exists()
    file.open("a", encoding="utf-8").close()
    if not existed:
        file.unlink()


class _Runner:
    """One bench.

    Attributes:
        ways: What each way gave.
        sources: What each preparation gave.
    """

    def __init__(self, settings: Settings, workspace: Workspace, on_event: OnEvent) -> None:
        self._settings = settings
        self._workspace = workspace
        self._on_event = on_event
        self.ways = {way.name: Measured() for way in settings.ways}
        self.sources = {way.source: Measured() for way in settings.ways if way.source}

    def run(self) -> None:
        """Do it all.

        Raises:
            ModelError: The model does not even run eagerly.
        """
        self._take_reference()
        for number in range(self._settings.cold_starts if self.sources else 0):
            names = list(self.sources)
            turn = number % len(names)
            for source in names[turn:] + names[:turn]:
                if self.sources[source].error is None:
                    self._prepare(source, number)
        self._rounds()
        for way in self._settings.ways:
            if way.is_cold:
                cold = self.sources[way.source]
                self.ways[way.name] = Measured(starts=list(cold.starts), error=cold.error, log=cold.log)
            elif way.source:
                caches = self._workspace.prepared(way.source)
                needed = [caches.cgtool if way.kind == "cgtool" else caches.artifact] if way.kind != "compile" else []
                needed += [caches.inductor, caches.triton] if way.torch_caches else []
                self.ways[way.name].num_bytes = bytes_of(*needed)

    def first(self, name: str) -> Any:
        """Return the first value of an answer's field that says something."""
        found = (getattr(start, name) for measured in self.ways.values() for start in measured.starts)
        return next((value for value in found if value), None)

    def _take_reference(self) -> None:
        with self._workspace.start() as caches:
            start = self._process(self._request(WAYS[BASE], caches, write_reference=True), caches, number=None)
        self._event("start", "eager, whose outputs the others are compared with", secs=start.process_secs)
        if start.failed_in == "build" and start.sentence is not None:
            raise ModelError(start.sentence, path=self._settings.model.text)  # as `warm` would say it
        if start.error is not None:
            message = f"The model does not run eagerly: {start.error}{log_words(start.log or ())}"
            raise ModelError(f"{message}\nMend the model or its arguments first.", path=self._settings.model.text)
        self.ways[BASE].starts.append(start)

    def _prepare(self, source: str, number: int) -> None:
        measured = self.sources[source]
        kept = self._workspace.answer_of(source) if number == 0 else None
        if kept is not None:
            measured.starts.append(replace(kept, reused=True))
            return
        way = next(way for way in self._settings.ways if way.source == source)
        words, way = ("torch", WAYS["compile-cold"]) if source == "torch" else (way.label, way)
        self._event("prepare", words)
        with self._folders(source, number) as caches:
            action = _PREPARED_BY.get(source, "warm")
            request = self._request(way, caches, action=action, save_artifacts=source == "torch")
            start = replace(self._process(request, caches, number=number), reused=False)
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

    def _rounds(self) -> None:
        settings = self._settings
        ways = [way for way in settings.ways if not way.is_cold and settings.starts[way.name] > 0]
        for way in ways:
            if way.source:
                self.ways[way.name].error = self.sources[way.source].error
                self.ways[way.name].log = self.sources[way.source].log
        total = sum(settings.starts[way.name] for way in ways)
        for number in range(-settings.warm_ups, max((settings.starts[way.name] for way in ways), default=0)):
            draw = random.Random(f"{settings.seed}/{number}")  # noqa: S311  a reproducible order, no secret
            for way in draw.sample(ways, len(ways)):
                if number < settings.starts[way.name] and self.ways[way.name].error is None:
                    self._start(way, number, total)

    def _start(self, way: Way, number: int, total: int) -> None:
        measured = self.ways[way.name]
        words = f"round {number + 1}: {way.label}" if number >= 0 else f"not counted: {way.label}"
        done = sum(start.counted for one in self.ways.values() for start in one.starts)
        self._event("start", words, done=done, total=total)
        with self._workspace.start() as empty:
            kept = self._workspace.prepared(way.source) if way.source else empty
            caches = kept if way.torch_caches else empty
            start = self._process(
                self._request(way, kept), caches, number=number if number >= 0 else None, cgtool=kept.cgtool
            )
        measured.starts.append(start)
        failures = sum(start.error is not None for start in measured.starts)
        if failures and (number < 0 or failures >= _ENOUGH_FAILURES):
            measured.error, measured.log = start.error, start.log or ()
        self._event("start", words, done=done + (number >= 0), total=total, secs=start.process_secs)

    def _request(
        self,
        way: Way,
        caches: Caches,
        *,
        action: Action = "start",
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

    def _process(self, request: Request, caches: Caches, *, number: int | None, cgtool: Path | None = None) -> Start:
        """Run one process; what it answered, with the end of its log where it failed."""
        limit = self._settings.limit_secs
        child = Child("cgtool.toolkit.bench.child:main", variables=caches.variables(cgtool))
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

    def _event(self, phase: Literal["prepare", "start"], message: str, **counts: Any) -> None:
        self._on_event(Event(phase=phase, message=message, **counts))


def _error(ending: Ending) -> str:
    """Return why there is no answer, in one line."""
    if ending.code is None:
        return f"it {ending.how} (--timeout gives it more)"
    return f"it {ending.how}: {ending.last_words}" if ending.last_words else f"it {ending.how}"
