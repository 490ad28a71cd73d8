"""Random changes of JSON documents."""

from __future__ import annotations

import random

#: Values that an attacker would try in a field.
ODD = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 1.5, "", ".", "..", "/", "\0", "x" * 300, "é", "\ud800"),
    *([], {}, [[]], [0, 0, 2**40], {"": 0}, "../../x", "general"),
)


def mutated_json(value: object, pick: random.Random) -> object:
    """Change one value of a document."""
    if isinstance(value, dict) and value and pick.random() < 0.85:
        key = pick.choice(list(value))
        match pick.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {**value, pick.choice(("x", "../x", "", key + "x")): value[key]}
            case _:
                return {**value, key: mutated_json(value[key], pick)}
    if isinstance(value, list) and value and pick.random() < 0.85:
        at = pick.randrange(len(value))
        match pick.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], mutated_json(value[at], pick), *value[at + 1 :]]
    return _near(value, pick) if pick.random() < 0.5 else pick.choice(ODD)


def _near(value: object, pick: random.Random) -> object:
    """Return a value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + pick.choice((-1, 1, 7, 1000))
    if isinstance(value, str) and value:
        at = pick.randrange(len(value))
        return value[:at] + pick.choice(("", "x", ".", "0", value[::-1])) + value[at + 1 :]
    if isinstance(value, list):
        return pick.sample(value, len(value))
    return dict(reversed(value.items())) if isinstance(value, dict) else value
