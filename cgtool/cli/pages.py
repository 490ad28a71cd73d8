"""The pages that `--html` writes: one file each, which needs no network and no script.

Must not import torch. Whatever a model's author wrote (its name, an error's text) is escaped, and a page's
Content-Security-Policy forbids it to load or run anything. A bench's start-up is drawn as bars: one row a way, its
phases one after the other, on one linear scale. A bar's width is its share of the longest row of its chart; nothing is
widened to be seen, the number beside it says what is too short.
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
        "Each start is a fresh process. The ways are started in turn, round by round, in an order that is drawn anew "
        "for each round; first starts are left out where warm caches are meant."
    ),
    (
        "Import: from the start of the process until torch and what builds the model are imported. Build: the model's "
        "own modules and its factory. Ready: from the built model to its first output, which for cgtool counts its own "
        "import, the look-up, digests, guards and opening what was compiled."
    ),
    "A step is a call after warm-up, in inference mode, synchronised; the median of many in each start.",
    (
        "Figures are medians over starts, with quartiles. A ratio is the median of the ratios within each round; its "
        f"bound is the 95 % percentile bootstrap over rounds, given from {FEWEST_PAIRS} rounds on."
    ),
    (
        "All ways have the same weights and inputs, and outputs are compared with eager's; in brackets stands the "
        "greatest difference, relative to a tensor's greatest value."
    ),
    (
        "Memory is the greatest resident size of the process. Prepared in: from the start of the process that filled "
        "the caches until they were filled."
    ),
)


def document(title: str, style: str, body: str) -> str:
    """Return a page."""
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
    """Write a page or a picture that the user asked for."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} could not be written: {error.strerror}. Name another file.", path=path) from error


def bench_page(report: BenchReport) -> str:
    """Return the page of a bench."""
    phases = list(tables.PHASE_WORDS)
    legend = "".join(f'<li><span class="{word}"></span>{word}</li>' for word in tables.PHASE_WORDS.values())
    failures = "".join(f'<p class="bad">{escape(line)}</p>' for line in tables.failure_lines(report))
    body = f"""<header>
<h1>Ways to start <code>{escape(report.model)}</code></h1>
<p class="soft">{escape(report.began)}; {escape(tables.machine_line(report))}</p>
</header>
<main>
{failures}
<h2>From the process's start to the first output</h2>
<ul class="legend">{legend}</ul>
{chart([*_bars(report, phases)], title="Start-up by phase, medians", name="phases")}
<h2>From the built model to the first output</h2>
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
    # What scrolls must be reachable from the keyboard.
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
    """One row of a chart: seconds by phase, in order; or, where there are none, a remark in place of the bar."""

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
    """Return the chart as an element with the identifier `name`; its rows are also spoken, for who cannot see it."""
    longest = max((sum(bar.parts.values()) for bar in bars), default=0.0) or 1.0
    spoken = ". ".join(f"{bar.label}: {', '.join(_spoken(bar).values()) or bar.remark}" for bar in bars)
    rows = "\n".join(_row(bar, longest) for bar in bars)
    label = escape(f"{title}. {spoken}")
    return f'<figure id="{name}" class="chart" role="img" aria-label="{label}">\n{rows}\n</figure>'


def _row(bar: Bar, longest: float) -> str:
    parts = "".join(
        f'<i class="{tables.PHASE_WORDS[phase]}" style="width:{bar.parts[phase] / longest:.5%}" '
        f'title="{escape(bar.label)}: {said}"></i>'
        for phase, said in _spoken(bar).items()
    )
    total = tables.secs_words(sum(bar.parts.values())) if bar.parts else bar.remark
    value = f'<span class="value">{escape(total)}</span>'
    return (
        f'<div class="row"><span class="label">{escape(bar.label)}</span><div class="bars">{parts}{value}</div></div>'
    )


def _spoken(bar: Bar) -> dict[str, str]:
    return {phase: f"{tables.PHASE_WORDS[phase]} {tables.secs_words(secs)}" for phase, secs in bar.parts.items()}
