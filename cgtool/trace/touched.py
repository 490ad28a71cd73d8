"""Guards on everything that a trace could have read. Dynamo guards less: it folds much of what it reads.

The walk starts from the model, the sources of Dynamo's guards and the globals of traced code, and follows every name in
traced code, as a name or a string, on every object. It guards plain data by value, classes by definition, which of
those names each object has, and which objects are identical. A superfluous guard costs a trace when its value changes;
a missing one costs a wrong answer.
"""

from __future__ import annotations

import abc
import argparse
import builtins
import collections
import contextlib
import enum
import functools
import inspect
import itertools
import json
import operator
import re
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cgtool.errors import TraceError
from cgtool.guards.code import holds, is_platform_code
from cgtool.guards.kinds import NoRuleError, describe, encode_literal, own_attributes
from cgtool.guards.sources import (
    Roots,
    SourceError,
    canonical_module_name,
    parse_source,
    qualified_name,
    stored_keys,
    stored_values,
)
from cgtool.guards.transformers import PROBES
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json
from cgtool.plan.records import Guard
from cgtool.trace.closure import is_covered_by_versions, is_installed, module_of, modules_by_file
from cgtool.trace.names import called_by_python, enumerates, globals_in, names_in, never_traced, records_of
from cgtool.trace.objects import has_identity, is_computed, is_held, is_of_call, is_skipped_module
from cgtool.trace.variables_read import refuse_alias

#: A container with more elements than this is guarded by its digest, or by its length if it has none.
_MAX_ELEMENTS = 256
#: Attribute names that a source can spell.
_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
#: Internal attributes of `nn.Module`: hooks have their own guards, and parts are found by their names.
_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
#: Modules covered by their version: the names that the model reads there are guarded, but the walk goes no further.
_PLATFORM_MODULES = frozenset({"torch", "numpy", *sys.stdlib_module_names})
#: Names of functions and classes, which older versions of Dynamo read without a guard.
_NAME_ATTRIBUTES = ("__name__", "__qualname__", "__module__", "__doc__")
#: Caches in which an enum flag keeps the combinations of its members created so far.
_FLAG_CACHES = frozenset({"_value2member_map_", "_member_map_", "_member_names_"})
#: Globals that describe where a module is and how it was loaded.
_MODULE_METADATA = frozenset(vars(types.ModuleType(""))) | {"__builtins__", "__cached__", "__file__", "__path__"}
#: Functions marked as constants whose results follow from the version of torch, which is a factor of the key.
_DETERMINED_BY_VERSION = frozenset(
    f"{PROBES}:{name}" for name in ("is_torch_greater_or_equal", "is_torch_less_or_equal", "get_torch_version")
)
#: Classes of the standard library whose instances hold the user's objects.
_HOLDERS = (
    *(types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList, collections.deque),
    *(dict, list, tuple, set),
)
_UNSTABLE = re.compile(r"\|(dict|type|call|keys)|\.__(mro|code|dict|closure|defaults|kwdefaults)__")


@dataclass(frozen=True, kw_only=True)
class Touched:
    """Everything that a trace could have read.

    Args:
        guards: The guards, including those on calls (`arg:`).
        classes: The classes outside torch and the standard library.
        names: The names in traced code, and the names of functions that it reaches under other names.
        objects: {source: object} of the visited objects whose identity can matter.
    """

    guards: tuple[Guard, ...]
    classes: tuple[type, ...]
    names: frozenset[str]
    objects: Mapping[str, Any]


def find_touched(codes: Sequence[types.CodeType], sources: Sequence[str], roots: Roots) -> Touched:
    """Return everything that a trace could have read.

    Args:
        codes: The traced code.
        sources: The sources of Dynamo's guards and of the graph's inputs.
        roots: The live model, its method and the arguments of the traced call.
    """
    names, read = names_in(codes) | {"forward"}, globals_in(codes)
    run: frozenset[types.CodeType] = frozenset()
    held = dict(_stdlib_globals(codes))
    while True:
        walk = _Walk(names, read, roots, frozenset(sources))
        walk.run(sources, _modules_of((*codes, *run), roots.method), held)
        before = names, read, run
        run |= frozenset(never_traced(walk.classes, names))
        called = (*called_by_python(walk.classes), *run)
        names |= names_in(called)
        read |= globals_in(called)
        if (names, read, run) == before:
            return walk.touched()


def _modules_of(codes: Iterable[types.CodeType], method: Any) -> list[types.ModuleType]:
    """Return the modules of the method and of traced code, without those of torch and the standard library."""
    files = {code.co_filename for code in codes if not is_covered_by_versions(code.co_filename)}
    owner = getattr(method, "__globals__", {}).get("__name__")
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and (name == owner or getattr(module, "__file__", None) in files)
    ]


def _stdlib_globals(codes: Iterable[types.CodeType]) -> Iterator[tuple[str, Any]]:
    """Yield (source, object) of the globals that traced code of the standard library names.

    Dynamo has no guards on them. An example is the object that `threading.main_thread` returns.
    """
    by_file = modules_by_file()
    for code in codes:
        name = module_of(code, by_file)
        if name is not None and name.partition(".")[0] in sys.stdlib_module_names:
            module = vars(sys.modules[name])
            for known in set(code.co_names).intersection(module):
                value = module[known]
                if holds(value, "__dict__") and not callable(value) and not isinstance(value, types.ModuleType):
                    yield f"global:{name}:{known}", value


def _is_compiled(value: Any) -> bool:
    """Return whether a value is a model compiled by cgtool, and not a module of cgtool around a model or a function."""
    return type(value).__module__.startswith("cgtool.runtime.") and not isinstance(value, nn.Module)


class _Walk:
    def __init__(self, names: frozenset[str], read: frozenset[str], roots: Roots, guarded: Collection[str]) -> None:
        self.names = names
        self.read = read
        self.roots = roots
        self.guarded = guarded
        self.enumerates = enumerates(names)
        self.argument = _argument(names - _BOOKKEEPING)
        self.guards: dict[tuple[str, str], Guard] = {}
        self.classes: dict[type, str] = {}
        self.abstract: dict[str, type] = {}
        self.objects: dict[int, tuple[str, Any]] = {}
        self.others: list[tuple[str, str]] = []
        self.pending: collections.deque[tuple[str, Any]] = collections.deque()

    def run(self, sources: Iterable[str], modules: Iterable[types.ModuleType], held: Mapping[str, Any]) -> None:
        steps = dict.fromkeys(itertools.chain.from_iterable(map(self._steps, sources)))
        self.visit("self", self.roots.module)
        self._start(step for step in steps if not is_of_call(step))
        for module in modules:
            self._module(module, is_own=True)
        for source, value in held.items():
            self._attributes(source, value)
        self._class("global:torch:Tensor", torch.Tensor)
        for name in sorted(self.names.intersection(vars(builtins)) - _MODULE_METADATA):
            self._platform_global(f"global:builtins:{name}", vars(builtins)[name])
        self._finish()
        # Arguments come last, so that an argument that the model also holds gets the model's source.
        self._start(filter(is_of_call, steps))
        self._finish()

    def _steps(self, text: str) -> Iterator[str]:
        """Yield a source and its prefixes, without those that resolve to a new object each time."""
        source = parse_source(text)
        for step in (*source.prefixes, text):
            if source.root == "state" or _UNSTABLE.search(step) or step.rpartition(".")[2] in _BOOKKEEPING:
                continue
            if is_of_call(step) and self._names_model(step):  # the first of a wrapper's `*args`
                yield from self._steps(f"self{text.removeprefix(step)}")
                return
            yield step

    def _names_model(self, source: str) -> bool:
        try:
            return self.roots.resolve(source) is self.roots.module
        except SourceError:
            return False

    def _start(self, steps: Iterable[str]) -> None:
        for step in steps:
            try:
                self.visit(step, self.roots.resolve(step))
            except SourceError:
                continue

    def _finish(self) -> None:
        while self.pending:
            self._look(*self.pending.popleft())

    def touched(self) -> Touched:
        routines = (value for _, value in self.objects.values() if inspect.isroutine(value))
        return Touched(
            guards=(*self.guards.values(), *self._identities(), *self._registrations()),
            classes=tuple(self.classes),
            names=self.names | {value.__name__ for value in routines if hasattr(value, "__name__")},
            objects={source: value for source, value in self.objects.values() if has_identity(value)},
        )

    def _registrations(self) -> Iterator[Guard]:
        """Yield guards on which of the classes are registered with Python's own ABCs."""
        kind = f"registered:{_argument(map(qualified_name, self.classes))}"
        for source, cls in self.abstract.items():
            yield Guard(source=source, kind=kind, expected=describe(kind, cls))

    def add(self, source: str, kind: str, expected: Json) -> None:
        self.guards.setdefault((source, kind), Guard(source=source, kind=kind, expected=expected))

    def child(self, source: str, value: Any) -> None:
        """Guard an object that a name in traced code leads to: by value if that is data, else by class."""
        is_long = isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) > _MAX_ELEMENTS
        try:
            literal = encode_literal(value)
        except NoRuleError:
            self.add(source, "type", describe("type", value))
        else:
            if is_long:
                self.add(source, "digest", digest_of(literal))
            elif not isinstance(value, (list, dict)):  # the walk visits their elements one by one
                self.add(source, "value", literal)
        self.visit(source, value)

    def visit(self, source: str, value: Any) -> None:
        """Queue an object for the walk; one that was visited before gets a guard on its identity instead."""
        refuse_alias(source, value)
        if id(value) not in self.objects:
            self.objects[id(value)] = source, value
            self.pending.append((source, value))
        elif has_identity(value) and source != self.objects[id(value)][0]:
            self.others.append((source, self.objects[id(value)][0]))

    def _look(self, source: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.add(source, "type", describe("type", value))
        elif isinstance(value, enum.Enum):
            self._class(f"{source}|type", type(value))
        elif isinstance(value, type):
            self._class(source, value)
        elif isinstance(value, types.ModuleType):
            self._module(value)
        elif isinstance(value, types.FunctionType):
            self._function(source, value)
        elif isinstance(value, types.MethodType):
            self.visit(f"{source}.__self__", value.__self__)
            self.visit(f"{source}.__func__", value.__func__)
        elif isinstance(value, functools.partial):
            for part in ("func", "args", "keywords"):
                self.child(f"{source}.{part}", getattr(value, part))
        elif isinstance(value, weakref.ref):
            self.visit(f"{source}|call", value())
        elif not _is_compiled(value):  # a trace cannot call another compiled model, only ask what it is
            self._object(source, value)

    def _object(self, source: str, value: Any) -> None:
        cls = type(value)
        if not is_platform_code(cls):
            self._class(f"{source}|type", cls)
        elif not isinstance(value, (nn.Module, *_HOLDERS)):
            return
        if isinstance(value, nn.Module):
            self._class(f"{source}|type", cls)
        if isinstance(value, dict):
            self._dict(source, value)
        elif isinstance(value, (list, tuple, collections.deque)):
            self._sequence(source, value)
        if holds(value, "__dict__") or own_attributes(value):
            self._attributes(source, value)

    def _attributes(self, source: str, value: Any) -> None:
        cls = type(value)
        present = describe(f"named:{self.argument}", value)
        self.add(source, f"named:{self.argument}", present)
        if self.enumerates and not isinstance(value, nn.Module):
            present = describe("attributes", value)
            self.add(source, "attributes", present)
        ignored = records_of(cls) - self.names
        for name in present:
            if name in ignored:
                continue
            if _NAME.fullmatch(name) and name not in _BOOKKEEPING and not is_computed(cls, name):
                try:
                    held = getattr(value, name)
                except Exception:  # noqa: BLE001 - a user-defined lookup can raise anything
                    # The lookup depends on the object's attributes, so all of them count, read from `__dict__`.
                    for key, attribute in list(vars(value).items()):
                        self.child(f"{source}|dict[{json.dumps(key)}]", attribute)
                else:
                    self.child(f"{source}.{name}", held)

    def _dict(self, source: str, value: Mapping[Any, Any]) -> None:
        """Guard a dict: all of it, or only the keys that code names if Dynamo's guards cover its other reads."""
        if len(value) > _MAX_ELEMENTS or source in self.guarded or is_of_call(source):
            named = describe(f"named_keys:{self.argument}", value)
            self.add(source, f"named_keys:{self.argument}", named)
            for key in named:
                self.child(f"{source}[{json.dumps(key)}]", value[key])
            return
        try:
            self.add(source, "keys", describe("keys", value))
        except NoRuleError:
            self.add(source, "length", describe("length", value))
        ignored = records_of(type(value)) - self.names
        for index, (key, held) in enumerate(list(zip(stored_keys(value), stored_values(value), strict=True))):
            if isinstance(key, str) and key in ignored:
                continue
            # A subclass that overrides `__getitem__` may return something else than the stored value.
            named = type(key) in (str, int) and type(value).__getitem__ is dict.__getitem__
            step = f"[{json.dumps(key)}]" if named else f"|values[{index}]"
            self.visit(f"{source}|keys[{index}]", key)
            self.child(source + step, held)

    def _sequence(self, source: str, value: Sequence[Any]) -> None:
        take = self.visit if is_of_call(source) else self.child
        self.add(source, "length", describe("length", value))
        for index, held in enumerate(itertools.islice(value, _MAX_ELEMENTS)):
            take(f"{source}[{index}]", held)

    def _function(self, source: str, value: types.FunctionType) -> None:
        if getattr(value, "_dynamo_marked_constant", False):
            if qualified_name(value) in _DETERMINED_BY_VERSION:
                return
            if value.__module__ == PROBES:
                with contextlib.suppress(NoRuleError):
                    self.add(source, "answers", describe("answers", value))
                    return
            msg = (
                f"{qualified_name(value)} is marked with assume_constant_result, so a change of its result would go "
                "unnoticed. Remove the mark, or keep the result in an attribute of the model."
            )
            raise TraceError(msg, path=qualified_name(value))
        for index, cell in enumerate(value.__closure__ or ()):
            try:
                held = cell.cell_contents
            except ValueError:
                continue
            self.visit(f"{source}.__closure__[{index}].cell_contents", held)
        for index, held in enumerate(value.__defaults__ or ()):
            self.visit(f"{source}.__defaults__[{index}]", held)
        for name, held in (value.__kwdefaults__ or {}).items():
            self.visit(f"{source}.__kwdefaults__[{json.dumps(name)}]", held)
        self._globals_without_module(source, value)
        if not is_of_call(source) and not is_skipped_module(str(value.__module__)):
            self.add(source, f"named:{self.argument}", describe(f"named:{self.argument}", value))
        name_attributes = () if is_installed(value.__code__.co_filename) else _NAME_ATTRIBUTES
        for name in sorted(self.names.intersection((*vars(value), "__annotations__", *name_attributes))):
            self.child(f"{source}.{name}", getattr(value, name))

    def _globals_without_module(self, source: str, function: types.FunctionType) -> None:
        """Guard the globals of a function whose module a custom loader executed without adding it to `sys.modules`."""
        space = function.__globals__
        module = str(space.get("__name__", ""))
        if getattr(sys.modules.get(module), "__dict__", None) is space or module.partition(".")[0] in _PLATFORM_MODULES:
            return
        for name in sorted(names_in((function.__code__,)).intersection(space) - _MODULE_METADATA):
            if has_identity(space[name]):
                msg = (
                    f"{qualified_name(function)} uses the global {name} of a module that is not in sys.modules, so a "
                    f"load cannot find it. Add the module to sys.modules as {module!r} before executing it."
                )
                raise TraceError(msg, path=name)
            self.child(f"{source}.__globals__[{json.dumps(name)}]", space[name])

    def _module(self, module: types.ModuleType, *, is_own: bool = False) -> None:
        """Guard the globals of a module that code names; in its own module, code reads only global names."""
        name = canonical_module_name(module.__name__)
        if is_skipped_module(name):
            return
        present = sorted(self.names.intersection(vars(module)) - _MODULE_METADATA)
        kind = f"named:{_argument({*self.names, '__getattr__'} - _BOOKKEEPING)}"
        self.add(f"module:{name}", kind, describe(kind, module))
        if name.partition(".")[0] in _PLATFORM_MODULES:
            for known in present:
                self._platform_global(f"global:{name}:{known}", vars(module)[known])
            return
        for known in present:
            value = vars(module)[known]
            is_elsewhere = is_own and known not in self.read and self._is_model(value)
            if _NAME.fullmatch(known) and not is_elsewhere:
                self.child(f"global:{name}:{known}", value)

    def _is_model(self, value: Any) -> bool:
        """Return whether a global is the model, or a model compiled by cgtool: `model = cgtool.compile(model)`."""
        return value is self.roots.module or _is_compiled(value)

    def _platform_global(self, source: str, value: Any) -> None:
        """Guard that a global of a module that ships with Python, torch or NumPy was not replaced."""
        if isinstance(value, types.ModuleType):
            self.visit(source, value)
        elif callable(value) or isinstance(value, (str, int, float)):
            try:
                self.add(source, "value", encode_literal(value))
            except NoRuleError:
                return
            if isinstance(value, type):
                self._class(source, value)

    def _class(self, source: str, cls: type) -> None:
        """Guard a class and its bases: user classes by definition, torch's by the methods that traced code names."""
        if is_of_call(source):  # a class is not part of a call
            source = f"global:{canonical_module_name(cls.__module__)}:{cls.__qualname__}"
        if is_platform_code(cls) and isinstance(cls, abc.ABCMeta):
            self.abstract[source] = cls
        for index, owner in enumerate(cls.__mro__):
            text = f"{source}.__mro__[{index}]" if index else source
            if owner in self.classes or (is_platform_code(owner) and not issubclass(owner, (nn.Module, torch.Tensor))):
                continue
            self.classes[owner] = text
            if is_platform_code(owner):
                self._methods(text, owner)
            else:
                self._definition(text, owner)

    def _definition(self, source: str, cls: type) -> None:
        own = vars(cls)
        containers = self.names.intersection(n for n, v in own.items() if isinstance(v, (list, dict, set)))
        kind = f"class:{_argument(sorted(containers | self.names.intersection(_NAME_ATTRIBUTES)))}"
        self.add(source, kind, describe(kind, cls))
        if not is_platform_code(type(cls)):
            self._class(f"{source}|type", type(cls))
        for name, member in own.items():
            if not is_platform_code(type(member)) and cls not in type(member).__mro__ and _NAME.fullmatch(name):
                self._class(f'{source}|dict["{name}"]|type', type(member))
            if (
                name in self.names.difference(_FLAG_CACHES if issubclass(cls, enum.Flag) else ())
                and _NAME.fullmatch(name)
                and (is_held(member) or isinstance(member, types.FunctionType))
            ):
                self.visit(f"{source}.{name}", member)
            if isinstance(member, types.FunctionType) and getattr(member, "_dynamo_marked_constant", False):
                self._function(f"{source}.{name}", member)

    def _methods(self, source: str, cls: type) -> None:
        called = self.names | _ALWAYS_CALLED | (_OPERATORS if cls is torch.Tensor else frozenset())
        kind = f"named:{_argument(called - _BOOKKEEPING)}"
        self.add(source, kind, describe(kind, cls))
        for name in sorted(called.intersection(vars(cls))):
            member = vars(cls)[name]
            if isinstance(member, types.FunctionType) and not is_skipped_module(member.__module__):
                self.add(f"{source}.{name}", "value", encode_literal(member))

    def _identities(self) -> Iterator[Guard]:
        visited = self.objects.values()
        firsts = [source for source, value in visited if has_identity(value) and not is_of_call(source)]
        kind = f"distinct:{digest_of(firsts)[:16]}"
        yield from (Guard(source=source, kind=kind, expected=True) for source in firsts)
        for source, first in self.others:
            yield Guard(source=source, kind=f"same:{first}", expected=True)


#: Methods that Python calls for an operator on a tensor.
_OPERATORS = frozenset(
    name for name in vars(torch.Tensor.__mro__[1]) if name.startswith("__") and f"{name[2:-2]}" in vars(operator)
) | {"__len__", "__bool__", "__getattr__", "__getattribute__", "__torch_function__", "__rsub__", "__rtruediv__"}
_ALWAYS_CALLED = frozenset({"__call__", "_call_impl", "_wrapped_call_impl", "forward", "__getattr__", "__setattr__"})


def _argument(names: Iterable[str]) -> str:
    return json.dumps(sorted(names), separators=(",", ":"))
