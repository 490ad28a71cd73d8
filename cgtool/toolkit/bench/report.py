"""What a bench found: raw starts, their statistics, ratios, and the machine. The schema of `cgtool bench --json`.

Must not import torch. Times are seconds, sizes bytes. A ratio says how much larger a value is than the other way's in
the same round.
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

#: What other ways are compared with, where they were started.
BASES = (BASE, "compile-warm", "compile-cold")
#: The bound of a ratio leaves out the first and the last of so many parts (it holds 95 %) of so many samples.
PARTS, RESAMPLES = 40, 4000
#: Fewer pairs than this cannot bound a median with 95 %: even their whole range holds it less often, 1 - 2 / 2**n.
FEWEST_PAIRS = 6
_BUSY = 1.5
_COMPARED = ("ready_secs", "start_secs", "rss_bytes")


class Summary(Record, frozen=True, kw_only=True):
    """Numbers in short: how many, the median, the quartiles (linear between neighbours) and the range."""

    count: Count
    median: float
    q1: float
    q3: float
    low: float = msgspec.field(name="min")
    high: float = msgspec.field(name="max")


class Ratio(Record, frozen=True, kw_only=True):
    """The median of ratios of pairs, and its bounds with 95 % confidence; None where there are too few pairs."""

    ratio: float
    low: float | None
    high: float | None
    pairs: Count


class Refused(Record, frozen=True, kw_only=True):
    """Why a way has no steps of a size."""

    error: str


class Outputs(Difference, frozen=True, kw_only=True):
    """How all outputs of a way compare with eager's."""

    equal: bool


class Prepared(Record, frozen=True, kw_only=True):
    """What filling a way's caches took."""

    #: Tracing and compiling.
    work_secs: Summary | None
    #: From the process's start to the end of the work.
    total_secs: Summary | None
    process_secs: Summary | None
    #: Whether an earlier bench did it.
    reused: bool
    notes: tuple[str, ...]
    #: How much longer it is than torch.compile's with nothing cached, by metric.
    over_cold: Mapping[str, Ratio]


class WayReport(Record, frozen=True, kw_only=True):
    """What is known of one way."""

    way: str
    label: str
    adaptor: str | None
    #: Why it failed, or failed in the end; one line.
    error: str | None
    #: The last lines of the process that failed.
    log: Sequence[str]
    #: Bytes on the disk that a start needs.
    num_bytes: int = msgspec.field(name="bytes")
    #: By name of the metric (`Start.figures`).
    summary: Mapping[str, Summary]
    #: Of each size, the summary of its starts' medians; or why it has none.
    steps: Mapping[str, Summary | Refused]
    #: base way → metric → ratio.
    ratios: Mapping[str, Mapping[str, Ratio]]
    #: How the outputs compare with eager's; None where none were compared.
    outputs: Outputs | None
    prepare: Prepared | None
    starts: Sequence[Start]


class BenchReport(Record, frozen=True, kw_only=True):
    """What a bench found."""

    schema: int
    model: str
    #: Model, configuration and settings, as JSON.
    about: Mapping[str, Any]
    command: Sequence[str]
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    #: Which dynamic dimension the sizes of steps are of.
    dimension: str | None
    ways: Sequence[WayReport]
    notes: Sequence[str]
    #: When, in UTC.
    began: str
    secs: float


@dataclass(kw_only=True)
class Measured:
    """What one way, or one preparation, gave: its answers, why it has no more, and the bytes that a start needs."""

    starts: list[Start] = field(default_factory=list)
    error: str | None = None
    log: tuple[str, ...] = ()
    num_bytes: int = 0

    @property
    def figures(self) -> dict[str, dict[int, float]]:
        """Metric → round → value, of the starts that count."""
        found: dict[str, dict[int, float]] = {}
        for start in self.starts:
            if start.counted and start.error is None and start.round is not None:
                for name, value in start.figures.items():
                    found.setdefault(name, {})[start.round] = value
        return found

    def ratios(self, base: Measured, names: Iterable[str], *, seed: int) -> dict[str, Ratio]:
        """Return how much larger metrics are than another's, those of which some round has both."""
        mine, others = self.figures, base.figures
        found = {name: paired_ratio(mine.get(name, {}), others.get(name, {}), seed=seed) for name in names}
        return {name: ratio for name, ratio in found.items() if ratio is not None}


def report_way(
    way: Way, settings: Settings, ways: Mapping[str, Measured], sources: Mapping[str, Measured]
) -> WayReport:
    """Return what is known of a way, given what each way and each preparation gave, by name."""
    measured, sizes = ways[way.name], [str(size) for size in settings.tokens]
    summary = {name: summarise(list(values.values())) for name, values in measured.figures.items()}
    steps: dict[str, Summary | Refused] = {size: summary[f"step_{size}"] for size in sizes if f"step_{size}" in summary}
    refused = {size: step.error for start in measured.starts for size, step in start.steps.items() if step.error}
    steps |= {size: Refused(error=error) for size, error in refused.items() if size not in steps}
    compared = [*_COMPARED, *(f"step_{size}" for size in sizes)]
    bases = [base for base in BASES if base != way.name and base in ways]
    against = {base: measured.ratios(ways[base], compared, seed=settings.seed) for base in bases}
    return WayReport(
        way=way.name,
        label=way.label,
        adaptor=way.adaptor,
        error=measured.error or next((start.error for start in measured.starts if start.error is not None), None),
        log=measured.log or next((start.log for start in measured.starts if start.log), ()),
        num_bytes=measured.num_bytes,
        summary={name: found for name, found in summary.items() if not name.startswith("step_")},
        steps={size: steps[size] for size in sizes if size in steps},
        ratios={base: found for base, found in against.items() if found},
        outputs=_outputs(measured),
        prepare=_prepared(sources[way.source], sources, settings.seed) if way.source and not way.is_cold else None,
        starts=measured.starts,
    )


def _prepared(source: Measured, sources: Mapping[str, Measured], seed: int) -> Prepared:
    metrics = ("work_secs", "total_secs", "process_secs")
    figures = source.figures
    spread = {name: summarise(list(figures[name].values())) if name in figures else None for name in metrics}
    return Prepared(
        **spread,
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
    """Return what a reader should know before believing the figures."""
    notes = []
    if len({start.weights for way in ways for start in way.starts if start.weights is not None}) > 1:
        notes.append(
            "The weights differ from start to start, so the outputs cannot be compared: let the factory draw them from "
            "torch's generator, or from one with a seed of its own."
        )
    differing = ((way.label, way.outputs) for way in ways if way.outputs is not None and not way.outputs.equal)
    notes += [f"{label}: outputs differ from eager's: {outputs.problem}." for label, outputs in differing]
    notes += [f"{way.label}: {note}" for way in ways if way.prepare is not None for note in way.prepare.notes]
    load, cores = machine.get("load_before"), machine.get("cores_available")
    if load is not None and cores and load > _BUSY * cores:
        notes.append(f"The machine was busy when the bench began: {load:.1f} processes on {cores} cores.")
    return tuple(dict.fromkeys(notes))


def summarise(values: Sequence[float]) -> Summary:
    """Return one or more values in short."""
    q1, middle, q3 = _quantiles(values, 4)
    return Summary(count=len(values), median=middle, q1=q1, q3=q3, low=min(values), high=max(values))


def _quantiles(values: Sequence[float], count: int) -> list[float]:
    """The values between `count` equal parts of `values`, linear between neighbours; one value is all of them."""
    return quantiles([*values, *values] if len(values) == 1 else values, n=count, method="inclusive")


def paired_ratio(values: Mapping[int, float], base: Mapping[int, float], *, seed: int) -> Ratio | None:
    """Return how much larger `values` are than `base`, round by round: what disturbed a round disturbed both.

    Rounds that only one of the two has are left out; None where none is left. The bound, from `FEWEST_PAIRS` pairs on,
    is the percentile bootstrap of the median over rounds; the same numbers and `seed` give the same bound.
    """
    ratios = [values[number] / base[number] for number in sorted(values) if base.get(number, 0) > 0]
    if not ratios:
        return None
    low, high = bootstrap(ratios, seed=seed) if len(ratios) >= FEWEST_PAIRS else (None, None)
    return Ratio(ratio=median(ratios), low=low, high=high, pairs=len(ratios))


def bootstrap(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Return the bounds of the median of `values`, of which there is at least one, by the percentile bootstrap.

    Source:
        Efron, "Bootstrap methods: another look at the jackknife", 1979; percentile interval.
    """
    draw = random.Random(seed)  # noqa: S311 - a reproducible sample, no secret
    bounds = _quantiles([median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)], PARTS)
    return bounds[0], bounds[-1]


def machine_facts() -> dict[str, Any]:
    """Return the processor, its cores, the memory, the system, and how many processes ran in the last minute."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        lines, memory_bytes = [], None
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(named, None) or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_available": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_before": load_average(),
    }


def load_average() -> float | None:
    """Return how many processes ran or waited in the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def version_facts() -> dict[str, Any]:
    """Return the versions of Python and of cgtool, with the commit where cgtool runs from a git checkout.

    A commit ends in "+" where the checkout differs from it.
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
