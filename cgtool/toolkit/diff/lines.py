"""Diffs of lists of lines that stay quick for long lists that are nearly equal. No torch here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

#: Lines around a change that are shown with it.
_CONTEXT = 2
#: A list of changes that is longer serves nobody; what is left out is counted.
_MOST_LINES = 60
#: Lists that differ in more lines than this are not aligned: that takes time in their square.
_MOST_ALIGNED = 1500


def common_ends(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """Return how many lines two lists have in common at their beginning and, of the rest, at their end."""
    shorter = min(len(old), len(new))
    start = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    end = next((i for i in range(shorter - start) if old[-1 - i] != new[-1 - i]), shorter - start)
    return start, end


def matched(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Return positions of lines that correspond, in order; only those of the common ends where too much differs."""
    start, end = common_ends(old, new)
    pairs = [(i, i) for i in range(start)]
    left, right = old[start : len(old) - end], new[start : len(new) - end]
    if len(left) + len(right) <= 2 * _MOST_ALIGNED:
        for block in difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
            pairs += [(start + block.a + i, start + block.b + i) for i in range(block.size)]
    return pairs + [(len(old) - end + i, len(new) - end + i) for i in range(end)]


def line_diff(old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    """Return what differs as lines that begin with "-", "+" or " ", each run of changes with two lines around it."""
    changed = _edits(old, new)
    shown: list[str] = []
    last = 0
    for position, (mark, line) in enumerate(changed):
        near = changed[max(0, position - _CONTEXT) : position + _CONTEXT + 1]
        if all(other == " " for other, _ in near):
            continue
        if shown and position > last + 1:
            shown.append("...")
        shown.append(f"{mark} {line}")
        last = position
    if len(shown) > _MOST_LINES:
        left_out = len(shown) - _MOST_LINES
        shown = [*shown[:_MOST_LINES], f"... {left_out} more lines"]
    return tuple(shown)


def _edits(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    edits: list[tuple[str, str]] = []
    i = j = 0
    for left, right in [*matched(old, new), (len(old), len(new))]:
        edits += [("-", line) for line in old[i:left]]
        edits += [("+", line) for line in new[j:right]]
        if left < len(old):
            edits.append((" ", old[left]))
        i, j = left + 1, right + 1
    return edits
