"""How what a plan says is said to people: where a thing is found, and values as data. No torch here.

The grammar of sources and of literals stands in `cgtool.guards.sources` and `cgtool.guards.literals`.
"""

from __future__ import annotations

import re

from cgtool.plan.pieces import Json


def source_words(text: str) -> str:
    """Return a source as a person would write it: "layers.0.eps", "input_ids", "tiny_llama.SCALE"."""
    if text == "self":
        return "the model"
    text = re.sub(r"^(self\.|arg:|free:|module:|state:)", "", text)
    text = re.sub(r"^global:([^:]+):", r"\1.", text)
    return text.replace("|type", "'s type")


def spell(literal: Json) -> str:
    """Return an encoded literal as a person would write it, and what is none as it stands."""
    try:
        return _spelled(literal)
    except (LookupError, TypeError, ValueError, RecursionError):
        return str(literal)[:80]


def _spelled(literal: Json) -> str:
    if literal is None or isinstance(literal, (bool, int)):
        return str(literal)
    if isinstance(literal, str):
        return repr(literal)
    tag, *rest = literal
    if tag in {"t", "l", "size", "set", "frozenset"}:
        inner = ", ".join(map(_spelled, rest))
        return {"t": f"({inner})", "l": f"[{inner}]", "size": f"Size({inner})"}.get(tag, f"{{{inner}}}")
    if tag == "d":
        return "{" + ", ".join(f"{_spelled(key)}: {_spelled(item)}" for key, item in rest) + "}"
    if tag == "function":
        return f"{rest[0]} (code {rest[1][:8]})" if rest[1] else str(rest[0])
    if tag == "enum":
        return f"{rest[0]}.{rest[1]}"
    if tag == "slice":
        return ":".join("" if part is None else _spelled(part) for part in rest)
    if tag == "range":
        return f"range({rest[0]}, {rest[1]}, {rest[2]})"
    return " ".join(map(str, rest)) or "..."


def definition_words(then: Json, now: Json) -> str:
    """Return in what a class, written as [name, {member: digest}], differs from what it was."""
    name = str(then[0]).replace(":", ".")
    if now[0] != then[0]:
        return f"class {name}: {str(now[0]).replace(':', '.')} stands in its place now"
    old, new = then[1], now[1]
    said = [f"member {member} has changed" for member in old if member in new and new[member] != old[member]]
    said += [f"member {member} is gone" for member in old if member not in new]
    said += [f"member {member} is new" for member in new if member not in old]
    return f"class {name}: {'; '.join(said)}"


def names_words(owner: str, kind: str, then: Json, now: Json) -> str:
    """Return which attributes (kind "named" or "attributes") or keys ("named_keys") an object gained or lost.

    An ABC gains and loses the classes that are registered with it (kind "registered").
    """
    gone = [name for name in then if name not in now]
    new = [name for name in now if name not in then]
    if kind == "named_keys":
        said = [f"{owner} had the key {name!r} when this was compiled and has it no more" for name in gone]
        said += [f"{owner} did not have the key {name!r} when this was compiled and has it now" for name in new]
    elif kind == "registered":
        said = [f"{name} was registered with {owner} when this was compiled and is not any more" for name in gone]
        said += [f"{name} was not registered with {owner} when this was compiled and is now" for name in new]
    else:
        said = [f"{owner}.{name} was set when this was compiled and is gone now" for name in gone]
        said += [f"{owner}.{name} was not set when this was compiled and is now" for name in new]
    return "; ".join(said) or f"the attributes of {owner} were in another order when this was compiled"
