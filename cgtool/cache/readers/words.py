"""How names and texts of strangers stand in warnings and problems. Must not import torch."""

from __future__ import annotations

_MOST = 120


def shown(text: object) -> str:
    """Return a stranger's text for a sentence: on one line, printable, and not longer than people read."""
    source = str(text)
    cut = source if len(source) <= _MOST else f"{source[: _MOST - 1]}…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in cut)
