"""Text as roff, the language of man pages."""

from __future__ import annotations


def escaped(text: str) -> str:
    """Return one line that man shows as it stands: no request, no special character."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq").replace("`", r"\(ga")
    # groff reads Latin-1 unless it is told otherwise
    text = "".join(char if char.isascii() else rf"\[u{ord(char):04X}]" for char in text)
    return r"\&" + text if text.startswith(".") else text


def literal(text: str) -> list[str]:
    """Return the lines of a block that man shows as they stand, in a `.nf`."""
    return [escaped(line) or ".sp" for line in text.splitlines()]
