"""Plain values as data: what a guard expects, what an output template holds.

Grammar of an encoded literal::

    literal = null | bool | int | "text" | ["f", repr] | ["c", repr, repr] | ["b", hex] | ["e"]
            | ["t"|"l"|"size", literal...] | ["set"|"frozenset", literal... sorted] | ["d", [literal, literal]...]
            | ["dtype", name] | ["device", text] | ["layout", name] | ["format", name]
            | ["slice", literal, literal, literal] | ["range", int, int, int] | ["enum", "module:Class", name]
            | ["type", "module:Class"] | ["function", "module:name", digest] | ["module", name] | ["op", name]
            | ["plain", "module:Class", repr]    a path, a date, a pattern

A device is its type alone: its index is a fact of the process, not of the program.
"""

from __future__ import annotations

import enum
import functools
import types
from typing import Any

import torch

from cgtool.errors import TraceError
from cgtool.guards import _torch as private
from cgtool.guards.code import code_digest, plain_text
from cgtool.guards.sources import canonical_module_name, qualified_name
from cgtool.plan.grammar import canonical_json

Json = Any

_CONTAINERS: dict[Any, str] = {tuple: "t", list: "l", torch.Size: "size"}


class NoRuleError(TraceError):
    """A live object that cannot be written down as data."""


def encode_literal(value: Any) -> Json:
    """Return `value` as data; equal values, and only those, give equal data.

    Raises:
        NoRuleError: There is no rule for this type.
    """
    if value is None or type(value) in {bool, int, str}:
        return value
    kind = type(value)
    if kind in _CONTAINERS:
        return [_CONTAINERS[kind], *map(encode_literal, value)]
    if kind in {set, frozenset}:
        return [kind.__name__, *sorted(map(encode_literal, value), key=canonical_json)]
    if isinstance(value, dict) and kind.__module__ in {"builtins", "collections"}:
        return ["d", *([encode_literal(key), encode_literal(item)] for key, item in value.items())]
    scalar = _scalar(value)
    return scalar if scalar is not None else _object(value)


def _scalar(value: Any) -> Json:
    kind = type(value)
    if kind is float:
        return ["f", repr(value)]
    if kind is complex:
        return ["c", repr(value.real), repr(value.imag)]
    if kind is bytes:
        return ["b", value.hex()]
    if value is Ellipsis:
        return ["e"]
    if kind is slice:
        return ["slice", encode_literal(value.start), encode_literal(value.stop), encode_literal(value.step)]
    if kind is range:
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, enum.Enum):
        return ["enum", qualified_name(kind), value.name]
    return _torch_scalar(value)


def _torch_scalar(value: Any) -> Json:
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", value.type]
    if isinstance(value, torch.layout):
        return ["layout", str(value).removeprefix("torch.")]
    if isinstance(value, torch.memory_format):
        return ["format", str(value).removeprefix("torch.")]
    return None


def _object(value: Any) -> Json:
    if isinstance(value, type):
        return ["type", qualified_name(value)]
    if isinstance(value, types.ModuleType):
        return ["module", canonical_module_name(value.__name__)]
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return ["function", qualified_name(value), code_digest(value)]
    if isinstance(value, property) and value.fget is not None:
        return ["function", qualified_name(value.fget), code_digest(value.fget)]
    if isinstance(value, functools.cached_property):
        return ["function", qualified_name(value.func), code_digest(value.func)]
    if isinstance(value, types.CodeType):
        return ["function", value.co_qualname, code_digest(value)]
    if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return ["function", _builtin_name(value), ""]
    if private.is_op(value):
        return ["op", str(value)]
    text = plain_text(value)
    if text is not None:
        return ["plain", qualified_name(type(value)), text]
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None and callable(value):
        return ["function", qualified_name(wrapped), code_digest(getattr(wrapped, "__func__", wrapped))]
    msg = f"A value of type {qualified_name(type(value))} cannot be written down as data."
    raise NoRuleError(msg, actual=qualified_name(type(value)))


def _builtin_name(value: Any) -> str:
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    if isinstance(owner, type):
        return f"{canonical_module_name(owner.__module__)}:{owner.__qualname__}.{value.__name__}"
    module = getattr(value, "__module__", None) or (owner.__name__ if isinstance(owner, types.ModuleType) else "")
    return f"{module}:{value.__name__}"
