"""A bar chart of start-up as inline SVG: one row a way, its phases one after the other, on one linear scale.

Must not import torch. A bar's width is its seconds times one factor for the whole chart; nothing is widened to be seen,
the number beside it says what is too short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from cgtool.bench.words import PHASE_WORDS, secs_words

#: Units of the picture: where bars begin, how long the longest may be, and what a row takes.
LEFT, LONGEST, RIGHT = 310.0, 560.0, 100.0
ROW, BAR, TOP = 34.0, 20.0, 8.0


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row.

    Args:
        label: What it is of.
        parts: Phase → seconds, in order; empty where there is nothing to show.
        remark: What stands in place of the bar then.
    """

    label: str
    parts: Mapping[str, float]
    remark: str = ""

    @property
    def secs(self) -> float:
        """The length of the whole bar."""
        return sum(self.parts.values())


def chart(bars: Sequence[Bar], *, title: str, name: str) -> str:
    """Return the chart as an SVG element.

    Args:
        bars: The rows, from above.
        title: What the picture shows, for who cannot see it and for who points at it.
        name: Its identifier in the page.
    """
    longest = max((bar.secs for bar in bars), default=0.0) or 1.0
    height = TOP * 2 + ROW * len(bars)
    width = LEFT + LONGEST + RIGHT
    rows = "\n".join(_row(bar, TOP + ROW * index, LONGEST / longest) for index, bar in enumerate(bars))
    words = ". ".join(_spoken(bar) for bar in bars)
    return (
        f'<svg id="{escape(name)}" class="chart" role="img" viewBox="0 0 {width:g} {height:g}" '
        f'aria-labelledby="{escape(name)}-title {escape(name)}-words">\n'
        f'<title id="{escape(name)}-title">{escape(title)}</title>\n'
        f'<desc id="{escape(name)}-words">{escape(words)}</desc>\n{rows}\n'
        f'<line class="axis" x1="{LEFT:g}" y1="{TOP / 2:g}" x2="{LEFT:g}" y2="{height - TOP / 2:g}"/>\n</svg>'
    )


def _row(bar: Bar, top: float, scale: float) -> str:
    middle = top + ROW / 2
    parts = [f'<text class="label" x="{LEFT - 10:g}" y="{middle:g}">{escape(bar.label)}</text>']
    left = LEFT
    for phase, secs in bar.parts.items():
        word = PHASE_WORDS[phase]
        width = secs * scale
        parts.append(
            f'<rect class="{word}" x="{left:.3f}" y="{middle - BAR / 2:g}" width="{width:.3f}" height="{BAR:g}">'
            f"<title>{escape(bar.label)}: {word} {secs_words(secs)}</title></rect>"
        )
        left += width
    said = secs_words(bar.secs) if bar.parts else bar.remark
    parts.append(f'<text class="value" x="{left + 8:.3f}" y="{middle:g}">{escape(said)}</text>')
    return f'<g class="row">{"".join(parts)}</g>'


def _spoken(bar: Bar) -> str:
    if not bar.parts:
        return f"{bar.label}: {bar.remark}"
    return f"{bar.label}: " + ", ".join(f"{PHASE_WORDS[phase]} {secs_words(secs)}" for phase, secs in bar.parts.items())
