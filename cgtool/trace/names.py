"""The names in code, as identifiers and in its strings, and what code with these names may do."""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import inspect
import itertools
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cgtool.guards.code import is_platform_code
from cgtool.trace.sources import TABLES

#: Longer strings are prose and not searched for names.
_MAX_LENGTH = 80
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Names by which code enumerates an object's attributes.
_ENUMERATORS = frozenset(
    {
        *("vars", "dir", "__dict__", "__slots__", "__getstate__", "__reduce_ex__", "getmembers", "getmembers_static"),
        *("asdict", "astuple", "fields", "replace", "copy", "deepcopy"),
    }
)
#: Names by which code compares identities, besides `is`, `in` and sets.
_IDENTITY = frozenset({"id", "is_", "is_not", "contains", "set", "frozenset", "fromkeys", "index", "count", "remove"})
#: What libraries keep in their configs and compute nothing from: the path of a checkpoint, and in diffusers the
#: arguments that were left at their defaults, in an order that differs between processes.
_RECORDS = {
    "transformers": frozenset({"name_or_path", "_name_or_path"}),
    "diffusers": frozenset({"_name_or_path", "_use_default_values"}),
}
#: The names in code of a library that do not count: of its records, and of the tables that it fills at their first use.
_IGNORED = {
    package: _RECORDS.get(package, frozenset()) | {name for module, name in TABLES if module.startswith(f"{package}.")}
    for package in ("transformers", "diffusers", "einops")
}
#: Methods of a metaclass that run only while a class is created or changed, which a trace must not do.
_CLASS_CREATION = frozenset({"__prepare__", "__new__", "__init__", "__setattr__", "__delattr__"})
_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "IMPORT_NAME", "IMPORT_FROM"})
_IDENTITY_OPS = frozenset({"CONTAINS_OP", "BUILD_SET", "SET_ADD", "SET_UPDATE"})


def names_in(codes: Iterable[types.CodeType]) -> frozenset[str]:
    """Return every name in `codes` and in the code nested in them."""
    found: set[str] = set()
    for code in codes:
        found |= _names_of(code)
    return frozenset(found)


def globals_in(codes: Iterable[types.CodeType]) -> frozenset[str]:
    """Return every name by which `codes`, and the code nested in them, may read a global; attribute names are not."""
    found: set[str] = set()
    for code in codes:
        found.update(op.argval for op in dis.get_instructions(code) if op.opname in _GLOBAL_OPS)
        found |= _names_in_strings(code)
        found |= globals_in(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(found)


def _names_in_strings(code: types.CodeType) -> set[str]:
    found: set[str] = set()
    for text in _strings(code.co_consts):
        if len(text) <= _MAX_LENGTH and "\n" not in text:
            found.add(text)
            if " " not in text:
                found.update(_IDENTIFIER.findall(text))
    return found


def _names_of(code: types.CodeType) -> set[str]:
    found = set(code.co_names) | _names_in_strings(code)
    found |= names_in(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    for package, ignored in _IGNORED.items():
        if not found.isdisjoint(ignored) and _is_of(package, code.co_filename):
            found -= ignored
    if code is inspect.unwrap.__code__:  # reads it only to bound a loop, and Inductor raises the process's limit
        found.discard("getrecursionlimit")
    return found


def _is_of(package: str, file: str) -> bool:
    init = getattr(sys.modules.get(package), "__file__", None)
    return init is not None and file.startswith(f"{Path(init).parent}/")


def records_of(cls: type) -> frozenset[str]:
    """Return the names under which a library's config of this class keeps what nothing is computed from."""
    packages = {owner.__module__.partition(".")[0] for owner in cls.__mro__}
    return frozenset().union(*(records for package, records in _RECORDS.items() if package in packages))


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _strings(constant)


def called_by_python(classes: Iterable[type]) -> Iterator[types.CodeType]:
    """Yield the special methods of classes, which Python calls for operators and formats without a trace."""
    for cls in classes:
        for name, member in () if is_platform_code(cls) else vars(cls).items():
            is_special = name.startswith("__") and name != "__init__" and not _creates_classes(cls, name)
            if is_special and isinstance(member, types.FunctionType):
                yield member.__code__


def never_traced(classes: Collection[type], names: Collection[str]) -> Iterator[types.CodeType]:
    """Yield the methods that Python runs untraced during a trace, and the functions that they call.

    Python formats, compares and looks up enum members, which are constants to Dynamo, and it evaluates `isinstance` and
    `issubclass` through metaclasses and hooks. Methods of other visited classes count if these functions name them.

    Args:
        classes: The visited classes.
        names: The names in traced code.
    """
    own = [cls for cls in classes if not is_platform_code(cls)]
    pending = [
        function
        for cls in own
        for name, member in vars(cls).items()
        if _is_never_traced(cls, name, member, names)
        for function in _functions_of(member)
    ]
    seen: set[types.FunctionType] = set()
    while pending:
        function = pending.pop()
        if function in seen or is_platform_code(function):
            continue
        seen.add(function)
        yield function.__code__
        called = names_in((function.__code__,))
        held = [space[name] for space in _spaces(function, called, own) for name in called.intersection(space)]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                held.append(cell.cell_contents)
        pending += [found for value in held for found in _functions_of(value)]


def _is_never_traced(cls: type, name: str, member: Any, names: Collection[str]) -> bool:
    if name == "__subclasshook__" or issubclass(cls, enum.Enum):
        return True
    if not issubclass(cls, type) or _creates_classes(cls, name):
        return False
    if isinstance(member, (types.FunctionType, staticmethod, classmethod)):
        return name.startswith("__")
    return name in names  # a property of the class


def _creates_classes(cls: type, name: str) -> bool:
    return issubclass(cls, type) and name in _CLASS_CREATION


def _spaces(
    function: types.FunctionType, names: frozenset[str], classes: Iterable[type]
) -> Iterator[Mapping[str, Any]]:
    """Yield the namespaces in which a function may look up names."""
    space = function.__globals__
    yield space
    for name in names.intersection(space):
        if isinstance(space[name], types.ModuleType):
            yield vars(space[name])
    yield from map(vars, classes)


def _functions_of(value: Any) -> list[types.FunctionType]:
    """Return the Python functions that run when a value is called, or read from a class."""
    if isinstance(value, types.FunctionType):
        return [value]
    if isinstance(value, (types.MethodType, classmethod, staticmethod)):
        return _functions_of(value.__func__)
    if isinstance(value, (functools.partial, functools.cached_property)):
        return _functions_of(value.func)
    if isinstance(value, property):
        return _functions_of(value.fget)
    cls, method = (value, "__init__") if isinstance(value, type) else (type(value), "__call__")
    return [] if is_platform_code(cls) else _functions_of(vars(cls).get(method))


def enumerates(names: frozenset[str]) -> bool:
    """Return whether code with these names may enumerate an object's attributes."""
    return not _ENUMERATORS.isdisjoint(names)


def compares_objects(names: frozenset[str], codes: Iterable[types.CodeType]) -> bool:
    """Return whether code with these names may compare the identities of objects."""
    return not _IDENTITY.isdisjoint(names) or any(map(_compares_identities, codes))


def _compares_identities(code: types.CodeType) -> bool:
    """Return whether the code compares identities of objects other than None."""
    pairs = itertools.pairwise(dis.get_instructions(code))
    return any(
        op.opname in _IDENTITY_OPS or (op.opname == "IS_OP" and before.opname != "LOAD_CONST") for before, op in pairs
    )
