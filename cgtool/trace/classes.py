"""The methods that a trace may have called, as guards on the classes of the live objects.

Dynamo takes the methods of a class as given, and so has no guard on them. A guard on each function by its qualified
name (`cgtool.trace.files`) does not see a class whose attribute is another function now, which is how people patch a
model.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from torch import nn

from cgtool.guards.kinds import describe
from cgtool.guards.literals import NoRuleError
from cgtool.guards.sources import Roots, SourceError
from cgtool.plan import Guard

#: Classes whose methods cannot be replaced, or come with the versions of Python and torch.
_GIVEN = frozenset({"builtins", "collections", "typing", "enum", "_thread", "torch"})
_ALWAYS_CALLED = frozenset({"__call__", "forward"})


def class_guards(guards: Iterable[Guard], roots: Roots, codes: Iterable[types.CodeType]) -> tuple[Guard, ...]:
    """Return a guard on each method that the traced code names, once for each class.

    Args:
        guards: What the trace found of the model; those of the kind "type" lead to the classes.
        roots: The live model.
        codes: The code that the trace went through.
    """
    names = sorted({name for code in codes for name in code.co_names} | _ALWAYS_CALLED)
    found: list[Guard] = []
    seen: set[type] = set()
    for source in ("self", *(guard.source for guard in guards if guard.kind == "type")):
        try:
            kind = type(roots.resolve(source))
        except SourceError:
            continue
        if kind in seen or not _is_watched(kind):
            continue
        seen.add(kind)
        found += _methods(source, kind, names)
    return tuple(found)


def _is_watched(kind: type) -> bool:
    return issubclass(kind, nn.Module) or kind.__module__.partition(".")[0] not in _GIVEN


def _methods(source: str, kind: type, names: Iterable[str]) -> Iterator[Guard]:
    for name in names:
        if _function_of(inspect.getattr_static(kind, name, None)) is None or _is_given(kind, name):
            continue
        try:
            expected = describe("value", getattr(kind, name))
        except NoRuleError:
            continue
        yield Guard(source=f"{source}|type.{name}", kind="value", expected=expected)


def _function_of(raw: Any) -> types.FunctionType | None:
    if isinstance(raw, (staticmethod, classmethod)):
        raw = raw.__func__
    elif isinstance(raw, property):
        raw = raw.fget
    elif isinstance(raw, cached_property):
        raw = raw.func
    return raw if isinstance(raw, types.FunctionType) else None


def _is_given(kind: type, name: str) -> bool:
    """Return whether a method is what every module inherits; `__call__` is watched all the same."""
    return name != "__call__" and inspect.getattr_static(kind, name) is inspect.getattr_static(nn.Module, name, None)
