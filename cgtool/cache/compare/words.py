"""How what a plan says is said to people: sources, and values as data. No torch here.

`cgtool.guards` says the same things of live objects, and needs torch for it; a test holds the two equal. The grammar of
sources and of literals stands in `cgtool.guards.sources` and `cgtool.guards.literals`.
"""

from __future__ import annotations

import json
import re

from cgtool.pieces import Json, TensorMeta
from cgtool.plan import Guard

_TEXT_CHARACTERS = 200


def source_words(text: str) -> str:
    """Return a source as a person would write it: "layers.0.eps", "input_ids", "tiny_llama.SCALE"."""
    if text == "self":
        return "the model"
    text = re.sub(r"^(self\.|arg:|free:|module:|state:)", "", text)
    text = re.sub(r"^global:([^:]+):", r"\1.", text)
    return text.replace("|type", "'s type")


def literal_words(literal: Json) -> str:
    """Return a value that is written as data as a person would write it; as JSON where it is outside of the grammar."""
    try:
        return _literal(literal)
    except (ValueError, TypeError, IndexError):
        return json.dumps(literal)


def _literal(literal: Json) -> str:
    if literal is None or isinstance(literal, (bool, int)):
        return str(literal)
    if isinstance(literal, str):
        return repr(literal)
    tag, *rest = literal
    if tag in {"t", "l", "size", "set", "frozenset"}:
        inner = ", ".join(map(_literal, rest))
        return {"t": f"({inner})", "l": f"[{inner}]", "size": f"Size({inner})"}.get(tag, f"{{{inner}}}")
    if tag == "d":
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in rest) + "}"
    if tag == "function":
        return f"{rest[0]} (code {rest[1][:8]})" if rest[1] else str(rest[0])
    if tag == "enum":
        return f"{rest[0]}.{rest[1]}"
    if tag == "slice":
        return ":".join("" if part is None else _literal(part) for part in rest)
    if tag == "range":
        return f"range({rest[0]}, {rest[1]}, {rest[2]})"
    return " ".join(map(str, rest)) or "..."


def tensor_words(meta: TensorMeta) -> str:
    """Return what is known of a tensor: "float32[s0, 64] strides [64, 1] cpu"."""
    shape, stride = (", ".join(map(str, dims)) for dims in (meta.shape, meta.stride))
    return f"{meta.dtype}[{shape}] strides [{stride}] {meta.device}"


def changed_words(guard: Guard, now: Json) -> str:
    """Return how a guard's value was and is: "layers.0.eps was 1e-06 and is 1e-05 now".

    Args:
        guard: As the first side has it.
        now: What the second side's guard of this source and kind expects.
    """
    name, (word, _, argument) = source_words(guard.source), guard.kind.partition(":")
    if word == "code" or _is_same_function(guard.expected, now):
        return f"the code of {name} has changed"
    if word == "hasattr":
        return f"{name} {_had(guard.expected)} an attribute {argument} and {_has(now)} now"
    if word == "contains":
        return f"{name} {_had(guard.expected)} the key {argument} and {_has(now)} now"
    if word == "absent":
        return f"{name}.{argument} is {'not ' if now else ''}set on the object itself now and was otherwise before"
    if word in {"same", "apart"}:
        others = f"{name} and {source_words(argument)}"
        one = now is (word == "same")
        return f"{others} are {'one object' if one else 'two objects'} now and were otherwise before"
    before, after = (value_words(word, value) for value in (guard.expected, now))
    return f"{name} was {before} and is {after} now"


def value_words(word: str, value: Json) -> str:
    """Return what a guard of a kind expects.

    Args:
        word: The kind without its argument.
        value: What is expected.
    """
    try:
        said = _expected(word, value)
    except (ValueError, TypeError, IndexError, KeyError):
        said = json.dumps(value)
    return said if len(said) <= _TEXT_CHARACTERS else f"{said[:_TEXT_CHARACTERS]}…"


def _expected(word: str, value: Json) -> str:
    if word == "value":
        return literal_words(value)
    if word == "type":
        return f"of type {value}"
    if word == "length":
        return f"of type {value[0]} with {value[1]} elements"
    if word == "keys":
        return "a dict with the keys " + ", ".join(map(literal_words, value))
    if word == "tensor":
        return f"a {value[1]} tensor of shape {tuple(value[2])} and strides {tuple(value[3])} on {value[4]}"
    if word == "hooks":
        return f"with {value or 'no'} hooks"
    if word == "empty":
        return "empty" if value else "not empty"
    if word == "requires_grad":
        return "requiring grad" if value else "not requiring grad"
    return json.dumps(value, ensure_ascii=False)


def _is_same_function(old: Json, new: Json) -> bool:
    """Return whether two values are functions of one name, which differ in their code."""
    return _names_function(old) and _names_function(new) and old[1] == new[1]


def _names_function(value: Json) -> bool:
    return isinstance(value, list) and len(value) == 3 and value[0] == "function"  # noqa: PLR2004 - tag, name, digest


def _had(value: Json) -> str:
    return "had" if value else "did not have"


def _has(value: Json) -> str:
    return "has" if value else "does not"
