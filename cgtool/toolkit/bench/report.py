"""What a bench found: raw starts, their summaries, ratios, and the machine. The schema of `cgtool bench --json`.

Must not import torch. Times are seconds, sizes bytes. A ratio says how much larger a value is than the other way's in
the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, to_builtins

from cgtool.toolkit.bench.request import Start
from cgtool.toolkit.bench.runner import Measured, Runner, Settings
from cgtool.toolkit.bench.stats import Ratio, Summary, paired_ratio, summarise
from cgtool.toolkit.bench.ways import Way

SCHEMA = 1

#: The phases of a start, in order.
PHASES = ("import_secs", "build_secs", "ready_secs")
#: What other ways are compared with, where they were started.
BASES = ("eager", "compile-warm", "compile-cold")
_BUSY = 1.5

Value = Callable[[Start], float | None]


@dataclass(frozen=True, kw_only=True)
class WayReport:
    """What is known of one way.

    Args:
        way: The way.
        starts: The raw answers.
        error: Why it failed, or failed in the end; one line.
        log: The last lines of the process that failed.
        num_bytes: Bytes on the disk that a start needs.
        summary: By name of the metric.
        steps: Of each size, the summary of its starts' medians; or why it has none.
        ratios: base way → metric → ratio.
        outputs: How the outputs compare with eager's, as JSON; None where none were compared.
        prepare: What the preparation took, as JSON; None where there is none.
    """

    way: Way
    starts: Sequence[Start]
    error: str | None
    log: Sequence[str]
    num_bytes: int
    summary: Mapping[str, Summary]
    steps: Mapping[str, Summary | str]
    ratios: Mapping[str, Mapping[str, Ratio]]
    outputs: Mapping[str, Any] | None
    prepare: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Return the record as `--json` prints it, records within it as they are."""
        return {
            "way": self.way.name,
            "label": self.way.label,
            "adaptor": self.way.adaptor,
            "error": self.error,
            "log": self.log,
            "bytes": self.num_bytes,
            "summary": self.summary,
            "steps": {
                size: {"error": found} if isinstance(found, str) else found for size, found in self.steps.items()
            },
            "ratios": self.ratios,
            "outputs": self.outputs,
            "prepare": self.prepare,
            "starts": self.starts,
        }


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What a bench found.

    Args:
        model: MODEL as it was given.
        about: Model, configuration and settings, as JSON.
        command: The command line.
        machine: The processor, the device, the system.
        versions: Of Python, torch, triton, cgtool.
        dimension: Which dynamic dimension the sizes of steps are of.
        ways: In the table's order.
        notes: What a reader should know.
        began: When, in UTC.
        secs: How long it all took.
    """

    model: str
    about: Mapping[str, Any]
    command: Sequence[str]
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    dimension: str | None
    ways: Sequence[WayReport]
    notes: Sequence[str]
    began: str
    secs: float

    def to_json(self) -> dict[str, Any]:
        """Return the document that `bench --json` prints."""
        document = {
            "schema": SCHEMA,
            "model": self.model,
            "about": self.about,
            "command": self.command,
            "machine": self.machine,
            "versions": self.versions,
            "dimension": self.dimension,
            "ways": [way.to_json() for way in self.ways],
            "notes": self.notes,
            "began": self.began,
            "secs": self.secs,
        }
        found: dict[str, Any] = to_builtins(document)
        return found


def report_ways(runner: Runner, settings: Settings) -> tuple[WayReport, ...]:
    """Return what is known of each way."""
    return tuple(_report_way(way, runner, settings) for way in settings.ways)


def _report_way(way: Way, runner: Runner, settings: Settings) -> WayReport:
    measured = runner.ways[way.name]
    metrics: dict[str, Value] = {name: _at(name) for name in (*PHASES, "rss_bytes", "device_bytes", "start_secs")}
    summary = _summaries(measured, metrics)
    sizes = [str(size) for size in settings.tokens]
    firsts = _summaries(measured, {f"first_{size}": _of_step(size, "first_secs") for size in sizes})
    ratios = {
        base: found
        for base in BASES
        if base != way.name and base in runner.ways and (found := _ratios(measured, runner.ways[base], sizes, settings))
    }
    steps = {size: _step_summary(measured, size) for size in sizes}
    return WayReport(
        way=way,
        starts=measured.starts,
        error=measured.error or next((start.error for start in measured.starts if start.error is not None), None),
        log=measured.log or next((start.log for start in measured.starts if start.log is not None), ()),
        num_bytes=measured.num_bytes,
        summary={**summary, **firsts},
        steps={size: found for size, found in steps.items() if found is not None},
        ratios=ratios,
        outputs=_outputs(measured),
        prepare=_prepare(way, runner, settings),
    )


def _summaries(measured: Measured, metrics: Mapping[str, Value]) -> dict[str, Summary]:
    found = {name: summarise(_values(measured, value)) for name, value in metrics.items()}
    return {name: summary for name, summary in found.items() if summary is not None}


def by_round(measured: Measured, value: Value) -> dict[int, float]:
    """Return a value of each start that counts and has it, by its round."""
    counted = [start for start in measured.starts if start.counted and start.error is None]
    return {start.round: found for start in counted if start.round is not None and (found := value(start)) is not None}


def _values(measured: Measured, value: Value) -> list[float]:
    return list(by_round(measured, value).values())


def _at(name: str) -> Value:
    def value(start: Start) -> float | None:
        found = getattr(start, name)
        return None if found is UNSET else found

    return value


def _of_step(size: str, name: str) -> Value:
    def value(start: Start) -> float | None:
        step = (start.steps or {}).get(size)
        return None if step is None else getattr(step, name)

    return value


def _step_summary(measured: Measured, size: str) -> Summary | str | None:
    steps = [(start.steps or {}).get(size) for start in measured.starts]
    errors = (step.error for step in steps if step is not None and step.error)
    return summarise(_values(measured, _of_step(size, "median_secs"))) or next(errors, None)


def _ratios(measured: Measured, base: Measured, sizes: Sequence[str], settings: Settings) -> dict[str, Ratio]:
    values: dict[str, Value] = {name: _at(name) for name in ("ready_secs", "start_secs", "rss_bytes")}
    values |= {f"step_{size}": _of_step(size, "median_secs") for size in sizes}
    found = {
        name: paired_ratio(by_round(measured, value), by_round(base, value), seed=settings.seed)
        for name, value in values.items()
    }
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def _outputs(measured: Measured) -> dict[str, Any] | None:
    rows = [row for start in measured.starts for row in (start.outputs or {}).values() if row is not None]
    if not rows:
        return None
    return {
        "equal": not any(row.problem for row in rows),
        "worst": max(row.worst for row in rows),
        "tolerance": max(row.tolerance for row in rows),
        "problem": next((row.problem for row in rows if row.problem), None),
    }


def _prepare(way: Way, runner: Runner, settings: Settings) -> dict[str, Any] | None:
    """What filled the caches: its phases, and how much longer they are than a cold torch.compile's."""
    if not way.source or way.is_cold:
        return None
    source, cold = runner.sources[way.source], runner.sources.get("torch")
    values = {"work_secs": _at("prepare_secs"), "total_secs": _at("total_secs"), "process_secs": _at("process_secs")}
    summaries = {name: summarise(_values(source, value)) for name, value in values.items()}
    result: dict[str, Any] = {name: found for name, found in summaries.items() if found is not None}
    result["reused"] = any(start.reused for start in source.starts)
    result["notes"] = [note for start in source.starts[:1] for note in start.notes or ()]
    result["over_cold"] = {}
    if cold is not None:
        for name in ("work_secs", "total_secs"):
            ratio = paired_ratio(by_round(source, values[name]), by_round(cold, values[name]), seed=settings.seed)
            if ratio is not None:
                result["over_cold"][name] = ratio
    return result


def notes_on(ways: Sequence[WayReport], machine: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a reader should know before believing the figures."""
    notes = []
    digests = {start.weights for way in ways for start in way.starts if start.weights is not None}
    if len(digests) > 1:
        notes.append(
            "The weights differ from start to start, so the outputs cannot be compared: let the factory draw them from "
            "torch's generator, or from one with a seed of its own."
        )
    notes += [
        f"{way.way.label}: outputs differ from eager's: {way.outputs['problem']}."
        for way in ways
        if way.outputs is not None and not way.outputs["equal"]
    ]
    notes += [f"{way.way.label}: {note}" for way in ways for note in (way.prepare or {}).get("notes", [])]
    load, cores = machine.get("load_before"), machine.get("cores_available")
    if load is not None and cores and load > _BUSY * cores:
        notes.append(f"The machine was busy when the bench began: {load:.1f} processes on {cores} cores.")
    return tuple(dict.fromkeys(notes))
