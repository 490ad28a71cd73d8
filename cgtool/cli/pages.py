"""The pages that `--html` writes: self-contained files without scripts or network access.

Must not import torch. Untrusted text (model names, error messages) is escaped, and each page's Content-Security-Policy
forbids it to load or run anything. A bench's start-up is drawn as bars on one linear scale: a row for each way, its
phases side by side. A bar's width is its share of the longest row; short bars are not widened, the number beside them
gives the value.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cgtool.cli import bench_tables as tables
from cgtool.errors import UsageError
from cgtool.toolkit.bench.report import FEWEST_PAIRS

if TYPE_CHECKING:
    from cgtool.toolkit.bench.report import BenchReport

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --band: #f6f8fa;
  --import: #6e7781; --build: #0969da; --ready: #bc4c00; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e6edf3; --soft: #9da7b1; --line: #30363d;
  --band: #161b22; --import: #8b949e; --build: #58a6ff; --ready: #f0883e; --bad: #ff7b72; } }
body { margin: 2rem auto; padding: 0 1rem; max-width: 84rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p, li { max-width: 48rem; } .soft { color: var(--soft); } .bad { color: var(--bad); font-weight: 600; }
code { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
.chart { margin: 0; max-width: 62rem; }
.row { display: grid; grid-template-columns: minmax(0, 19rem) minmax(0, 1fr); gap: .6rem; margin: .5rem 0; }
.row .label { text-align: right; }
.bars { display: flex; align-items: center; border-left: 1px solid var(--line); padding-right: 6rem; }
.bars i { flex: none; height: 1.25rem; } .bars .value { flex: none; margin-left: .5rem; color: var(--soft); }
@media (max-width: 40rem) { .row { grid-template-columns: minmax(0, 1fr); gap: 0; } .row .label { text-align: left; } }
.import { background: var(--import); } .build { background: var(--build); } .ready { background: var(--ready); }
.legend { display: flex; gap: 1.5rem; padding: 0; margin: .5rem 0; list-style: none; }
.legend span { display: inline-block; width: .9em; height: .9em; margin-right: .4em; vertical-align: -.1em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin-bottom: 1.2rem; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { background: var(--band); }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
"""

_METHOD = (
    (
        "Each start is a fresh process. In each round, every way starts once, in a new random order. Where warm caches "
        "are measured, the first starts are not counted."
    ),
    (
        "Import: from process start until torch and cgtool's model builder are imported. Build: importing the model's "
        "modules and running its factory. Ready: from the built model to its first output; for cgtool this includes "
        "importing it, the lookup, digests, guards and opening the artifacts."
    ),
    "A step is a synchronised call after warm-up in inference mode; each start contributes the median of many steps.",
    (
        "Figures are medians over starts, with quartiles. A ratio is the median of the ratios within each round; its "
        f"bound is a 95 % percentile bootstrap over rounds, shown from {FEWEST_PAIRS} rounds."
    ),
    (
        "All ways have the same weights and inputs, and their outputs are compared with those of eager. The number in "
        "parentheses is the greatest difference, relative to the greatest value of the tensor."
    ),
    (
        "Memory is the peak resident set size of the process. Prepared in: from the start of the process that fills "
        "the caches until they are filled."
    ),
)


def document(title: str, style: str, body: str) -> str:
    """Return an HTML page."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def write_text(path: Path, text: str) -> None:
    """Write a page or a picture; an OSError becomes a usage error."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} could not be written: {error.strerror}. Name another file.", path=path) from error


def bench_page(report: BenchReport) -> str:
    """Return the HTML report of a bench."""
    phases = list(tables.PHASE_NAMES)
    legend = "".join(f'<li><span class="{word}"></span>{word}</li>' for word in tables.PHASE_NAMES.values())
    failures = "".join(f'<p class="bad">{escape(line)}</p>' for line in tables.failure_lines(report))
    body = f"""<header>
<h1>Ways to start <code>{escape(report.model)}</code></h1>
<p class="soft">{escape(report.began)}; {escape(tables.machine_line(report))}</p>
</header>
<main>
{failures}
<h2>From process start to first output</h2>
<ul class="legend">{legend}</ul>
{chart([*_bars(report, phases)], title="Start-up by phase, medians", name="phases")}
<h2>From built model to first output</h2>
{chart([*_bars(report, phases[2:])], title="Ready, medians", name="ready")}
<h2>Figures</h2>
{_table("Starts", tables.start_table(report))}
{_table(tables.step_caption(report), tables.step_table(report))}
{_list("Notes", report.notes)}
{_list("How it was measured", _METHOD)}
<h2>Command</h2>
<p><code>{escape(shlex.join(report.command))}</code></p>
</main>"""
    return document(f"Ways to start {report.model}", _STYLE, body)


def _table(caption: str, table: Sequence[Sequence[str]]) -> str:
    if not table:
        return ""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table[0])
    body = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{_cell(cell)}</td>" for cell in cells) + "</tr>"
        for name, *cells in table[1:]
    )
    # tabindex: a scrollable region must be reachable from the keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _cell(text: str) -> str:
    return f'<span class="bad">{escape(text)}</span>' if text.startswith("DIFFER") else escape(text)


def _list(heading: str, items: Sequence[str]) -> str:
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<h2>{escape(heading)}</h2>\n<ul>{lines}</ul>" if items else ""


class Bar(NamedTuple):
    """One row of a chart: seconds by phase, in order; if there are none, a remark instead of the bar."""

    label: str
    parts: Mapping[str, float]
    remark: str = ""


def _bars(report: BenchReport, phases: Sequence[str]) -> Iterator[Bar]:
    for way in report.ways:
        if all(phase in way.summary for phase in phases):
            yield Bar(way.label, {phase: way.summary[phase].median for phase in phases})
        else:
            yield Bar(way.label, {}, "failed" if way.error else "not started")


def chart(bars: Sequence[Bar], *, title: str, name: str) -> str:
    """Return the chart as an element with the id `name` and an aria-label that lists its values."""
    longest = max((sum(bar.parts.values()) for bar in bars), default=0.0) or 1.0
    values = ". ".join(f"{bar.label}: {', '.join(_phase_texts(bar).values()) or bar.remark}" for bar in bars)
    rows = "\n".join(_row(bar, longest) for bar in bars)
    label = escape(f"{title}. {values}")
    return f'<figure id="{name}" class="chart" role="img" aria-label="{label}">\n{rows}\n</figure>'


def _row(bar: Bar, longest: float) -> str:
    parts = "".join(
        f'<i class="{tables.PHASE_NAMES[phase]}" style="width:{bar.parts[phase] / longest:.5%}" '
        f'title="{escape(bar.label)}: {text}"></i>'
        for phase, text in _phase_texts(bar).items()
    )
    total = tables.duration_text(sum(bar.parts.values())) if bar.parts else bar.remark
    value = f'<span class="value">{escape(total)}</span>'
    return (
        f'<div class="row"><span class="label">{escape(bar.label)}</span><div class="bars">{parts}{value}</div></div>'
    )


def _phase_texts(bar: Bar) -> dict[str, str]:
    return {phase: f"{tables.PHASE_NAMES[phase]} {tables.duration_text(secs)}" for phase, secs in bar.parts.items()}
