"""Text that is safe to print: whatever a model's author, a file name or a cache folder of a stranger puts into it.

Must not import torch. A terminal obeys control characters and rich obeys markup; what others wrote may hold both. So
every string that is not ours goes through `plain` and is printed as a `rich.text.Text`, never as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

_ABSURD_BYTES = 1 << 70
_BINARY_THOUSAND = 1024
#: Below this a tenth of a second still tells.
_TENTHS_TELL_SECS = 100
#: Of indices: two have no rhythm, and more than these do not fit a narrow column.
_FEWEST_IN_RHYTHM, _MOST_INDICES = 3, 8


def plain(text: object, *, lines: bool = False) -> str:
    """Return `str(text)` with everything that a terminal would obey spelled out as an escape.

    With `lines`, line ends stay (for messages that show the user's own code) and a tab becomes four spaces.
    """
    source = str(text)
    if source.isprintable():  # nearly all are, and a listing has thousands
        return source
    if lines:
        source = source.replace("\r\n", "\n").replace("\t", "    ")
        return "\n".join(map(plain, source.split("\n")))
    return "".join(char if char.isprintable() else _escaped(char) for char in source)


def cut(text: str, most: int = 60) -> str:
    """Return `text`, or where it is longer than `most` characters its beginning and a "…"."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def one_line(text: object, most: int = 400) -> str:
    """Return text on one line, quoted, and cut where it is longer than anybody reads."""
    spelled = plain(str(text)[: 2 * most])
    return spelled if len(spelled) <= most else f"{spelled[:most]}…"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def size_text(num_bytes: int) -> str:
    """Return a size for people, in binary units: "512 B", "1.5 MiB"."""
    if num_bytes >= _ABSURD_BYTES:  # a stranger's manifest says what it likes, and no float holds it
        return "1 ZiB or more"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < _BINARY_THOUSAND:
            return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= _BINARY_THOUSAND
    return f"{size:.1f} TiB"


def secs_text(secs: float | None) -> str:
    """Return a duration for people: "0.03 s", "12.3 s", "2 min 5 s"; "-" where none is known."""
    if secs is None:
        return "-"
    if secs < 1:
        return f"{secs:.2f} s"
    if secs < _TENTHS_TELL_SECS:
        return f"{secs:.1f} s"
    return f"{int(secs) // 60} min {int(secs) % 60} s"


def ago_text(stamp: Any, now: float) -> str:
    """Return how long before `now` a time was, in seconds since the epoch or as ISO 8601: "3 min ago", or "never"."""
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
    """Return the first of many lines, and one that says how many more `--json` shows."""
    rest = len(lines) - most
    return [*lines] if rest <= 1 else [*lines[:most], f"and {rest} more, which --json shows"]


def indices_text(indices: Iterable[int]) -> str:
    """Return piece indices short: "0", "2-6 by 2" for 2, 4, 6, else "0, 3, 4"; long lists end in "… (n)"."""
    values = sorted(indices)
    if len(values) >= _FEWEST_IN_RHYTHM:
        step = values[1] - values[0]
        if values == list(range(values[0], values[-1] + 1, step)):
            return f"{values[0]}-{values[-1]}" + (f" by {step}" if step > 1 else "")
    if len(values) > _MOST_INDICES:
        return ", ".join(str(v) for v in values[:6]) + f", … ({len(values)})"
    return ", ".join(str(v) for v in values)
