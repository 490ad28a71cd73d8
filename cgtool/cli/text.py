"""Formatting of text, sizes and times for people, safe against untrusted input.

Must not import torch. Model names, file names and caches of unknown origin may contain control characters, which a
terminal interprets, and markup, which rich interprets. So every string that is not ours goes through `plain` and is
printed as a `rich.text.Text`, never as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

_ABSURD_BYTES = 1 << 70
_BINARY_THOUSAND = 1024
#: Durations below this are shown with tenths of a second.
_MOST_SECS_WITH_TENTHS = 100
#: The fewest indices that are shown as a progression, and the most that fit a narrow column.
_FEWEST_IN_PROGRESSION, _MOST_INDICES = 3, 8


def plain(text: object, *, lines: bool = False) -> str:
    """Return `str(text)` with non-printable characters escaped, so that a terminal does not interpret them.

    With `lines`, line ends are kept (for messages that show the user's own code) and a tab becomes four spaces.
    """
    source = str(text)
    if source.isprintable():  # the common case; a listing has thousands of strings
        return source
    if lines:
        source = source.replace("\r\n", "\n").replace("\t", "    ")
        return "\n".join(map(plain, source.split("\n")))
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in source)


def cut(text: str, most: int = 60) -> str:
    """Return `text` truncated to `most` characters, with a "…" at the end if it was longer."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def one_line(text: object, most: int = 400) -> str:
    """Return text escaped to one line and truncated."""
    escaped = plain(str(text)[: 2 * most])
    return escaped if len(escaped) <= most else f"{escaped[:most]}…"


def size_text(num_bytes: int) -> str:
    """Format a size in binary units: "512 B", "1.5 MiB"."""
    if num_bytes >= _ABSURD_BYTES:  # an untrusted manifest may give a number that no float holds
        return "1 ZiB or more"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < _BINARY_THOUSAND:
            return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= _BINARY_THOUSAND
    return f"{size:.1f} TiB"


def secs_text(secs: float | None) -> str:
    """Format a duration: "0.03 s", "12.3 s", "2 min 5 s"; "-" for None."""
    if secs is None:
        return "-"
    if secs < 1:
        return f"{secs:.2f} s"
    if secs < _MOST_SECS_WITH_TENTHS:
        return f"{secs:.1f} s"
    return f"{int(secs) // 60} min {int(secs) % 60} s"


def ago_text(stamp: Any, now: float) -> str:
    """Format a time (seconds since the epoch, or ISO 8601) relative to `now`: "3 min ago", "just now", "never"."""
    then = _epoch(stamp)
    if then is None:
        return "never"
    secs = max(0, int(now - then))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= length:
            return f"{secs // length} {unit} ago"
    return "just now"


def _epoch(stamp: Any) -> float | None:
    if isinstance(stamp, str):
        try:
            return datetime.fromisoformat(stamp).timestamp()
        except ValueError:
            return None
    return float(stamp) if isinstance(stamp, (int, float)) else None


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """Return "1 piece", "3 pieces"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def first(lines: Sequence[str], most: int = 20) -> list[str]:
    """Return the first lines and, if there are more, a line that counts the rest."""
    rest = len(lines) - most
    return [*lines] if rest <= 1 else [*lines[:most], f"and {rest} more (shown by --json)"]


def indices_text(indices: Iterable[int]) -> str:
    """Format piece indices: "0", "2-6 by 2" for 2, 4, 6, else "0, 3, 4"; a long list ends in "… (n)"."""
    values = sorted(indices)
    if len(values) >= _FEWEST_IN_PROGRESSION:
        step = values[1] - values[0]
        if values == list(range(values[0], values[-1] + 1, step)):
            return f"{values[0]}-{values[-1]}" + (f" by {step}" if step > 1 else "")
    if len(values) > _MOST_INDICES:
        return ", ".join(str(v) for v in values[:6]) + f", … ({len(values)})"
    return ", ".join(str(v) for v in values)
