"""How a bench's figures are spelled for people, on a terminal and on the page.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cgtool.bench.report import BenchReport, WayReport
from cgtool.bench.stats import Summary

NONE = "-"


def digits(value: float) -> str:
    """Return a number with three digits that tell: "0.0221", "1.23", "45.6", "1234"."""
    if value >= 100:  # noqa: PLR2004  whole numbers tell enough
        return f"{value:.0f}"
    if value >= 10:  # noqa: PLR2004  likewise
        return f"{value:.1f}"
    if value >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


def secs_words(secs: float) -> str:
    """Return a duration: "22.1 ms", "6.10 s"."""
    factor, unit = _unit(secs)
    return f"{digits(secs * factor)} {unit}"


def _unit(secs: float) -> tuple[float, str]:
    if secs >= 1:
        return 1.0, "s"
    return (1e3, "ms") if secs >= 1e-3 else (1e6, "µs")  # noqa: PLR2004  a millisecond


def spread_words(summary: Summary | None) -> str:
    """Return a median with its quartiles in its unit: "22.1 ms (21.4-23)"; "-" where there is nothing."""
    if summary is None:
        return NONE
    factor, unit = _unit(summary.median)
    middle = f"{digits(summary.median * factor)} {unit}"
    if summary.count == 1:
        return middle
    return f"{middle} ({digits(summary.q1 * factor)}-{digits(summary.q3 * factor)})"


def ratio_words(ratio: Mapping[str, Any] | None) -> str:
    """Return a ratio with its bound: "1.12 [1.05-1.2]"; without one where there are too few pairs."""
    if ratio is None:
        return NONE
    if ratio["low"] is None:
        return digits(ratio["ratio"])
    return f"{digits(ratio['ratio'])} [{digits(ratio['low'])}-{digits(ratio['high'])}]"


def bytes_words(num_bytes: float | None) -> str:
    """Return a size in binary units; "-" where none is known."""
    if num_bytes is None:
        return NONE
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:  # noqa: PLR2004  the binary thousand
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def outputs_words(way: WayReport) -> str:
    """Return how a way's outputs compare with eager's."""
    if way.outputs is None:
        return NONE
    worst = way.outputs["worst"]
    off = f" ({worst:.0e})" if worst else ""
    return f"equal{off}" if way.outputs["equal"] else f"DIFFER{off}"


def prepared_words(way: WayReport) -> str:
    """Return how long it took to fill the caches that a way starts from."""
    if way.prepare is None or "total_secs" not in way.prepare:
        return NONE
    return secs_words(way.prepare["total_secs"]["median"])


def start_columns(report: BenchReport) -> tuple[str, ...]:
    """Return the head of the table of starts."""
    device = ("on the device",) if _has_device(report) else ()
    return ("way", "import", "build", "ready", "ready / eager", "outputs", "prepared in", "on disk", "memory", *device)


def start_cells(report: BenchReport, way: WayReport) -> tuple[str, ...]:
    """Return a way's row of the table of starts."""
    summary = way.summary
    device = (bytes_words(_median(summary.get("device_bytes"))),) if _has_device(report) else ()
    return (
        way.way.label,
        *(spread_words(summary.get(name)) for name in ("import_secs", "build_secs", "ready_secs")),
        "1" if way.way.kind == "eager" else ratio_words(way.ratios.get("eager", {}).get("ready_secs")),
        outputs_words(way),
        prepared_words(way),
        bytes_words(way.num_bytes) if way.num_bytes else NONE,
        bytes_words(_median(summary.get("rss_bytes"))),
        *device,
    )


def step_columns(report: BenchReport) -> tuple[str, ...]:
    """Return the head of the table of steps."""
    unit = report.dimension or "size"
    heads = [(f"{unit} {size}", "/ eager") for size in _sizes(report)]
    return ("way", *(word for pair in heads for word in pair))


def step_cells(report: BenchReport, way: WayReport) -> tuple[str, ...]:
    """Return a way's row of the table of steps."""
    cells = []
    for size in _sizes(report):
        found = way.steps.get(size)
        cells.append("refused" if isinstance(found, str) else spread_words(found))
        base = way.way.kind == "eager" and isinstance(found, Summary)
        cells.append("1" if base else ratio_words(way.ratios.get("eager", {}).get(f"step_{size}")))
    return (way.way.label, *cells)


def failure_lines(report: BenchReport) -> list[str]:
    """Return one line for each way that failed and each size that a way refused."""
    lines = [f"{way.way.label} failed: {way.error}" for way in report.ways if way.error]
    for way in report.ways:
        refused = {found: size for size, found in reversed(list(way.steps.items())) if isinstance(found, str)}
        lines += [f"{way.way.label} refused {report.dimension} {size}: {found}" for found, size in refused.items()]
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


def _sizes(report: BenchReport) -> list[str]:
    return list(dict.fromkeys(size for way in report.ways for size in way.steps))


def _has_device(report: BenchReport) -> bool:
    return any("device_bytes" in way.summary for way in report.ways)


def _median(summary: Summary | None) -> float | None:
    return None if summary is None else summary.median
