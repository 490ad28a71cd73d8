"""Digests of functions, classes and custom ops: equal in every process, different after an edit that could matter.

Locations are excluded on purpose: of code (file names, line numbers) and of objects (addresses, the order of sets).
Bytecode, constants, names and flags are included, and for functions their defaults and the constants in their closures.
Bytecode belongs to one version of Python, so that version is a factor of every key.

The digest of a class covers, member by member, the bases in order, the metaclass, functions by code, defaults and
closure, properties and other descriptors, data by value, the fields of a dataclass, the members of an enum with their
values, and the classes registered with an ABC. It excludes documentation and annotations, which no call reads, and
Python's own bookkeeping. A list, dict or set of a class is often a registry that grows as modules are imported, so it
is included only where code names it.

The digest of a custom op covers what the compiler relies on: its schema and its fake implementation, with the helpers
and constants of its module. The kernel is called by name and may change freely. A fake kernel in C++, and a Python
function passed to `Library.impl` under a dispatch key, cannot be inspected: only their existence is included.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec
import torch

from cgtool.errors import SplitError
from cgtool.guards import _torch as private
from cgtool.guards.sources import canonical_module_name, qualified_name
from cgtool.plan.grammar import digest_of, sha256_hex
from cgtool.plan.pieces import Json

#: Types of torch whose text is their value and contains no address.
_TORCH_CONSTANTS = frozenset({"dtype", "device", "layout", "memory_format", "Size", "OpOverload", "OpOverloadPacket"})

#: Modules whose immutable objects have a `repr` that is their value; paths live in another one in Python 3.13.
_PLAIN_MODULES = frozenset(
    {
        *("pathlib", "pathlib._local", "decimal", "fractions", "datetime", "uuid", "ipaddress"),
        "torch.distributed.tensor.placement_types",
    }
)
#: Types whose values appear as they are in a form.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})

#: The content of an object as data: plain values as they are, all others as an array that begins with its kind.
Form = Any


def code_digest(code: types.CodeType | object, *, follow_globals: bool = False) -> str:
    """Return the SHA-256 of what `code` does, as 64 hexadecimal digits.

    The digest does not depend on the process, the install path or the line in the file. A callable that is not a
    Python function (a builtin, a class, an instance) is represented by its qualified name, because its code cannot be
    inspected.

    Args:
        code: A code object, a function, a method, a `functools.partial`, or any other callable.
        follow_globals: Also include the module globals that the code names: constants by value, and Python functions
            by their own code, except those of torch and of the standard library.

    Returns:
        The digest. Objects other than constants in closures, defaults and globals are represented by the name of their
        type.
    """
    return _digest(_form(code, follow_globals=follow_globals))


def plain_text(value: Any) -> str | None:
    """Return the text of a path, a date, a pattern or an autocast region; None for anything else."""
    if isinstance(value, re.Pattern):
        return repr((value.pattern, value.flags))
    return repr(value) if type(value).__module__ in _PLAIN_MODULES else private.autocast_text(value)


def _digest(form: Form) -> str:
    return sha256_hex(_written(form))


def _written(form: Form) -> bytes:
    try:
        return msgspec.msgpack.encode(form)  # ten times faster than JSON; bytes, floats and integers stay distinct
    except (OverflowError, UnicodeEncodeError):  # an integer of more than 64 bits, a lone surrogate
        return repr(form).encode("utf-8", "surrogatepass")


def _form(value: Any, *, follow_globals: bool = False) -> Form:
    return value if type(value) in _PLAIN else _Describer(follow_globals=follow_globals).describe(value)


class _Describer:
    """Turns code and the objects that it holds into forms; tracks visited functions, which may refer to each other."""

    __slots__ = ("_follow_globals", "_seen")

    def __init__(self, *, follow_globals: bool) -> None:
        self._follow_globals = follow_globals
        self._seen: dict[int, int] = {}

    def describe(self, value: Any) -> Form:
        kind = type(value)
        if kind in _PLAIN:
            return value
        describe = _DESCRIBED.get(kind)
        return self._describe_rare(value) if describe is None else describe(self, value)

    def _describe_rare(self, value: Any) -> Form:
        if isinstance(value, Enum):
            return "enum", _type_name(value), value.name
        if isinstance(value, int):
            return type(value).__name__, int.__index__(value)
        if isinstance(value, str):
            return type(value).__name__, str.__str__(value)
        if isinstance(value, (float, complex, bytes, range, slice, types.EllipsisType)):
            return type(value).__name__, repr(value)
        if isinstance(value, functools.partial):
            return "partial", self.describe(value.func), self.describe(value.args), self.describe(value.keywords)
        if isinstance(value, (staticmethod, classmethod)):
            return type(value).__name__, self.describe(value.__func__)
        if isinstance(value, property):
            return "property", self.describe(value.fget), self.describe(value.fset), self.describe(value.fdel)
        if isinstance(value, functools.cached_property):
            return "cached_property", self.describe(value.func)
        if isinstance(value, (types.ModuleType, type)) or inspect.isroutine(value):
            return "named", _object_name(value)
        if isinstance(value, (tuple, list, dict, set, frozenset)):
            return self.container(value)
        return self._instance(value)

    def container(self, value: Any) -> Form:
        kind = type(value).__name__
        if isinstance(value, (set, frozenset)):
            # Each with its own describer, so that the iteration order of the set cannot matter.
            members = (_form(member, follow_globals=self._follow_globals) for member in value)
            return kind, sorted(map(_written, members))
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        if not isinstance(value, tuple):
            self._seen[id(value)] = len(self._seen)
        if isinstance(value, dict):
            return kind, [(self.describe(key), self.describe(item)) for key, item in value.items()]
        return kind, [self.describe(item) for item in value]

    def _instance(self, value: Any) -> Form:
        owner = type(value)
        if owner.__module__.partition(".")[0] == "torch" and owner.__name__ in _TORCH_CONSTANTS:
            return "torch", owner.__name__, str(value)
        if private.is_default_group(value):
            # Functions of torch.distributed.nn hold None where that was imported before the group was created.
            return None
        text = plain_text(value)
        if text is not None:
            return "plain", _type_name(value), text
        if is_dataclass(value) and owner.__dataclass_params__.frozen:
            return "dataclass", _type_name(value), [self.describe(getattr(value, f.name)) for f in fields(value)]
        # A decorator that returns an object: a Triton kernel keeps its Python function in `fn`.
        for attribute in ("__wrapped__", "fn"):
            inner = instance_dict(value).get(attribute)
            if isinstance(inner, types.FunctionType):
                return "wrapper", _type_name(value), self.describe(inner)
        return "object", _type_name(value)

    def method(self, method: types.MethodType) -> Form:
        return "method", _type_name(method.__self__), self.describe(method.__func__)

    def function(self, function: types.FunctionType) -> Form:
        if id(function) in self._seen:
            return "seen", self._seen[id(function)]
        self._seen[id(function)] = len(self._seen)
        return (
            "function",
            _form_of_code(function.__code__),
            self.describe(function.__defaults__),
            self.describe(function.__kwdefaults__),
            [self._cell(cell) for cell in function.__closure__ or ()],
            [(name, self._global(item)) for name, item in _globals_of(function)] if self._follow_globals else None,
        )

    def _cell(self, cell: types.CellType) -> Form:
        try:
            return self.describe(cell.cell_contents)
        except ValueError:
            return ("empty",)

    def _global(self, value: Any) -> Form:
        if isinstance(value, types.FunctionType) and _is_torch_or_stdlib(value):
            return "named", _object_name(value)
        return self.describe(value)


#: The types that are most frequent in code and classes, and how they are described.
_DESCRIBED: dict[type, Callable[[_Describer, Any], Form]] = {
    types.CodeType: lambda _, code: ("code", _form_of_code(code)),
    types.FunctionType: _Describer.function,
    types.MethodType: _Describer.method,
    **dict.fromkeys((tuple, list, dict, set, frozenset), _Describer.container),
}


def _form_of_code(code: types.CodeType) -> Form:
    return (
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        _constants(code.co_consts),
        code.co_exceptiontable,
        code.co_code,
    )


def _constants(values: tuple[Any, ...]) -> Form:
    """Encode the constants of code: tuples as arrays, and non-plain values as mappings, which no constant is."""
    if _PLAIN.issuperset(map(type, values)):
        return values
    return [value if type(value) in _PLAIN else _constant(value) for value in values]


def _constant(value: Any) -> Form:
    if isinstance(value, tuple):
        return _constants(value)
    if isinstance(value, types.CodeType):
        return {"code": _form_of_code(value)}
    if isinstance(value, frozenset):
        return {"set": sorted(map(_written, _constants(tuple(value))))}
    return {"repr": repr(value)}


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function or a function nested in it names, sorted, without builtins and attributes."""
    names: set[str] = set()
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    for name in sorted(names):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _is_torch_or_stdlib(function: types.FunctionType) -> bool:
    package = str(function.__globals__.get("__name__", "")).partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names


def _type_name(value: Any) -> str:
    return _object_name(type(value))


def _object_name(value: Any) -> str:
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__
    return f"{canonical_module_name(module)}:{name}" if isinstance(module, str) else str(name)


#: Members that do not affect what a class does, or that `_members` includes in another form.
_EXCLUDED = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slotnames__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__conditional_annotations__", "__firstlineno__", "__static_attributes__"),
        *("__orig_bases__", "__parameters__", "__type_params__"),
        *("_abc_impl", "__dataclass_fields__", "__dataclass_params__"),
        *("_member_map_", "_member_names_", "_value2member_map_", "_hashable_values_", "_unhashable_values_"),
        *("_unhashable_values_map_", "_generate_next_value_", "_new_member_", "_use_args_"),
        # what transformers caches about the source of a model's module, which is a factor of the key
        *("_can_set_attn_implementation_cached_value", "_can_set_experts_implementation_cached_value"),
    }
)
#: Hexadecimal digits of a member's digest; it only has to distinguish the versions of one member.
_DIGITS = 16


def is_platform_code(cls: type | types.FunctionType) -> bool:
    """Return whether a class or a function ships with Python, torch or NumPy, so that their versions cover it."""
    package = cls.__module__.partition(".")[0] if isinstance(cls.__module__, str) else ""
    return package in {"torch", "numpy"} or package in sys.stdlib_module_names


def holds(value: Any, name: str) -> bool:
    """Return whether an object has an attribute without its class's `__getattr__`, which may raise any error."""
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def instance_dict(value: Any) -> Mapping[str, Any]:
    """Return the `__dict__` of an object; empty if it has none."""
    return vars(value) if holds(value, "__dict__") else {}


def define(cls: type, read: Collection[str] = ()) -> Json:
    """Return [qualified name, {member: digest}] of a class as it is now.

    Args:
        cls: The class.
        read: Names to include although they are containers (lists, dicts, sets), its name or its documentation.
    """
    members = _members(cls, read)
    return [qualified_name(cls), {name: _digest(form)[:_DIGITS] for name, form in members}]


def _members(cls: type, read: Collection[str]) -> Iterator[tuple[str, Form]]:
    yield from ((name, _form(getattr(cls, name))) for name in ("__name__", "__doc__") if name in read)
    yield "__bases__", [qualified_name(base) for base in cls.__bases__]
    yield "__class__", qualified_name(type(cls))
    own = vars(cls)
    if "_abc_impl" in own:
        yield "register", sorted(map(qualified_name, registered(cls)))
    if "__dataclass_fields__" in own:
        yield from _dataclass(own)
    members = cls.__members__ if issubclass(cls, enum.Enum) else {}
    yield from ((name, ("member", _form(member.value))) for name, member in members.items())
    for name, value in own.items():
        if name in _EXCLUDED or (name in members and isinstance(value, enum.Enum)) or _is_salted(name, value):
            continue
        kind = type(value)
        if kind in _PLAIN or kind in _COMMON_MEMBERS:
            yield name, _form(value)
        elif isinstance(value, (list, dict, set)) and name not in read:
            yield name, ("container", qualified_name(kind))
        else:
            yield name, _member(value)


def _is_salted(name: str, member: Any) -> bool:
    """Return whether a member is the `__hash__` that attrs generates: its code has a number of this process."""
    return (
        name == "__hash__" and isinstance(member, types.FunctionType) and member.__code__.co_filename.startswith(_ATTRS)
    )


#: The beginning of the file name of code that attrs generates.
_ATTRS = "<attrs generated "
#: The types of most class members.
_COMMON_MEMBERS = frozenset({types.FunctionType, property, classmethod, staticmethod})


def _member(value: Any) -> Form:
    if isinstance(value, types.MemberDescriptorType):
        return ("slot",)
    kind = type(value)
    if is_platform_code(kind) or isinstance(value, (type, torch.nn.Module)) or not holds(value, "__dict__"):
        return _form(value)
    # A user's descriptor or another small object: its attributes determine what it returns.
    return "object", qualified_name(kind), [(name, _form(held)) for name, held in sorted(vars(value).items())]


def _dataclass(own: Any) -> Iterator[tuple[str, Form]]:
    for name, field in own["__dataclass_fields__"].items():
        factory = field.default_factory
        default_factory = ("none",) if factory is dataclasses.MISSING else _form(factory)
        flags = (field.init, field.repr, field.hash, field.compare, bool(field.kw_only))
        yield f"__dataclass_fields__.{name}", (_form(field.default), default_factory, flags, str(field.type))
    yield "__dataclass_params__", repr(own["__dataclass_params__"])


def registered(cls: type) -> list[type]:
    """Return the classes registered with an ABC, which `ABCMeta._dump_registry` prints."""
    from _abc import _get_dump  # type: ignore[import-not-found]  # CPython offers no other way

    return [found for reference in _get_dump(cls)[0] if (found := reference()) is not None]


_KEYS = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")


def is_composite(name: str) -> bool:
    """Return whether a compiler decomposes the op `ns::op.overload` into the ops that its kernel calls."""
    op = private.find_op(name)
    return op is not None and private.has_kernel(op, "CompositeImplicitAutograd")


def op_digest(name: str) -> str:
    """Return the SHA-256 of what the compiler relies on of an op, as 64 hexadecimal digits.

    Args:
        name: `ns::op.overload`, or `ns::op` for its default overload.

    Raises:
        SplitError: No imported library provides the op.
    """
    op = private.find_op(name)
    if op is None:
        raise SplitError(f"no imported library provides the op {name}; import the one that does", expected=name)
    fake = private.fake_implementation(op)
    return digest_of(
        {
            "schema": str(private.schema_of(op)),
            "tags": sorted(str(tag) for tag in op.tags),
            "fake": None if fake is None else code_digest(fake, follow_globals=True),
            "kernels": [key for key in _KEYS if private.has_kernel(op, key)],
            "python": {
                key: code_digest(function, follow_globals=True)
                for key, function in sorted(private.python_kernels(op).items())
            },
        }
    )
