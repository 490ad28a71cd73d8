"""What a class is, member by member, as digests: equal in every process, another where an edit or a patch could show.

Counts: the bases in order, the metaclass, functions by code, defaults and closure, properties and other descriptors,
data by value, the fields of a dataclass, the members of an enum with their values, and what is registered with an ABC.
Left out: documentation and annotations, which no call reads, and what Python itself remembers in a class. A list, dict
or set of a class is often a registry that grows as modules are imported, so it counts only where code names it.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch

from cgtool.guards.code import code_digest
from cgtool.guards.names import qualified_name
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json

#: Members that tell nothing of what a class does, or whose part of it is taken from elsewhere.
_LEFT_OUT = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slotnames__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__conditional_annotations__", "__firstlineno__", "__static_attributes__"),
        *("__orig_bases__", "__parameters__", "__type_params__"),
        *("_abc_impl", "__dataclass_fields__", "__dataclass_params__", "__match_args__"),
        *("_member_map_", "_member_names_", "_value2member_map_", "_hashable_values_", "_unhashable_values_"),
        *("_unhashable_values_map_", "_generate_next_value_", "_new_member_", "_use_args_"),
    }
)
#: Hexadecimal digits of a member's digest: what is told apart are the states of one member.
_DIGITS = 16
_WHOLE_DIGITS = 64


def is_given(cls: type) -> bool:
    """Return whether a class comes with Python, torch or numpy, whose versions stand for it."""
    package = cls.__module__.partition(".")[0] if isinstance(cls.__module__, str) else ""
    return package in {"torch", "numpy"} or package in sys.stdlib_module_names


def define(cls: type, containers: Collection[str] = ()) -> Json:
    """Return [qualified name, {member: digest}] of a class as it is now.

    Args:
        cls: The class.
        containers: Names of its members that are lists, dicts or sets and count by value.
    """
    members = _members(cls, containers)
    return [qualified_name(cls), {name: _digest(told)[:_DIGITS] for name, told in members}]


def _digest(told: Json) -> str:
    return told if type(told) is str and len(told) == _WHOLE_DIGITS else digest_of(told)


def _members(cls: type, containers: Collection[str]) -> Iterator[tuple[str, Json]]:
    yield "__bases__", [qualified_name(base) for base in cls.__bases__]
    yield "__class__", qualified_name(type(cls))
    own = vars(cls)
    if "_abc_impl" in own:
        yield "register", sorted(map(qualified_name, registered(cls)))
    if "__dataclass_fields__" in own:
        yield from _dataclass(own)
    if issubclass(cls, enum.Enum):
        yield from ((name, ["member", code_digest(member.value)]) for name, member in cls.__members__.items())
    for name, value in own.items():
        if name in _LEFT_OUT or (isinstance(value, enum.Enum) and name in getattr(cls, "__members__", ())):
            continue
        if isinstance(value, (list, dict, set)) and name not in containers:
            yield name, ["container", qualified_name(type(value))]
        else:
            yield name, _member(value)


def _member(value: Any) -> Json:
    if isinstance(value, types.MemberDescriptorType):
        return ["slot"]
    kind = type(value)
    if is_given(kind) or isinstance(value, (type, torch.nn.Module)) or not hasattr(value, "__dict__"):
        return code_digest(value)
    # A descriptor of the user's, or another small object: what it holds decides what it gives.
    return ["object", qualified_name(kind), [[name, code_digest(held)] for name, held in sorted(vars(value).items())]]


def _dataclass(own: Any) -> Iterator[tuple[str, Json]]:
    for name, field in own["__dataclass_fields__"].items():
        made = [None if given is dataclasses.MISSING else code_digest(given) for given in (field.default_factory,)]
        flags = [field.init, field.repr, field.hash, field.compare, bool(field.kw_only)]
        yield f"__dataclass_fields__.{name}", ["field", code_digest(field.default), made, flags, str(field.type)]
    yield "__dataclass_params__", repr(own["__dataclass_params__"])


def registered(cls: type) -> list[type]:
    """Return the classes that were registered with an ABC: what `ABCMeta._dump_registry` prints."""
    from _abc import _get_dump  # type: ignore[import-not-found]  # the one way that CPython has

    return [found for reference in _get_dump(cls)[0] if (found := reference()) is not None]
