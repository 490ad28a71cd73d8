"""A bench's figures as text and as cells of tables, for a terminal and for the page.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cgtool.toolkit.bench.report import BenchReport, Ratio, Refused, Summary, WayReport
from cgtool.toolkit.bench.ways import BASE

NONE = "-"

#: How much of a table there is room for: names and medians; what it needs too; labels, spreads and outputs.
SHORT, MEDIUM, FULL = range(3)

PHASE_WORDS: Mapping[str, str] = {"import_secs": "import", "build_secs": "build", "ready_secs": "ready"}

_Column = tuple[str, int, Callable[[WayReport, int], str]]


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


def ratio_words(ratio: Ratio | None) -> str:
    """Return a ratio with its bound: "1.12 [1.05-1.2]"; without one where there are too few pairs."""
    if ratio is None:
        return NONE
    if ratio.low is None or ratio.high is None:
        return digits(ratio.ratio)
    return f"{digits(ratio.ratio)} [{digits(ratio.low)}-{digits(ratio.high)}]"


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
    off = f" ({way.outputs.worst:.0e})" if way.outputs.worst else ""
    return f"equal{off}" if way.outputs.equal else f"DIFFER{off}"


def prepared_words(way: WayReport) -> str:
    """Return how long it took to fill the caches that a way starts from."""
    total = None if way.prepare is None else way.prepare.total_secs
    return NONE if total is None else secs_words(total.median)


def start_columns(report: BenchReport, *, detail: int = FULL) -> tuple[str, ...]:
    """Return the head of the table of starts."""
    return tuple(head for head, least, _ in _start_table(report) if least <= detail)


def start_cells(report: BenchReport, way: WayReport, *, detail: int = FULL) -> tuple[str, ...]:
    """Return a way's row of the table of starts."""
    return tuple(cell(way, detail) for _, least, cell in _start_table(report) if least <= detail)


def _start_table(report: BenchReport) -> list[_Column]:
    """Each column: its head, the detail from which it is there, and its cell."""

    def secs(name: str) -> _Column:
        word = PHASE_WORDS[name]
        spread_from = SHORT if name == "ready_secs" else FULL
        return word, SHORT, lambda way, detail: _secs_cell(way.summary.get(name), spread=detail >= spread_from)

    columns: list[_Column] = [
        ("way", SHORT, _way_cell),
        *map(secs, PHASE_WORDS),
        ("ready / eager", SHORT, lambda way, _: _over_eager(way, "ready_secs")),
        ("outputs", FULL, lambda way, _: outputs_words(way)),
        ("prepared in", MEDIUM, lambda way, _: prepared_words(way)),
        ("on disk", MEDIUM, lambda way, _: bytes_words(way.num_bytes) if way.num_bytes else NONE),
        ("memory", MEDIUM, lambda way, _: bytes_words(_median(way.summary.get("rss_bytes")))),
    ]
    if any("device_bytes" in way.summary for way in report.ways):
        columns.append(("on the device", FULL, lambda way, _: bytes_words(_median(way.summary.get("device_bytes")))))
    return columns


def step_columns(report: BenchReport) -> tuple[str, ...]:
    """Return the head of the table of steps, whose caption names the dimension."""
    return ("way", *(word for size in _sizes(report) for word in (size, "/ eager")))


def step_cells(report: BenchReport, way: WayReport, *, detail: int = FULL) -> tuple[str, ...]:
    """Return a way's row of the table of steps."""
    cells = []
    for size in _sizes(report):
        found = way.steps.get(size)
        cells.append("refused" if isinstance(found, Refused) else _secs_cell(found, spread=detail >= FULL))
        cells.append(_over_eager(way, f"step_{size}", bound=detail >= FULL) if isinstance(found, Summary) else NONE)
    return (_way_cell(way, detail), *cells)


def step_caption(report: BenchReport) -> str:
    """Return what the table of steps shows."""
    return f"A step, by {report.dimension}"


def _way_cell(way: WayReport, detail: int) -> str:
    return way.label if detail >= FULL else way.way


def _secs_cell(summary: Summary | None, *, spread: bool) -> str:
    if summary is None:
        return NONE
    return spread_words(summary) if spread else secs_words(summary.median)


def _over_eager(way: WayReport, metric: str, *, bound: bool = True) -> str:
    if way.way == BASE:
        return "1"
    ratio = way.ratios.get("eager", {}).get(metric)
    return ratio_words(ratio) if bound or ratio is None else digits(ratio.ratio)


def failure_lines(report: BenchReport) -> list[str]:
    """Return one line for each way that failed and each size that a way refused."""
    lines = [f"{way.label} failed: {way.error}" for way in report.ways if way.error]
    for way in report.ways:
        refused = {found.error: size for size, found in reversed(list(way.steps.items())) if isinstance(found, Refused)}
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


def _sizes(report: BenchReport) -> list[str]:
    return list(dict.fromkeys(size for way in report.ways for size in way.steps))


def _median(summary: Summary | None) -> float | None:
    return None if summary is None else summary.median
