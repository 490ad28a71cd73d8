"""`bench`: prepare the caches of the ways, start the ways round by round, and report what each costs.

Prints nothing and must not import torch: each start is a separate process. The order within a round is random, so that
no way always runs after the same one. A cold compile is too slow for the rounds, so it is a preparation. The folder of
a bench is removed at the end, or kept for the next bench::

    bench.json               the settings that it was prepared for
    reference                eager's outputs (`calls.write_outputs`)
    prepared/<source>/       the caches of one preparation; complete once prepared.json exists
      prepared.json          the preparation's answer (`Start`)
      inductor/ triton/ tmp/ torch's cache folders and TMPDIR
      cache/                 cgtool's cache
      artifact               the mega-cache, or torch's AOT precompile
    starts/<pid>-<number>/   empty cache folders of the running process
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

#: Schema of a kept folder: raise it when preparations change.
_SCHEMA = 4
#: A way is not started again after this many failures.
_MAX_FAILURES = 2


def bench(
    settings: Settings, *, keep: Path | None = None, command: Sequence[str] = (), on_event: OnEvent = ignore
) -> BenchReport:
    """Measure every way.

    Args:
        settings: The ways and how they are measured.
        keep: A folder that keeps the preparations for the next bench with the same settings; None keeps nothing.
        command: The command line, for the report.
        on_event: Called with progress events.

    Returns:
        The report, which includes the ways that failed.

    Raises:
        UsageError: The folder to keep holds something else.
        ModelError: The model cannot be built or does not run eagerly.
        OSError: A folder cannot be written.
    """
    machine = machine_facts()
    began, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    versions = version_facts()
    about = {  # everything the preparations depend on; a kept folder is reused only if all of it is equal
        "model": to_builtins(settings.model),
        "configuration": settings.config,
        "tokens": list(settings.tokens),
        "size-dim": settings.dimension,
        "seed": settings.seed,
        "Python": versions["python"],
    }
    with open_workspace(keep, about) as workspace:
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
    """One bench: the measurements of each way (`ways`) and each preparation (`sources`), by name."""

    def __init__(self, settings: Settings, workspace: Workspace, on_event: OnEvent) -> None:
        self._settings = settings
        self._workspace = workspace
        self._on_event = on_event
        self.ways = {way.name: Measured() for way in settings.ways}
        self.sources = {way.source: Measured() for way in settings.ways if way.source}

    def run(self) -> None:
        """Prepare and start everything; raises ModelError if the model does not run eagerly."""
        self._run_reference()
        for number in range(self._settings.cold_starts if self.sources else 0):
            names = list(self.sources)
            rotation = number % len(names)
            for source in names[rotation:] + names[:rotation]:
                if self.sources[source].error is None:
                    self._prepare(source, number)
        self._run_rounds()
        for way in self._settings.ways:
            if way.is_cold:
                self.ways[way.name] = self.sources[way.source]
            elif way.source:
                caches = self._workspace.prepared(way.source)
                needed = [caches.cgtool if way.kind == "cgtool" else caches.artifact] if way.kind != "compile" else []
                needed += [caches.inductor, caches.triton] if way.torch_caches else []
                self.ways[way.name].num_bytes = sum(disk_usage(str(path)) for path in needed)

    def first(self, name: str) -> Any:
        """Return the first non-empty value of a field of `Start`."""
        values = (getattr(start, name) for measured in self.ways.values() for start in measured.starts)
        return next((value for value in values if value), None)

    def _run_reference(self) -> None:
        with self._workspace.start() as caches:
            start = self._process(WAYS[BASE], caches, caches, write_reference=True)
        self._event("start", "eager, the reference for the outputs", secs=start.process_secs)
        if start.failed_in == "build" and start.sentence is not None:
            raise ModelError(start.sentence, path=self._settings.model.model)  # the same error as `warm` reports
        if start.error is not None:
            message = f"The model does not run eagerly: {start.error}{format_log(start.log)}"
            raise ModelError(f"{message}\nFix the model or its arguments first.", path=self._settings.model.model)
        self.ways[BASE].starts.append(start)

    def _prepare(self, source: str, number: int) -> None:
        """Fill the prepared caches the first time, and temporary ones, for the statistics, every other time."""
        measured = self.sources[source]
        prepared = self._workspace.prepared(source)
        if number == 0 and prepared.answer.is_file():
            measured.starts.append(replace(decode(prepared.answer.read_bytes(), Start), reused=True))
            return
        way = next(way for way in self._settings.ways if way.source == source)
        label = way.label
        request: dict[str, Any] = {"action": "precompile" if source == "precompile" else "warm"}
        if source == "torch":
            label, request, way = "torch", {"save_artifacts": True}, WAYS["compile-cold"]
        self._event("prepare", label)
        with self._workspace.start() if number else contextlib.nullcontext(prepared.make()) as caches:
            start = self._process(way, caches, caches, number=number, **request)
        measured.starts.append(start)
        if number == 0 and start.error is None:
            write_atomic(prepared.answer, encode(start))
        elif number == 0:
            measured.error, measured.log = start.error, start.log
        self._event("prepare", label, secs=start.process_secs)

    def _run_rounds(self) -> None:
        settings = self._settings
        ways = [way for way in settings.ways if not way.is_cold and settings.starts[way.name] > 0]
        for way in ways:
            if way.source:
                source = self.sources[way.source]
                self.ways[way.name].error, self.ways[way.name].log = source.error, source.log
        total = sum(settings.starts[way.name] for way in ways)
        for number in range(-settings.warm_ups, max((settings.starts[way.name] for way in ways), default=0)):
            generator = random.Random(f"{settings.seed}/{number}")  # noqa: S311 - a reproducible order, not a secret
            for way in generator.sample(ways, len(ways)):
                if number < settings.starts[way.name] and self.ways[way.name].error is None:
                    self._start(way, number, total)

    def _start(self, way: Way, number: int, total: int) -> None:
        measured = self.ways[way.name]
        message = f"round {number + 1}: {way.label}" if number >= 0 else f"not counted: {way.label}"
        done = sum(start.counted for measured in self.ways.values() for start in measured.starts)
        self._event("start", message, done=done, total=total)
        with self._workspace.start() as empty:
            prepared = self._workspace.prepared(way.source) if way.source else empty
            caches = prepared if way.torch_caches else empty
            start = self._process(way, prepared, caches, number=number if number >= 0 else None)
        measured.starts.append(start)
        failures = sum(start.error is not None for start in measured.starts)
        if failures and (number < 0 or failures >= _MAX_FAILURES):
            measured.error, measured.log = start.error, start.log
        self._event("start", message, done=done + (number >= 0), total=total, secs=start.process_secs)

    def _process(
        self, way: Way, prepared: Caches, caches: Caches, *, number: int | None = None, **fields: Any
    ) -> Start:
        """Run one process and return its answer; if it failed, with the end of its log.

        The process uses cgtool's cache and torch's artifact of `prepared`, and the torch cache folders of `caches`. It
        does not count without a number. `fields` are more fields of `Request`.
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
            **fields,
        )
        try:
            answer = child.ask(request, answer=Start, timeout_secs=limit)
            start: Start = answer.record
            log = answer.log if start.error is not None else ()
            ending = child.finish(limit)
            # A process that crashes after its answer failed too, even if its figures are sound.
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
    """Return in one line why there is no answer."""
    if ending.code is None:
        return f"it {ending.how} (allow more with --timeout)"
    return f"it {ending.how}: {ending.key_line}" if ending.key_line else f"it {ending.how}"


class Caches:
    """The cache folders of a process: those of torch and Triton, TMPDIR, and the root of cgtool's cache.

    Attributes:
        artifact: The file of the mega-cache or the AOT precompile.
        answer: The answer of a preparation; it exists once the preparation is complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inductor, self.triton, self._tmp = folder / "inductor", folder / "triton", folder / "tmp"
        self.cgtool, self.artifact, self.answer = folder / "cache", folder / "artifact", folder / "prepared.json"

    def make(self) -> Caches:
        """Create empty folders, and return self."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder in (self.inductor, self.triton, self._tmp):
            folder.mkdir(parents=True)
        return self

    def variables(self, cgtool: Path) -> dict[str, str]:
        """Return the environment of a process that uses these folders and the cache `cgtool`.

        Other CGTOOL_* variables are dropped because the request holds the configuration.
        """
        changes = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.inductor),
            "TRITON_CACHE_DIR": str(self.triton),
            "TMPDIR": str(self._tmp),
            "CGTOOL_CACHE_DIR": str(cgtool),
        }
        return child_variables(changes, without="CGTOOL_")


class Workspace:
    """The folder of a bench, made by `open_workspace`; `reference` is the file with eager's outputs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._starts = 0
        self.reference = root / "reference"

    def prepared(self, source: str) -> Caches:
        """Return the folders of a preparation, which may be incomplete."""
        return Caches(self._root / "prepared" / source)

    @contextlib.contextmanager
    def start(self) -> Iterator[Caches]:
        """Yield empty caches for a process; they are removed afterwards."""
        self._starts += 1
        # The pid keeps two benches apart that share a kept folder.
        caches = Caches(self._root / "starts" / f"{os.getpid()}-{self._starts}").make()
        try:
            yield caches
        finally:
            shutil.rmtree(caches.folder, ignore_errors=True)


@contextlib.contextmanager
def open_workspace(keep: Path | None, about: Mapping[str, Any]) -> Iterator[Workspace]:
    """Yield the folder of a bench: `keep`, or a temporary folder that is removed afterwards.

    Raises UsageError if `keep` holds something else, or was prepared for settings that differ from `about`.
    """
    root = (Path(tempfile.mkdtemp(prefix="cgtool-bench-")) if keep is None else keep).resolve()
    try:
        _claim(root, {"schema": _SCHEMA, **about})
        yield Workspace(root)
    finally:
        # Retry: a process that was just killed may still write its last file.
        for _ in range(3 if keep is None and root.exists() else 0):
            shutil.rmtree(root, ignore_errors=True)


def _claim(root: Path, about: Mapping[str, Any]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    path = root / "bench.json"
    if not path.is_file():
        if any(root.iterdir()):
            message = f"{root} holds files that are not from a bench. Give --keep an empty or a new folder."
            raise UsageError(message, path=str(root))
        write_atomic(path, canonical_json(about))
    try:
        stored = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        message = f"{path} was not written by this cgtool ({error}). Give --keep another folder."
        raise UsageError(message, path=str(root)) from error
    names = sorted({*stored, *about})
    differing = [name for name in names if canonical_json(stored.get(name)) != canonical_json(about.get(name))]
    if differing:
        message = f"{root} was prepared with a different {', '.join(differing)}. Give --keep another folder."
        raise UsageError(message, path=str(root), expected=dict(about), actual=stored)
