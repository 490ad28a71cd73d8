"""`bench`: prepare what the ways start from, start them in turn, round by round, and report what each costs.

Prints nothing and must not import torch: each start is a process of its own. The order within a round is drawn anew,
so that no way always runs after the same one. What must not be repeated often, a cold compile, is a preparation and
not part of a round. The folder of a bench is removed at the end, or kept and used again::

    bench.json               what it was prepared for
    reference                eager's outputs (`calls.write_outputs`)
    prepared/<source>/       caches of one preparation; whole once prepared.json is there
      prepared.json          the preparation's answer (`Start`)
      inductor/ triton/ tmp/ torch's cache folders and TMPDIR
      cache/                 cgtool's cache
      artifact               the mega-cache, or torch's AOT precompile
    starts/<pid>-<number>/   empty cache folders of the process that runs now
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from msgspec import to_builtins
from msgspec.structs import replace

from cgtool.errors import ModelError, UsageError
from cgtool.events import Event, OnEvent, ignore
from cgtool.host import child_variables
from cgtool.plan.grammar import canonical_json, decode, encode
from cgtool.processes import Child, ChildEndedError, Ending, format_log
from cgtool.store.files import write_atomic
from cgtool.toolkit.bench.report import (
    SCHEMA,
    BenchReport,
    Measured,
    load_average,
    machine_facts,
    notes_on,
    report_way,
    version_facts,
)
from cgtool.toolkit.bench.ways import BASE, WAYS, Request, Settings, Start, Way
from cgtool.toolkit.prune.removal import disk_usage

#: Of a kept folder: raise it when what is prepared changes.
_SCHEMA = 4
#: A way that failed so often is not started again.
_ENOUGH_FAILURES = 2


def bench(
    settings: Settings, *, keep: Path | None = None, command: Sequence[str] = (), on_event: OnEvent = ignore
) -> BenchReport:
    """Measure every way.

    Args:
        settings: What is measured.
        keep: A folder for what is prepared, used again by the next bench of the same; None keeps nothing.
        command: The command line, for the report.
        on_event: Told of each preparation and start as it goes.

    Returns:
        What was found; a way that failed is part of it.

    Raises:
        UsageError: The folder to keep holds something else.
        ModelError: The model does not even run eagerly.
        OSError: A folder cannot be written.
    """
    machine = machine_facts()
    began, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    versions = version_facts()
    about = {  # what preparations depend on: a kept folder serves a bench of the same alone
        "model": to_builtins(settings.model),
        "configuration": settings.config,
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
    ways = tuple(report_way(way, settings, runner.ways, runner.sources) for way in settings.ways)
    return BenchReport(
        schema=SCHEMA,
        model=settings.model.model,
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


class _Runner:
    """One bench: what each way (`ways`) and each preparation (`sources`) gave, by its name."""

    def __init__(self, settings: Settings, workspace: Workspace, on_event: OnEvent) -> None:
        self._settings = settings
        self._workspace = workspace
        self._on_event = on_event
        self.ways = {way.name: Measured() for way in settings.ways}
        self.sources = {way.source: Measured() for way in settings.ways if way.source}

    def run(self) -> None:
        """Prepare and start everything; a ModelError says that the model does not even run eagerly."""
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
                self.ways[way.name] = self.sources[way.source]
            elif way.source:
                caches = self._workspace.prepared(way.source)
                needed = [caches.cgtool if way.kind == "cgtool" else caches.artifact] if way.kind != "compile" else []
                needed += [caches.inductor, caches.triton] if way.torch_caches else []
                self.ways[way.name].num_bytes = sum(disk_usage(str(path)) for path in needed)

    def first(self, name: str) -> Any:
        """Return the first value of an answer's field that says something."""
        found = (getattr(start, name) for measured in self.ways.values() for start in measured.starts)
        return next((value for value in found if value), None)

    def _take_reference(self) -> None:
        with self._workspace.start() as caches:
            start = self._process(WAYS[BASE], caches, caches, write_reference=True)
        self._event("start", "eager, whose outputs the others are compared with", secs=start.process_secs)
        if start.failed_in == "build" and start.sentence is not None:
            raise ModelError(start.sentence, path=self._settings.model.model)  # as `warm` would say it
        if start.error is not None:
            message = f"The model does not run eagerly: {start.error}{format_log(start.log)}"
            raise ModelError(f"{message}\nMend the model or its arguments first.", path=self._settings.model.model)
        self.ways[BASE].starts.append(start)

    def _prepare(self, source: str, number: int) -> None:
        """Fill the folder that stays, the first time; every other time one that goes."""
        measured = self.sources[source]
        stays = self._workspace.prepared(source)
        if number == 0 and stays.answer.is_file():
            measured.starts.append(replace(decode(stays.answer.read_bytes(), Start), reused=True))
            return
        way = next(way for way in self._settings.ways if way.source == source)
        words = way.label
        asked: dict[str, Any] = {"action": "precompile" if source == "precompile" else "warm"}
        if source == "torch":
            words, asked, way = "torch", {"save_artifacts": True}, WAYS["compile-cold"]
        self._event("prepare", words)
        with self._workspace.start() if number else contextlib.nullcontext(stays.make()) as caches:
            start = self._process(way, caches, caches, number=number, **asked)
        measured.starts.append(start)
        if number == 0 and start.error is None:
            write_atomic(stays.answer, encode(start))
        elif number == 0:
            measured.error, measured.log = start.error, start.log
        self._event("prepare", words, secs=start.process_secs)

    def _rounds(self) -> None:
        settings = self._settings
        ways = [way for way in settings.ways if not way.is_cold and settings.starts[way.name] > 0]
        for way in ways:
            if way.source:
                source = self.sources[way.source]
                self.ways[way.name].error, self.ways[way.name].log = source.error, source.log
        total = sum(settings.starts[way.name] for way in ways)
        for number in range(-settings.warm_ups, max((settings.starts[way.name] for way in ways), default=0)):
            draw = random.Random(f"{settings.seed}/{number}")  # noqa: S311 - a reproducible order, no secret
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
            start = self._process(way, kept, caches, number=number if number >= 0 else None)
        measured.starts.append(start)
        failures = sum(start.error is not None for start in measured.starts)
        if failures and (number < 0 or failures >= _ENOUGH_FAILURES):
            measured.error, measured.log = start.error, start.log
        self._event("start", words, done=done + (number >= 0), total=total, secs=start.process_secs)

    def _process(self, way: Way, prepared: Caches, caches: Caches, *, number: int | None = None, **asked: Any) -> Start:
        """Run one process, and return what it answered with the end of its log where it failed.

        cgtool's cache and torch's artifact are `prepared`'s, the folders that torch sees those of `caches`; a process
        without a number does not count. What else it is asked are fields of `Request`.
        """
        limit = self._settings.limit_secs
        child = Child("cgtool.toolkit.bench.child:main", variables=caches.variables(prepared.cgtool))
        request = Request(
            settings=self._settings,
            way=way,
            cache=str(prepared.cgtool),
            artifact=str(prepared.artifact),
            reference=str(self._workspace.reference),
            spawned=child.started,
            **asked,
        )
        try:
            answered = child.ask(request, answer=Start, timeout_secs=limit)
            start: Start = answered.record
            log = answered.log if start.error is not None else ()
            ending = child.finish(limit)
            # What a process measured that then crashed may be sound; how it ends is not.
            if ending.code is None or ending.code < 0:
                start, log = Start(error=_error(ending)), ending.log
        except ChildEndedError as error:
            start, log = Start(error=_error(error.ending)), error.ending.log
        finally:
            child.close()
        secs = time.monotonic() - child.started
        return replace(start, round=number, counted=number is not None, process_secs=secs, log=log)

    def _event(self, phase: Literal["prepare", "start"], message: str, **counts: Any) -> None:
        self._on_event(Event(phase=phase, message=message, **counts))


def _error(ending: Ending) -> str:
    """Return why there is no answer, in one line."""
    if ending.code is None:
        return f"it {ending.how} (--timeout gives it more)"
    return f"it {ending.how}: {ending.key_line}" if ending.key_line else f"it {ending.how}"


class Caches:
    """The cache folders that a process sees: torch's own, Triton's, TMPDIR, and the root of cgtool's.

    Attributes:
        artifact: The file of the mega-cache or of the AOT precompile.
        answer: Of a preparation: what it answered, once it is whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inductor, self.triton, self._tmp = folder / "inductor", folder / "triton", folder / "tmp"
        self.cgtool, self.artifact, self.answer = folder / "cache", folder / "artifact", folder / "prepared.json"

    def make(self) -> Caches:
        """Make empty folders, and return this."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder in (self.inductor, self.triton, self._tmp):
            folder.mkdir(parents=True)
        return self

    def variables(self, cgtool: Path) -> dict[str, str]:
        """Return the environment of a process that sees these folders, the cache `cgtool`, and no other.

        Other CGTOOL_* variables are left out: what they say is in the request.
        """
        changes = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.inductor),
            "TRITON_CACHE_DIR": str(self.triton),
            "TMPDIR": str(self._tmp),
            "CGTOOL_CACHE_DIR": str(cgtool),
        }
        return child_variables(changes, without="CGTOOL_")


class Workspace:
    """One bench's folder; make it with `opened`. `reference` is the file with eager's outputs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._starts = 0
        self.reference = root / "reference"

    def prepared(self, source: str) -> Caches:
        """Return the folders of a preparation, whole or not."""
        return Caches(self._root / "prepared" / source)

    @contextlib.contextmanager
    def start(self) -> Iterator[Caches]:
        """Give a process a folder with empty caches; it is gone afterwards."""
        self._starts += 1
        # Two benches may share a folder that is kept.
        caches = Caches(self._root / "starts" / f"{os.getpid()}-{self._starts}").make()
        try:
            yield caches
        finally:
            shutil.rmtree(caches.folder, ignore_errors=True)


@contextlib.contextmanager
def opened(keep: Path | None, about: Mapping[str, Any]) -> Iterator[Workspace]:
    """Give a bench its folder: a temporary one that is gone afterwards, or `keep`, which stays.

    `about` is what is benched, as JSON: a folder that was prepared for something else is refused (UsageError).
    """
    root = (Path(tempfile.mkdtemp(prefix="cgtool-bench-")) if keep is None else keep).resolve()
    try:
        _claim(root, {"schema": _SCHEMA, **about})
        yield Workspace(root)
    finally:
        # A process that was ended a moment ago may still be writing its last file.
        for _ in range(3 if keep is None and root.exists() else 0):
            shutil.rmtree(root, ignore_errors=True)


def _claim(root: Path, about: Mapping[str, Any]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    path = root / "bench.json"
    if not path.is_file():
        if any(root.iterdir()):
            message = f"{root} holds something that no bench has made. Give --keep an empty or a new folder."
            raise UsageError(message, path=str(root))
        write_atomic(path, canonical_json(about))
    try:
        was = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        message = f"{path} was not written by this cgtool ({error}). Give --keep another folder."
        raise UsageError(message, path=str(root)) from error
    names = sorted({*was, *about})
    differing = [name for name in names if canonical_json(was.get(name)) != canonical_json(about.get(name))]
    if differing:
        message = f"{root} was prepared for another {', '.join(differing)}. Give --keep another folder."
        raise UsageError(message, path=str(root), expected=dict(about), actual=was)
