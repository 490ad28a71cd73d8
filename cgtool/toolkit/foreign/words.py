"""How names and texts of strangers stand in warnings and problems. Must not import torch."""

from __future__ import annotations

#: Longer texts are cut in their middle: a path tells most at its end, a text at its beginning.
MOST_SHOWN = 400


def shown(text: object) -> str:
    """Return a stranger's text for a sentence: on one line, printable, and not longer than people read."""
    source = str(text)
    if len(source) > MOST_SHOWN:
        half = MOST_SHOWN // 2
        source = f"{source[:half]}…{source[-half:]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in source)
