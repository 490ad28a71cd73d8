"""Checks all guards of a plan at once: the fast path in front of `cgtool.guards.kinds.check`.

A table groups the guards that expect the same of many objects, so each object is looked up once and each value is
compared without building a record or a message. A group that does not hold, or that cannot be evaluated here, goes
through `check`, which decides and writes the message.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

from torch import nn

from cgtool.guards.kinds import HOOKS, Failure, check, describe, equal_json, named, names_of
from cgtool.guards.sources import Roots, apply_accessor, parse_accessor, qualified_name
from cgtool.plan.pieces import Json
from cgtool.plan.records import Guard, GuardGroup, GuardTable, Texts


def failures_of(guards: Iterable[Sequence[Guard]], roots: Roots) -> list[Failure]:
    """Return the guards that do not hold now, each once, from the guards of several variants."""
    slow: dict[tuple[str, str, str], Guard] = {}
    tables: dict[int, tuple[Texts, dict[int, GuardGroup]]] = {}
    for of_variant in guards:
        if isinstance(of_variant, GuardTable):
            _, groups = tables.setdefault(id(of_variant.texts), (of_variant.texts, {}))
            groups.update({id(group): group for group in of_variant.groups})
        else:
            slow.update({(g.source, g.kind, repr(g.expected)): g for g in of_variant})
    for texts, groups in tables.values():
        doubtful = _Checker(texts, roots).doubtful(groups.values())
        slow.update({(g.source, g.kind, repr(g.expected)): g for g in GuardTable(texts, doubtful)})
    # A changed class or type explains more than the failures that follow from it.
    return sorted(check(slow.values(), roots), key=lambda failure: failure.guard.kind.partition(":")[0] not in _FIRST)


#: Kinds of guards whose failures are reported first.
_FIRST = ("class", "type")
_hooks_of = operator.itemgetter(*HOOKS)


class _Checker:
    """Evaluates the guards of one table; caches the objects and their descriptions."""

    def __init__(self, texts: Texts, roots: Roots) -> None:
        self._texts = texts
        self._roots = roots
        self._objects: dict[int, Any] = {}
        self._steps: dict[str, Callable[[Any], Any] | None] = {}
        self._described: dict[tuple[str, int], Json] = {}
        self._class_names: dict[type, str] = {}

    def doubtful(self, groups: Iterable[GuardGroup]) -> list[GuardGroup]:
        """Return the groups that `check` has to decide: those that do not hold or cannot be evaluated here."""
        return [group for group in groups if not self._holds(group)]

    def _holds(self, group: GuardGroup) -> bool:
        try:
            return self._group_holds(group)
        except Exception:  # noqa: BLE001 - `check` explains objects that cannot be evaluated, whatever the reason
            return False

    def _group_holds(self, group: GuardGroup) -> bool:
        objects = self._objects
        look_up = self._look_up
        values = [objects[source] if source in objects else look_up(source) for source in group.sources]
        word, _, argument = group.kind.partition(":")
        if word == "same":
            other = self._roots.resolve(argument)
            return all((value is other) is group.expected for value in values)
        quick = _QUICK.get(word)
        if quick is not None:
            return quick(self, values, argument, group.expected)
        return self._all_described(group.kind, values, group.expected)

    def _look_up(self, source: int) -> Any:
        """Return the object of a source: a part of the object that the source's prefix resolves to."""
        texts, objects, steps = self._texts, self._objects, self._steps
        parent, end = texts.parents[source], texts.ends[source]
        if end not in steps:
            steps[end] = _step(end)
        step = steps[end]
        if parent < 0 or step is None or texts.whole[source].startswith("module:"):
            value = self._root(texts.whole[source])
        else:
            value = step(objects[parent] if parent in objects else self._look_up(parent))
        objects[source] = value
        return value

    def _root(self, text: str) -> Any:
        """Return the object of a source without accessors; modules and their globals are found without parsing."""
        word, _, rest = text.partition(":")
        module, _, name = rest.partition(":")
        if word == "global" and module in sys.modules and name.isidentifier():
            return vars(sys.modules[module])[name]
        return sys.modules[rest] if word == "module" and rest in sys.modules else self._roots.resolve(text)

    def _all_described(self, kind: str, values: Iterable[Any], expected: Json) -> bool:
        """Return whether each value is as expected; a value that several sources share is described once."""
        described = self._described
        for value in values:
            key = kind, id(value)
            if key not in described:
                described[key] = describe(kind, value)
            if not equal_json(described[key], expected):
                return False
        return True

    def types(self, values: Iterable[Any], _argument: str, expected: Json) -> bool:
        names = self._class_names
        for cls in {type(value) for value in values}:
            if cls not in names:
                names[cls] = qualified_name(cls)
            if names[cls] != expected:
                return False
        return True

    def values(self, values: Sequence[Any], _argument: str, expected: Json) -> bool:
        kind = type(expected)
        if expected is None or kind in (bool, int, str):
            return all(type(value) is kind and value == expected for value in values)
        return self._all_described("value", values, expected)

    def absent(self, values: Iterable[Any], name: str, expected: Json) -> bool:
        return all((name not in value.__dict__) is expected for value in values)

    def distinct(self, values: Sequence[Any], _argument: str, _expected: Json) -> bool:
        return len(set(map(id, values))) == len(values)

    def named(self, values: Sequence[Any], argument: str, expected: Json) -> bool:
        names, present = names_of(argument), set(expected)
        known: set[tuple[str, ...]] = set()
        for value in values:
            if isinstance(value, nn.Module):
                own = value.__dict__
                held = (*own, *own["_parameters"], *own["_buffers"], *own["_modules"])
            elif type(value) is FunctionType:
                held = (*value.__dict__,)
            else:
                held = (*named(value, names),)
            if held not in known and names.intersection(held) != present:
                return False
            known.add(held)
        return True

    def hooks(self, values: Sequence[Any], _argument: str, expected: Json) -> bool:
        if expected != 0 or not all(isinstance(value, nn.Module) for value in values):
            return self._all_described("hooks", values, expected)
        return not any(any(_hooks_of(vars(value))) for value in values)


def _step(end: str) -> Callable[[Any], Any] | None:
    """Return a function that applies the accessor that `end` spells, or None if it spells something else."""
    accessor = parse_accessor(end)
    if accessor is None:
        return None
    if accessor.word == "attr":
        return operator.attrgetter(str(accessor.key))  # the grammar keeps dots out of it
    return functools.partial(apply_accessor, accessor=accessor)


_QUICK: dict[str, Callable[[_Checker, list[Any], str, Json], bool]] = {
    "type": _Checker.types,
    "value": _Checker.values,
    "absent": _Checker.absent,
    "hooks": _Checker.hooks,
    "distinct": _Checker.distinct,
    "named": _Checker.named,
}
