"""How what two plans say is said to people: guards and tensors. No torch here.

`cgtool.guards.kinds` says the same things of a plan and a live object, and needs torch for it.
"""

from __future__ import annotations

import json

from cgtool.plan.pieces import Json, TensorMeta
from cgtool.plan.records import Guard
from cgtool.plan.rendering import definition_words, names_words, source_words, spell

_TEXT_CHARACTERS = 200


def literal_words(literal: Json) -> str:
    """Return a value that is written as data as a person would write it; as JSON where it is outside of the grammar."""
    try:
        return spell(literal)
    except (ValueError, TypeError, IndexError):
        return json.dumps(literal)


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
    if word == "class":
        return definition_words(guard.expected, now)
    if word in {"named", "named_keys", "attributes"}:
        return names_words(name, word, guard.expected, now)
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
