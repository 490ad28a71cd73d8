"""What a walk through a model needs to know of an object before it looks into it: by its class, and by its source."""

from __future__ import annotations

import enum
import types
from typing import Any

import torch
from torch import nn

from cgtool.guards.code import is_platform_code

#: Modules that Dynamo traces in the place of others, or that only a process that traces imports; and the namespaces of
#: ops, which hold what was asked for so far and are no modules that can be found again.
_PASSED_BY = ("torch._dynamo.", "torch._inductor.", "torch.fx.", "sympy.", "torch.ops.")
_IMMUTABLE = (tuple, str, bytes, int, float, complex, frozenset, range, slice, type(None), type(Ellipsis))

#: Where classes come from whose objects are their values: DTensor keeps the first one of several that are equal.
_VALUES = frozenset(
    {
        "torch.distributed.device_mesh",
        "torch.distributed.tensor._dtensor_spec",
        "torch.distributed.tensor.placement_types",
    }
)


def is_of_call(source: str) -> bool:
    """Return whether a source names a part of a call."""
    return source.startswith("arg:")


def is_passed_by(module: str) -> bool:
    """Return whether the walk leaves a module out."""
    return f"{module}.".startswith(_PASSED_BY)


def has_identity(value: Any) -> bool:
    """Return whether it can matter that two names lead to one object: immutable builtins are equal or not, no more."""
    if isinstance(value, (*_IMMUTABLE, enum.Enum, type, types.ModuleType, types.MethodType, types.FunctionType)):
        return False
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return False
    if type(value).__module__ in _VALUES:
        return False
    return not callable(value) or isinstance(value, nn.Module) or not is_platform_code(type(value))


def is_held(member: Any) -> bool:
    """Return whether a member of a class is, or holds in its defaults and closure, an object that code can ask."""
    if isinstance(member, types.FunctionType):
        return True
    return not hasattr(type(member), "__get__") and not isinstance(member, _IMMUTABLE)


def is_computed(cls: type, name: str) -> bool:
    """Return whether reading an attribute runs code of its class, whatever the object itself holds under that name."""
    for owner in cls.__mro__:
        if name in vars(owner):
            member = type(vars(owner)[name])
            return hasattr(member, "__set__") and member is not types.MemberDescriptorType
    return False
