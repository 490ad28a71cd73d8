"""How what a plan says is said to people: where a thing is found, and values as data. No torch here.

The grammar of sources and of literals stands in `cgtool.guards.sources` and `cgtool.guards.literals`.
"""

from __future__ import annotations

import re

from cgtool.pieces import Json


def source_words(text: str) -> str:
    """Return a source as a person would write it: "layers.0.eps", "input_ids", "tiny_llama.SCALE"."""
    if text == "self":
        return "the model"
    text = re.sub(r"^(self\.|arg:|free:|module:|state:)", "", text)
    text = re.sub(r"^global:([^:]+):", r"\1.", text)
    return text.replace("|type", "'s type")


def spell(literal: Json) -> str:
    """Return an encoded literal as a person would write it."""
    if literal is None or isinstance(literal, (bool, int)):
        return str(literal)
    if isinstance(literal, str):
        return repr(literal)
    tag, *rest = literal
    if tag in {"t", "l", "size", "set", "frozenset"}:
        inner = ", ".join(map(spell, rest))
        return {"t": f"({inner})", "l": f"[{inner}]", "size": f"Size({inner})"}.get(tag, f"{{{inner}}}")
    if tag == "d":
        return "{" + ", ".join(f"{spell(key)}: {spell(item)}" for key, item in rest) + "}"
    if tag == "function":
        return f"{rest[0]} (code {rest[1][:8]})" if rest[1] else str(rest[0])
    if tag == "enum":
        return f"{rest[0]}.{rest[1]}"
    if tag == "slice":
        return ":".join("" if part is None else spell(part) for part in rest)
    if tag == "range":
        return f"range({rest[0]}, {rest[1]}, {rest[2]})"
    return " ".join(map(str, rest)) or "..."
