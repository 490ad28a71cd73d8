"""What a trace could have looked at, as guards: more than what Dynamo guards, because it folds much of what it reads.

The walk starts where the trace has been (the model, what Dynamo's guards name, the globals of traced code) and follows
every name that traced code holds, as a name or as a string, whatever object it stands on. What it meets is guarded as
it is: plain data by value, classes by definition, of every object which of those names it has, and which objects are
one. A fact that nobody read costs a trace when it changes; one that is missing costs a wrong answer.
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
from cgtool.guards.code import is_platform_code
from cgtool.guards.kinds import NoRuleError, describe, encode_literal, own_attributes
from cgtool.guards.sources import Roots, SourceError, canonical_module_name, parse_source, qualified_name
from cgtool.guards.transformers import PROBES
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json
from cgtool.plan.records import Guard
from cgtool.trace.closure import is_covered_by_versions, is_installed, module_of, modules_by_file
from cgtool.trace.names import PLACE, called_by_python, enumerates, globals_in, names_in, never_traced
from cgtool.trace.objects import has_identity, is_computed, is_held, is_of_call, is_passed_by
from cgtool.trace.variables_read import refuse_alias

#: A container with more elements than this is one digest, or its length where it has none.
_MAX_ELEMENTS = 256
#: What a plan can spell after a dot.
_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
#: What a module keeps of its own: hooks have guards, and parts are found by their names.
_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
#: Modules whose version stands for them; what the model reads there is guarded, and no further.
_GIVEN_MODULES = frozenset({"torch", "numpy", *sys.stdlib_module_names})
#: What functions and classes are called, which older versions of Dynamo read without a guard.
_CALLED = ("__name__", "__qualname__", "__module__", "__doc__")
#: Where a flag remembers the combinations of its members that were made so far.
_OF_A_FLAG = frozenset({"_value2member_map_", "_member_map_", "_member_names_"})
#: Globals that say where a module lies and how it was started.
_OF_EVERY_MODULE = frozenset(vars(types.ModuleType(""))) | {"__builtins__", "__cached__", "__file__", "__path__"}
#: Functions marked as constants whose every answer the version of torch tells, which is a factor of the key.
_ANSWERED_BY_VERSION = frozenset(
    f"{PROBES}:{name}" for name in ("is_torch_greater_or_equal", "is_torch_less_or_equal", "get_torch_version")
)
#: Instances of classes of the standard library that hold what the user put there.
_HOLDERS = (
    *(types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList, collections.deque),
    *(dict, list, tuple, set),
)
_UNSTABLE = re.compile(r"\|(dict|type|call|keys)|\.__(mro|code|dict|closure|defaults|kwdefaults)__")


@dataclass(frozen=True, kw_only=True)
class Touched:
    """What a trace could have looked at.

    Args:
        guards: The facts, those of calls (`arg:`) among them.
        classes: The classes outside torch and the standard library.
        names: The names that traced code holds, and those of the functions that it reaches by other names.
        objects: {source: object} of what was met and can be one with something else.
    """

    guards: tuple[Guard, ...]
    classes: tuple[type, ...]
    names: frozenset[str]
    objects: Mapping[str, Any]


def touched(codes: Sequence[types.CodeType], sources: Sequence[str], roots: Roots) -> Touched:
    """Return what a trace could have looked at.

    Args:
        codes: The code that it went through.
        sources: What Dynamo's guards and the graph's inputs name.
        roots: The live model, its method and the arguments of the traced call.
    """
    names, read = names_in(codes) | {"forward"}, globals_in(codes)
    run: frozenset[types.CodeType] = frozenset()
    held = dict(_held_by_given(codes))
    while True:
        walk = _Walk(names, read, roots, frozenset(sources))
        walk.run(sources, _modules_of((*codes, *run), roots.method), held)
        before = names, read, run
        run |= frozenset(never_traced(walk.classes))
        called = (*called_by_python(walk.classes), *run)
        names |= names_in(called)
        read |= globals_in(called)
        if (names, read, run) == before:
            return walk.touched()


def _modules_of(codes: Iterable[types.CodeType], method: Any) -> list[types.ModuleType]:
    """Return the modules whose globals traced code could name, without those of torch and the standard library."""
    files = {code.co_filename for code in codes if not is_covered_by_versions(code.co_filename)}
    owner = getattr(method, "__globals__", {}).get("__name__")
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and (name == owner or getattr(module, "__file__", None) in files)
    ]


def _held_by_given(codes: Iterable[types.CodeType]) -> Iterator[tuple[str, Any]]:
    """Yield the objects, with their sources, that traced code of the standard library keeps in its globals.

    Dynamo has no guards on them. What `threading.main_thread` returns is one.
    """
    by_file = modules_by_file()
    for code in codes:
        name = module_of(code, by_file)
        if name is not None and name.partition(".")[0] in sys.stdlib_module_names:
            module = vars(sys.modules[name])
            for known in set(code.co_names).intersection(module):
                value = module[known]
                if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, types.ModuleType):
                    yield f"global:{name}:{known}", value


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
        for name in sorted(self.names.intersection(vars(builtins)) - _OF_EVERY_MODULE):
            self._given(f"global:builtins:{name}", vars(builtins)[name])
        self._finish()
        # What a call brings and the model holds is the model's.
        self._start(filter(is_of_call, steps))
        self._finish()

    def _steps(self, text: str) -> Iterator[str]:
        """Yield a source and those on its way, without what is made anew each time that it is asked for."""
        source = parse_source(text)
        for step in (*source.prefixes, text):
            if source.root == "state" or _UNSTABLE.search(step) or step.rpartition(".")[2] in _BOOKKEEPING:
                continue
            if is_of_call(step) and self._is_model(step):  # the first of a wrapper's `*args`
                yield from self._steps(f"self{text.removeprefix(step)}")
                return
            yield step

    def _is_model(self, source: str) -> bool:
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
        return Touched(
            guards=(*self.guards.values(), *self._identities(), *self._registrations()),
            classes=tuple(self.classes),
            names=self.names | {value.__name__ for _, value in self.objects.values() if inspect.isroutine(value)},
            objects={source: value for source, value in self.objects.values() if has_identity(value)},
        )

    def _registrations(self) -> Iterator[Guard]:
        """Yield which of the classes are registered with the ABCs that come with Python."""
        kind = f"registered:{_argument(map(qualified_name, self.classes))}"
        for source, cls in self.abstract.items():
            yield Guard(source=source, kind=kind, expected=describe(kind, cls))

    def add(self, source: str, kind: str, expected: Json) -> None:
        self.guards.setdefault((source, kind), Guard(source=source, kind=kind, expected=expected))

    def child(self, source: str, value: Any) -> None:
        """Take in what a name of traced code leads to: its value where that is data, its class where it is not."""
        is_long = isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) > _MAX_ELEMENTS
        try:
            literal = encode_literal(value)
        except NoRuleError:
            self.add(source, "type", describe("type", value))
        else:
            if is_long:
                self.add(source, "digest", digest_of(literal))
            elif not isinstance(value, (list, dict)):  # their elements are looked at one by one
                self.add(source, "value", literal)
        self.visit(source, value)

    def visit(self, source: str, value: Any) -> None:
        """Look at an object later, unless it was met already: then it is one with what was met."""
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
        else:
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
        if hasattr(value, "__dict__") or own_attributes(value):
            self._attributes(source, value)

    def _attributes(self, source: str, value: Any) -> None:
        cls = type(value)
        present = describe(f"named:{self.argument}", value)
        self.add(source, f"named:{self.argument}", present)
        if self.enumerates and not isinstance(value, nn.Module):
            present = describe("attributes", value)
            self.add(source, "attributes", present)
        for name in present:
            if name in PLACE - self.names and any(c.__module__.startswith("transformers.") for c in cls.__mro__):
                continue
            if _NAME.fullmatch(name) and name not in _BOOKKEEPING and not is_computed(cls, name):
                try:
                    held = getattr(value, name)
                except Exception:  # noqa: BLE001 - a lookup of the object's own refuses as it likes
                    # It decides by what the object holds, so all of that counts, read where it lies.
                    for key, lies in list(vars(value).items()):
                        self.child(f"{source}|dict[{json.dumps(key)}]", lies)
                else:
                    self.child(f"{source}.{name}", held)

    def _dict(self, source: str, value: Mapping[Any, Any]) -> None:
        """Take in a dict: all of it, or the keys that code names where Dynamo's own guards say what else it read."""
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
        for index, (key, held) in enumerate(list(value.items())):
            # A class with a lookup of its own may give something else than what it holds.
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
            if qualified_name(value) in _ANSWERED_BY_VERSION:
                return
            if value.__module__ == PROBES:
                with contextlib.suppress(NoRuleError):
                    self.add(source, "answers", describe("answers", value))
                    return
            msg = (
                f"{qualified_name(value)} is marked with assume_constant_result, so nothing tells when what it returns "
                "changes. Remove the mark, or keep its result in an attribute of the model."
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
        self._globals_of_no_module(source, value)
        if not is_of_call(source) and not is_passed_by(str(value.__module__)):
            self.add(source, f"named:{self.argument}", describe(f"named:{self.argument}", value))
        called = () if is_installed(value.__code__.co_filename) else _CALLED
        for name in sorted(self.names.intersection((*vars(value), "__annotations__", *called))):
            self.child(f"{source}.{name}", getattr(value, name))

    def _globals_of_no_module(self, source: str, function: types.FunctionType) -> None:
        """Take in the globals of a function whose module was run by a loader of the user's own, and not imported."""
        space = function.__globals__
        module = str(space.get("__name__", ""))
        if getattr(sys.modules.get(module), "__dict__", None) is space or module.partition(".")[0] in _GIVEN_MODULES:
            return
        for name in sorted(names_in((function.__code__,)).intersection(space) - _OF_EVERY_MODULE):
            if has_identity(space[name]):
                msg = (
                    f"{qualified_name(function)} uses the global {name} of a module that sys.modules lacks, and no "
                    f"load could find it. Put the module there, as {module!r}, before it runs."
                )
                raise TraceError(msg, path=name)
            self.child(f"{source}.__globals__[{json.dumps(name)}]", space[name])

    def _module(self, module: types.ModuleType, *, is_own: bool = False) -> None:
        """Take in the names of a module; of the code's own module, a name after a dot is another's attribute."""
        name = canonical_module_name(module.__name__)
        if is_passed_by(name):
            return
        present = sorted(self.names.intersection(vars(module)) - _OF_EVERY_MODULE)
        kind = f"named:{_argument({*self.names, '__getattr__'} - _BOOKKEEPING)}"
        self.add(f"module:{name}", kind, describe(kind, module))
        if name.partition(".")[0] in _GIVEN_MODULES:
            for known in present:
                self._given(f"global:{name}:{known}", vars(module)[known])
            return
        for known in present:
            value = vars(module)[known]
            is_elsewhere = is_own and known not in self.read and self._is_made_of_it(value)
            if _NAME.fullmatch(known) and not is_elsewhere:
                self.child(f"global:{name}:{known}", value)

    def _is_made_of_it(self, value: Any) -> bool:
        """Return whether a global is the model, or what cgtool made of one: `model = cgtool.compile(model)`."""
        return value is self.roots.module or type(value).__module__.startswith("cgtool.runtime.")

    def _given(self, source: str, value: Any) -> None:
        """Take in a name of a module that comes with Python or torch: whether it is still what came with it."""
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
        """Take in a class and its bases; of one that comes with torch, the methods that traced code names."""
        if is_of_call(source):  # a class is no part of a call
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
        kind = f"class:{_argument(sorted(containers | self.names.intersection(_CALLED)))}"
        self.add(source, kind, describe(kind, cls))
        if not is_platform_code(type(cls)):
            self._class(f"{source}|type", type(cls))
        for name, member in own.items():
            if not is_platform_code(type(member)) and not isinstance(member, cls) and _NAME.fullmatch(name):
                self._class(f'{source}|dict["{name}"]|type', type(member))
            if (
                name in self.names.difference(_OF_A_FLAG if issubclass(cls, enum.Flag) else ())
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
            if isinstance(member, types.FunctionType) and not is_passed_by(member.__module__):
                self.add(f"{source}.{name}", "value", encode_literal(member))

    def _identities(self) -> Iterator[Guard]:
        met = self.objects.values()
        firsts = [source for source, value in met if has_identity(value) and not is_of_call(source)]
        kind = f"distinct:{digest_of(firsts)[:16]}"
        yield from (Guard(source=source, kind=kind, expected=True) for source in firsts)
        for source, first in self.others:
            yield Guard(source=source, kind=f"same:{first}", expected=True)


#: What Python calls for an operator on a tensor.
_OPERATORS = frozenset(
    name for name in vars(torch.Tensor.__mro__[1]) if name.startswith("__") and f"{name[2:-2]}" in vars(operator)
) | {"__len__", "__bool__", "__getattr__", "__getattribute__", "__torch_function__", "__rsub__", "__rtruediv__"}
_ALWAYS_CALLED = frozenset({"__call__", "_call_impl", "_wrapped_call_impl", "forward", "__getattr__", "__setattr__"})


def _argument(names: Iterable[str]) -> str:
    return json.dumps(sorted(names), separators=(",", ":"))
