"""The report of a bench: raw starts, statistics, ratios and machine facts; the schema of `cgtool bench --json`.

Must not import torch. Times are in seconds, sizes in bytes. A ratio is a value divided by the other way's value of the
same round.
"""

from __future__ import annotations

import os
import platform
import random
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec

from cgtool import __version__
from cgtool.plan.grammar import Count, Record
from cgtool.toolkit.bench.ways import BASE, Difference, Settings, Start, Way

SCHEMA = 1

#: The ways with which the others are compared, if they were started.
BASES = (BASE, "compile-warm", "compile-cold")
#: Bootstrap samples of a median; dropping the first and the last of 40 quantiles leaves a 95 % confidence interval.
RESAMPLES, QUANTILES = 4000, 40
#: With fewer pairs there is no 95 % interval: even their whole range covers the median with probability 1 - 2 / 2**n.
FEWEST_PAIRS = 6
#: Load per available core above which a note says that the machine was busy.
_BUSY_LOAD = 1.5
_COMPARED_METRICS = ("ready_secs", "start_secs", "rss_bytes")


class Summary(Record, frozen=True, kw_only=True):
    """Count, median, quartiles (linearly interpolated) and range of some values."""

    count: Count
    median: float
    q1: float
    q3: float
    low: float = msgspec.field(name="min")
    high: float = msgspec.field(name="max")


class Ratio(Record, frozen=True, kw_only=True):
    """The median of paired ratios and its 95 % confidence interval, which is None if there are too few pairs."""

    ratio: float
    low: float | None
    high: float | None
    pairs: Count


class Refused(Record, frozen=True, kw_only=True):
    """The error of a size that a way refused."""

    error: str


class Outputs(Difference, frozen=True, kw_only=True):
    """The comparison of all outputs of a way with eager's."""

    equal: bool


class Prepared(Record, frozen=True, kw_only=True):
    """The cost of filling a way's caches."""

    #: Tracing and compiling.
    work_secs: Summary | None
    #: From the start of the process to the end of the work.
    total_secs: Summary | None
    process_secs: Summary | None
    #: Whether an earlier bench prepared it.
    reused: bool
    notes: tuple[str, ...]
    #: Metric → ratio to torch.compile with empty caches.
    over_cold: Mapping[str, Ratio]


class WayReport(Record, frozen=True, kw_only=True):
    """The results of one way."""

    way: str
    label: str
    adaptor: str | None
    #: Its first or final error, in one line.
    error: str | None
    #: The last lines that the failed process printed.
    log: Sequence[str]
    #: Bytes on disk that a start needs.
    num_bytes: int = msgspec.field(name="bytes")
    #: Metric (`Start.figures`) → summary.
    summary: Mapping[str, Summary]
    #: Size → summary of the medians of its starts, or the error.
    steps: Mapping[str, Summary | Refused]
    #: Base way → metric → ratio.
    ratios: Mapping[str, Mapping[str, Ratio]]
    #: None if no outputs were compared.
    outputs: Outputs | None
    prepare: Prepared | None
    starts: Sequence[Start]


class BenchReport(Record, frozen=True, kw_only=True):
    """The report of a bench."""

    schema: int
    model: str
    #: Model, configuration and settings, as JSON.
    about: Mapping[str, Any]
    command: Sequence[str]
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    #: The dynamic dimension that the steps resize.
    dimension: str | None
    ways: Sequence[WayReport]
    notes: Sequence[str]
    #: Start time, in UTC.
    began: str
    secs: float


@dataclass(kw_only=True)
class Measured:
    """The results of one way or one preparation."""

    starts: list[Start] = field(default_factory=list)
    #: Why it is not started again.
    error: str | None = None
    log: tuple[str, ...] = ()
    #: Bytes on disk that a start needs.
    num_bytes: int = 0

    @property
    def figures(self) -> dict[str, dict[int, float]]:
        """Metric → round → value, of the counted starts."""
        figures: dict[str, dict[int, float]] = {}
        for start in self.starts:
            if start.counted and start.error is None and start.round is not None:
                for name, value in start.figures.items():
                    figures.setdefault(name, {})[start.round] = value
        return figures

    def ratios(self, base: Measured, names: Iterable[str], *, seed: int) -> dict[str, Ratio]:
        """Return the ratios of metrics to another way's, as far as they share rounds."""
        values, base_values = self.figures, base.figures
        ratios = {name: paired_ratio(values.get(name, {}), base_values.get(name, {}), seed=seed) for name in names}
        return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def report_way(
    way: Way, settings: Settings, ways: Mapping[str, Measured], sources: Mapping[str, Measured]
) -> WayReport:
    """Report one way.

    Args:
        way: The way.
        settings: The settings of the bench.
        ways: The measurements of each way, by name.
        sources: The measurements of each preparation, by source.
    """
    measured, sizes = ways[way.name], [str(size) for size in settings.tokens]
    summary = {name: summarize(list(values.values())) for name, values in measured.figures.items()}
    steps: dict[str, Summary | Refused] = {size: summary[f"step_{size}"] for size in sizes if f"step_{size}" in summary}
    refused = {size: step.error for start in measured.starts for size, step in start.steps.items() if step.error}
    steps |= {size: Refused(error=error) for size, error in refused.items() if size not in steps}
    metrics = [*_COMPARED_METRICS, *(f"step_{size}" for size in sizes)]
    bases = [base for base in BASES if base != way.name and base in ways]
    ratios = {base: measured.ratios(ways[base], metrics, seed=settings.seed) for base in bases}
    return WayReport(
        way=way.name,
        label=way.label,
        adaptor=way.adaptor,
        error=measured.error or next((start.error for start in measured.starts if start.error is not None), None),
        log=measured.log or next((start.log for start in measured.starts if start.log), ()),
        num_bytes=measured.num_bytes,
        summary={name: values for name, values in summary.items() if not name.startswith("step_")},
        steps={size: steps[size] for size in sizes if size in steps},
        ratios={base: by_metric for base, by_metric in ratios.items() if by_metric},
        outputs=_outputs(measured),
        prepare=_prepared(sources[way.source], sources, settings.seed) if way.source and not way.is_cold else None,
        starts=measured.starts,
    )


def _prepared(source: Measured, sources: Mapping[str, Measured], seed: int) -> Prepared:
    metrics = ("work_secs", "total_secs", "process_secs")
    figures = source.figures
    summaries = {name: summarize(list(figures[name].values())) if name in figures else None for name in metrics}
    return Prepared(
        **summaries,
        reused=any(start.reused for start in source.starts),
        notes=tuple(note for start in source.starts[:1] for note in start.notes),
        over_cold=source.ratios(sources["torch"], metrics[:2], seed=seed) if "torch" in sources else {},
    )


def _outputs(measured: Measured) -> Outputs | None:
    rows = [row for start in measured.starts for row in start.outputs.values() if row is not None]
    if not rows:
        return None
    problem = next((row.problem for row in rows if row.problem), None)
    worst, tolerance = max(row.worst for row in rows), max(row.tolerance for row in rows)
    return Outputs(equal=problem is None, worst=worst, tolerance=tolerance, problem=problem)


def notes_on(ways: Sequence[WayReport], machine: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes on the validity of the figures."""
    notes = []
    if len({start.weights for way in ways for start in way.starts if start.weights is not None}) > 1:
        notes.append(
            "The weights differ from start to start, so the outputs cannot be compared. Let the factory draw them from "
            "torch's default generator or from a seeded one."
        )
    differing = ((way.label, way.outputs) for way in ways if way.outputs is not None and not way.outputs.equal)
    notes += [f"{label}: outputs differ from eager's: {outputs.problem}." for label, outputs in differing]
    notes += [f"{way.label}: {note}" for way in ways if way.prepare is not None for note in way.prepare.notes]
    load, cores = machine.get("load_before"), machine.get("cores_available")
    if load is not None and cores and load > _BUSY_LOAD * cores:
        notes.append(f"The machine was busy when the bench began: {load:.1f} processes on {cores} cores.")
    return tuple(dict.fromkeys(notes))


def summarize(values: Sequence[float]) -> Summary:
    """Summarize one or more values."""
    q1, middle, q3 = _quantiles(values, 4)
    return Summary(count=len(values), median=middle, q1=q1, q3=q3, low=min(values), high=max(values))


def _quantiles(values: Sequence[float], count: int) -> list[float]:
    """Return the `count` - 1 quantiles of `values`, linearly interpolated; of one value, that value each time."""
    return quantiles([*values, *values] if len(values) == 1 else values, n=count, method="inclusive")


def paired_ratio(values: Mapping[int, float], base: Mapping[int, float], *, seed: int) -> Ratio | None:
    """Return the median of the ratios of `values` to `base`, paired by round; None if they share no round.

    Pairing cancels disturbances, which affect both values of a round. From `FEWEST_PAIRS` pairs on, the confidence
    interval is the percentile bootstrap of the median over rounds, deterministic for a `seed`.
    """
    ratios = [values[number] / base[number] for number in sorted(values) if base.get(number, 0) > 0]
    if not ratios:
        return None
    low, high = bootstrap(ratios, seed=seed) if len(ratios) >= FEWEST_PAIRS else (None, None)
    return Ratio(ratio=median(ratios), low=low, high=high, pairs=len(ratios))


def bootstrap(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Return the percentile-bootstrap confidence interval of the median of one or more values.

    Source:
        Efron, "Bootstrap methods: another look at the jackknife", 1979; percentile interval.
    """
    generator = random.Random(seed)  # noqa: S311 - a reproducible sample, not a secret
    medians = [median(generator.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    bounds = _quantiles(medians, QUANTILES)
    return bounds[0], bounds[-1]


def machine_facts() -> dict[str, Any]:
    """Return the processor, its cores, the memory, the system, and the load average of the last minute."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        lines, memory_bytes = [], None
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, None) or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_available": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_before": load_average(),
    }


def load_average() -> float | None:
    """Return the load average of the last minute; None if the system has none."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def version_facts() -> dict[str, Any]:
    """Return the versions of Python and cgtool, and the commit if cgtool runs from a git checkout.

    The commit ends in "+" if the checkout has changes.
    """
    package, commit = Path(__file__).resolve().parents[2], None
    if (package.parent / ".git").exists():
        command = ["git", "-C", str(package), "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=+"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)  # noqa: S603 - fixed
            commit = done.stdout.strip() or None
        except (OSError, subprocess.SubprocessError):
            commit = None
    return {"python": platform.python_version(), "cgtool": __version__, "commit": commit}
