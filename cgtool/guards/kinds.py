"""Kinds of guards: what is looked at in an object, and how it is said when it changed.

A guard is (source, kind, expected) and holds when `describe(kind, resolve(source)) == expected`. The same function
writes a guard and checks it, so the two cannot drift apart. Kinds::

    value              the object as a literal (see `literals.py`)
    type               its class, by qualified name
    length             [class, number of elements]
    keys               the keys of a dict, in order
    empty              whether it has no elements
    hooks              how many hooks a module has
    contains:<json>    whether that key is in it
    hasattr:<name>     whether it has the attribute
    absent:<name>      whether its instance dict has no such name
    tensor             [class, dtype, shape, stride, device type]
    same:<source>      whether it is the very object that another source names
    apart:<source>     whether two tensors share no memory
    requires_grad      whether a tensor requires grad
    code               the digest of a function's code
    ops                what the compiler believes of a custom op, see `ops.py`
    state              global state of torch, see `state.py`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from cgtool.errors import GuardError
from cgtool.guards import state
from cgtool.guards.code import code_digest
from cgtool.guards.literals import NoRuleError, encode_literal
from cgtool.guards.names import qualified_name
from cgtool.guards.sources import Roots, parse_source
from cgtool.plan import Guard
from cgtool.records import dataclass
from cgtool.words import source_words, spell

Json = Any

#: Where a module keeps its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def describe(kind: str, value: Any) -> Json:
    """Return what a guard of that kind sees in `value`.

    Raises:
        NoRuleError: The value cannot be written down as data.
        GuardError: There is no such kind.
    """
    word, _, argument = kind.partition(":")
    if word in _WITH_ARGUMENT:
        return _WITH_ARGUMENT[word](value, argument)
    if word not in _PLAIN:
        msg = f"The plan holds a guard of the unknown kind {kind!r}; it was written by another version of cgtool."
        raise GuardError(msg, actual=kind)
    return _PLAIN[word](value)


def _length(value: Any) -> Json:
    try:
        return [qualified_name(type(value)), len(value)]
    except TypeError:
        return [qualified_name(type(value)), value.__length_hint__()]


def _tensor(value: Any) -> Json:
    return [
        qualified_name(type(value)),
        str(value.dtype).removeprefix("torch."),
        list(value.shape),
        list(value.stride()),
        value.device.type,
    ]


def _contains(value: Any, key: str) -> Json:
    return _plain_key(json.loads(key)) in value


def _plain_key(key: Json) -> Any:
    return tuple(map(_plain_key, key[1:])) if isinstance(key, list) and key[:1] == ["t"] else key


_PLAIN: dict[str, Callable[[Any], Json]] = {
    "value": encode_literal,
    "type": lambda value: qualified_name(type(value)),
    "length": _length,
    "keys": lambda value: [encode_literal(key) for key in value],
    "empty": lambda value: len(value) == 0,
    "hooks": lambda module: sum(len(vars(module).get(name) or ()) for name in HOOKS),
    "tensor": _tensor,
    "requires_grad": lambda tensor: tensor.requires_grad,
    "code": lambda value: code_digest(getattr(getattr(value, "__func__", value), "__code__", value)),
}
_WITH_ARGUMENT: dict[str, Callable[[Any, str], Json]] = {
    "contains": _contains,
    "hasattr": hasattr,
    "absent": lambda value, name: name not in getattr(value, "__dict__", {}),
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A guard that does not hold, and what is there instead (`actual` None when it could not be looked at)."""

    guard: Guard
    actual: Json
    sentence: str


def evaluate(guard: Guard, roots: Roots) -> Json:
    """Return what `guard` sees now.

    Raises:
        SourceError: Its source is gone.
        NoRuleError: What is there now cannot be written down.
    """
    source = parse_source(guard.source)
    if source.root == "state":
        return state.current(source.names[0])
    if guard.kind.startswith("same:"):
        return roots.resolve(source) is roots.resolve(guard.kind.removeprefix("same:"))
    if guard.kind.startswith("apart:"):
        return are_apart(roots.resolve(source), roots.resolve(guard.kind.removeprefix("apart:")))
    return describe(guard.kind, roots.resolve(source))


def _looked_at(guard: Guard, roots: Roots) -> Json:
    try:
        return evaluate(guard, roots)
    except (GuardError, NoRuleError):
        raise
    except Exception as error:  # None has no shape, a number has no length
        now = qualified_name(type(roots.resolve(guard.source)))
        name = source_words(guard.source)
        msg = f"{name} is of type {now} now, and was of another make when this was compiled ({error})."
        raise GuardError(msg, actual=now) from error


def are_apart(one: Any, other: Any) -> bool:
    """Return whether two tensors have storages of their own; views of one storage are not apart, overlapping or not."""
    return bool(one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr())


def check(guards: Iterable[Guard], roots: Roots) -> list[Failure]:
    """Return the guards that do not hold now, in order; an empty list means that all hold."""
    failures: list[Failure] = []
    for guard in guards:
        try:
            actual = _looked_at(guard, roots)
        except (GuardError, NoRuleError) as error:
            failures.append(Failure(guard=guard, actual=None, sentence=str(error)))
            continue
        if not same(actual, guard.expected):
            failures.append(Failure(guard=guard, actual=actual, sentence=sentence(guard, actual)))
    return failures


def same(one: Json, other: Json) -> bool:
    """Return whether two descriptions are equal as data: `True` is not `1`."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def sentence(guard: Guard, actual: Json) -> str:
    """Say what a guard expected and what is there now: 'layers.0.eps was 1e-06 when this was compiled ...'."""
    name = source_words(guard.source)
    word, _, argument = guard.kind.partition(":")
    if word == "hasattr":
        return f"{name} {_had(was=guard.expected)} an attribute {argument} when this was compiled; now it is otherwise."
    if word == "absent":
        return f"{name}.{argument} was {'not ' * bool(guard.expected)}set on the object itself when this was compiled."
    if word == "contains":
        return f"{name} {_had(was=guard.expected)} the key {argument} when this was compiled; now it is otherwise."
    if word == "empty":
        return f"{name} was {'empty' if guard.expected else 'not empty'} when this was compiled; now it is otherwise."
    if word == "same":
        other = source_words(argument)
        return f"{name} and {other} were {'one object' if guard.expected else 'two objects'} when this was compiled."
    if word == "apart":
        had = "memory of their own" if guard.expected else "one memory"
        return f"{name} and {source_words(argument)} had {had} when this was compiled, and one of them is written to."
    if word == "hooks":
        return f"{name} had {guard.expected or 'no'} hooks when this was compiled and has {actual} now."
    if word == "requires_grad":
        did = "required" if guard.expected else "did not require"
        return f"{name} {did} grad when this was compiled; now it is otherwise."
    if word == "code":
        return f"The code of {name} is not what was compiled."
    return f"{name} was {_say(word, guard.expected)} when this was compiled and is {_say(word, actual)} now."


def _had(*, was: bool) -> str:
    return "had" if was else "did not have"


def _say(word: str, data: Json) -> str:
    if word == "type":
        return f"of type {data}"
    if word == "length":
        return f"of type {data[0]} with {data[1]} elements"
    if word == "keys":
        return "a dict with the keys " + ", ".join(map(spell, data))
    if word == "tensor":
        return f"a {data[1]} tensor of shape {tuple(data[2])} and strides {tuple(data[3])} on {data[4]}"
    return spell(data) if word == "value" else str(data)
