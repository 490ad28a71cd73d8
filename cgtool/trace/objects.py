"""Classifies objects for the walk through a model, by their class and by their source."""

from __future__ import annotations

import enum
import types
from typing import Any

import torch
from torch import nn

from cgtool.guards.code import is_platform_code

#: Modules that Dynamo substitutes for others or that only a tracing process imports; and the namespaces of ops, which
#: contain only the ops looked up so far and cannot be found again as modules.
_SKIPPED_MODULES = ("torch._dynamo.", "torch._inductor.", "torch.fx.", "sympy.", "torch.ops.")
_IMMUTABLE = (tuple, str, bytes, int, float, complex, frozenset, range, slice, type(None), type(Ellipsis))

#: Modules of classes whose objects are interchangeable when equal: DTensor keeps the first of several equal objects.
_VALUE_MODULES = frozenset(
    {
        "torch.distributed.device_mesh",
        "torch.distributed.tensor._dtensor_spec",
        "torch.distributed.tensor.placement_types",
    }
)


def is_of_call(source: str) -> bool:
    """Return whether a source belongs to a call's arguments."""
    return source.startswith("arg:")


def is_skipped_module(module: str) -> bool:
    """Return whether the walk skips a module."""
    return f"{module}.".startswith(_SKIPPED_MODULES)


def has_identity(value: Any) -> bool:
    """Return whether the identity of an object can matter; of immutable builtins only the value does."""
    if isinstance(value, (*_IMMUTABLE, enum.Enum, type, types.ModuleType, types.MethodType, types.FunctionType)):
        return False
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return False
    if type(value).__module__ in _VALUE_MODULES:
        return False
    return not callable(value) or isinstance(value, nn.Module) or not is_platform_code(type(value))


def is_held(member: Any) -> bool:
    """Return whether a class member is an object that code can inspect, or a function, whose closure may hold one."""
    if isinstance(member, types.FunctionType):
        return True
    return not hasattr(type(member), "__get__") and not isinstance(member, _IMMUTABLE)


def is_computed(cls: type, name: str) -> bool:
    """Return whether reading an attribute runs a data descriptor of the class, regardless of the object's own dict."""
    for owner in cls.__mro__:
        if name in vars(owner):
            member = type(vars(owner)[name])
            return hasattr(member, "__set__") and member is not types.MemberDescriptorType
    return False
