"""A bench's results as text and tables, for the terminal and the HTML page. Must not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from cgtool.cli.text import size_text
from cgtool.toolkit.bench.report import Refused, Summary

if TYPE_CHECKING:
    from cgtool.toolkit.bench.report import BenchReport, Ratio, WayReport

NONE = "-"

#: Detail of a table: names and medians; plus preparation, disk and memory; plus labels, spreads and outputs.
SHORT, MEDIUM, FULL = range(3)

PHASE_NAMES: Mapping[str, str] = {"import_secs": "import", "build_secs": "build", "ready_secs": "ready"}


def start_table(report: BenchReport, detail: int = FULL) -> list[list[str]]:
    """Return the table of starts: headings, then a row for each way."""

    def phase(name: str) -> Callable[[WayReport], str]:
        spread = detail >= (SHORT if name == "ready_secs" else FULL)
        return lambda way: _secs(way.summary.get(name), spread=spread)

    def memory(name: str) -> Callable[[WayReport], str]:
        return lambda way: size_text(round(way.summary[name].median)) if name in way.summary else NONE

    columns: list[tuple[int, str, Callable[[WayReport], str]]] = [
        (SHORT, "way", lambda way: _name(way, detail)),
        *((SHORT, heading, phase(name)) for name, heading in PHASE_NAMES.items()),
        (SHORT, "ready / eager", lambda way: _over_eager(way, "ready_secs", bound=True)),
        (FULL, "outputs", outputs_text),
        (MEDIUM, "prepared in", lambda way: NONE if way.prepare is None else _secs(way.prepare.total_secs)),
        (MEDIUM, "on disk", lambda way: size_text(way.num_bytes) if way.num_bytes else NONE),
        (MEDIUM, "memory", memory("rss_bytes")),
    ]
    if any("device_bytes" in way.summary for way in report.ways):
        columns.append((FULL, "on the device", memory("device_bytes")))
    shown = [column for column in columns if column[0] <= detail]
    return [[head for _, head, _ in shown], *([cell(way) for _, _, cell in shown] for way in report.ways)]


def step_table(report: BenchReport, detail: int = FULL) -> list[list[str]]:
    """Return the table of steps: headings, then a row for each way with steps; [] if no way has any."""
    ways = [way for way in report.ways if way.steps]
    sizes = list(dict.fromkeys(size for way in ways for size in way.steps))
    table = [["way", *(heading for size in sizes for heading in (size, "/ eager"))]]
    for way in ways:
        row = [_name(way, detail)]
        for size in sizes:
            step = way.steps.get(size)
            if isinstance(step, Refused):
                row += ["refused", NONE]
            else:
                ratio = _over_eager(way, f"step_{size}", bound=detail >= FULL) if step is not None else NONE
                row += [_secs(step, spread=detail >= FULL), ratio]
        table.append(row)
    return table if ways else []


def step_caption(report: BenchReport) -> str:
    """Return the caption of the table of steps."""
    return f"Time per step, by {report.dimension}"


def failure_lines(report: BenchReport) -> list[str]:
    """Return a line for each way that failed and for each distinct error with which a way refused a size."""
    lines = [f"{way.label} failed: {way.error}" for way in report.ways if way.error]
    for way in report.ways:
        refused = {step.error: size for size, step in reversed(list(way.steps.items())) if isinstance(step, Refused)}
        lines += [f"{way.label} refused {report.dimension} {size}: {error}" for error, size in refused.items()]
    return lines


def machine_line(report: BenchReport) -> str:
    """Return the machine and the versions in one line."""
    machine, versions = report.machine, report.versions
    parts = [
        f"{machine['cpu']}, {machine['cores_available']} of {machine['cores']} cores",
        machine.get("gpu"),
        f"torch {versions['torch']}",
        f"triton {versions['triton']}" if versions.get("triton") else None,
        f"Python {versions['python']}",
        f"cgtool {versions['cgtool']}" + (f" at {versions['commit']}" if versions.get("commit") else ""),
    ]
    return "; ".join(part for part in parts if part)


def outputs_text(way: WayReport) -> str:
    """Return whether a way's outputs equal those of eager, and the greatest difference."""
    if way.outputs is None:
        return NONE
    off = f" ({way.outputs.worst:.0e})" if way.outputs.worst else ""
    return f"equal{off}" if way.outputs.equal else f"DIFFER{off}"


def duration_text(secs: float) -> str:
    """Format a duration with three significant digits: "22.1 ms", "6.10 s"."""
    factor, unit = _unit(secs)
    return f"{_digits(secs * factor)} {unit}"


def _secs(summary: Summary | None, *, spread: bool = False) -> str:
    """Format a median, with quartiles in the same unit: "22.1 ms (21.4-23)"."""
    if summary is None:
        return NONE
    factor, _ = _unit(summary.median)
    quartiles = f" ({_digits(summary.q1 * factor)}-{_digits(summary.q3 * factor)})"
    return duration_text(summary.median) + (quartiles if spread and summary.count > 1 else "")


def _over_eager(way: WayReport, metric: str, *, bound: bool) -> str:
    """Format a ratio with its bound: "1.12 [1.05-1.2]"; without the bound if there are too few pairs."""
    if "eager" not in way.ratios or metric not in way.ratios["eager"]:
        return "1" if way.way == "eager" else NONE
    ratio: Ratio = way.ratios["eager"][metric]
    if not bound or ratio.low is None or ratio.high is None:
        return _digits(ratio.ratio)
    return f"{_digits(ratio.ratio)} [{_digits(ratio.low)}-{_digits(ratio.high)}]"


def _unit(secs: float) -> tuple[float, str]:
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))
    return next((unit for unit in units if secs * unit[0] >= 1), units[-1])


def _digits(value: float) -> str:
    """Format a number with three significant digits: "0.0221", "1.23", "45.6", "1234"."""
    return f"{value:.{max(0, 2 - int(math.log10(value)))}f}" if value >= 1 else f"{value:.3g}"


def _name(way: WayReport, detail: int) -> str:
    return way.label if detail >= FULL else way.way
