"""Sources: how a plan names an object of the live process, and how the object is resolved.

Must not import torch. Grammar::

    source   = root accessor*
    root     = "self" | "arg:" ident | "free:" ident | "global:" module ":" ident | "module:" module | "state:" ident
    accessor = "." name                attribute; a name is [A-Za-z0-9_]+, so that `layers.0` reads as in a state dict
             | "[" json "]"            item, the key a JSON string or integer
             | "|type"                 type(x)
             | "|keys[" n "]"          the n-th key of a dict, from 0
             | "|values[" n "]"        the n-th value of a dict
             | "|list[" n "]"          the n-th element of an iterable
             | "|dict"                 dict(x.__dict__)
             | "|call"                 x()  (weak references)
    module   = ident ("." ident)*

`self` is the model, `arg:x` a local of its method's first frame, `free:x` a variable that the method closes over.
`module:m` is a module itself and takes no accessors; `global:m:x` is a name in it. `state:x` names global state of
torch (see `state.py`) and takes no accessors either. Types and functions are named `module:Qualname`, which is the same
in every process.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import msgspec

from cgtool.errors import GuardError
from cgtool.plan.records import source_words

_MODULE = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_ROOT = re.compile(
    rf"self|arg:(?P<arg>[A-Za-z_]\w*)|free:(?P<free>[A-Za-z_]\w*)"
    rf"|global:(?P<owner>{_MODULE}):(?P<global>[A-Za-z_]\w*)|module:(?P<module>{_MODULE})|state:(?P<state>[a-z_0-9]+)",
    re.ASCII,
)
_ACCESSOR = re.compile(
    r"\.(?P<attr>[A-Za-z0-9_]+)|\[(?P<item>-?\d+|\"(?:[^\"\\]|\\.)*\")\]|\|(?P<word>type|dict|call)"
    r"|\|(?P<nth>keys|values|list)\[(?P<index>\d+)\]",
    re.ASCII,
)


#: The dicts in which an `nn.Module` keeps attributes that `setattr` does not put into `__dict__`.
PARTS = ("_parameters", "_buffers", "_modules")
#: Prefixes of sources that belong to a call and can be resolved only during one.
OF_CALL = ("arg:", "state:")


class SourceError(GuardError):
    """A source is malformed, or the object that it names no longer exists."""


class NotImportedError(SourceError):
    """A source refers to a module that this process has not imported."""


class Accessor(msgspec.Struct, frozen=True, kw_only=True):
    """A step from an object to a part of it: `word` is attr, item, type, dict, call, keys, values or list."""

    word: str
    key: str | int | None = None


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed source; `prefixes[i]` is the text before `accessors[i]`."""

    text: str
    root: str
    names: tuple[str, ...]
    accessors: tuple[Accessor, ...]
    prefixes: tuple[str, ...]


@functools.lru_cache(maxsize=65536)
def parse_source(text: str) -> Source:
    """Parse `text`.

    Raises:
        SourceError: `text` does not match the grammar above.
    """
    match = _ROOT.match(text)
    if match is None:
        raise _unknown(text)
    groups = match.groupdict()
    names = tuple(value for value in groups.values() if value is not None)
    root = match.group(0).split(":", 1)[0]
    accessors: list[Accessor] = []
    prefixes: list[str] = []
    position = match.end()
    while position < len(text):
        step = _ACCESSOR.match(text, position)
        if step is None:
            raise _unknown(text)
        prefixes.append(text[:position])
        try:
            accessors.append(_accessor(step))
        except ValueError as error:  # a key that is not JSON, a number with too many digits
            raise _unknown(text) from error
        position = step.end()
    return Source(text=text, root=root, names=names, accessors=tuple(accessors), prefixes=tuple(prefixes))


def parse_accessor(text: str) -> Accessor | None:
    """Return the accessor that `text` spells, or None if it is not exactly one accessor."""
    match = _ACCESSOR.fullmatch(text)
    try:
        return None if match is None else _accessor(match)
    except ValueError:
        return None


def _unknown(text: str) -> SourceError:
    msg = f"The plan has the malformed source {text!r:.200}; the cache is damaged or was not written by cgtool."
    return SourceError(msg, actual=text)


def _accessor(match: re.Match[str]) -> Accessor:
    if (attr := match["attr"]) is not None:
        return Accessor(word="attr", key=attr)
    if (item := match["item"]) is not None:
        return Accessor(word="item", key=json.loads(item))
    if (nth := match["nth"]) is not None:
        return Accessor(word=nth, key=int(match["index"]))
    return Accessor(word=match["word"])


class Roots:
    """The objects that sources start from: the live model, its method and, during a call, the arguments.

    Args:
        module: The `torch.nn.Module`.
        method: The bound method that was traced; `free:` sources are looked up in its closure.
        arguments: Locals of the method's first frame by name; None outside a call.
    """

    def __init__(self, module: Any, method: Any = None, arguments: Mapping[str, Any] | None = None) -> None:
        self.module = module
        self.method = method
        self.arguments = arguments
        self._seen: dict[str, Any] = {}

    def resolve(self, source: Source | str) -> Any:
        """Return the object that `source` names.

        Raises:
            SourceError: The source is malformed, or the object does not exist.
        """
        if isinstance(source, str):
            source = parse_source(source)
        if source.text in self._seen:
            return self._seen[source.text]
        value = self._step(source, self.resolve(source.prefixes[-1])) if source.accessors else self._root(source)
        self._seen[source.text] = value
        return value

    def _step(self, source: Source, base: Any) -> Any:
        try:
            return apply_accessor(base, source.accessors[-1])
        except Exception as error:  # user-defined properties can raise anything
            raise _gone(source, f" ({type(error).__name__}: {error})") from error

    def _root(self, source: Source) -> Any:
        if source.root == "self":
            return self.module
        if source.root == "module":
            return find_module(source.names[0])
        if source.root == "global":
            return self._global(source)
        if source.root == "free":
            return self._free(source)
        if source.root == "arg" and self.arguments is not None and source.names[0] in self.arguments:
            return self.arguments[source.names[0]]
        msg = f"{source_words(source.text)} is available only during a call."
        raise SourceError(msg, path=source_words(source.text))

    def _global(self, source: Source) -> Any:
        owner, name = source.names
        module = find_module(owner)
        if name not in vars(module):
            raise _gone(source)
        return vars(module)[name]

    def _free(self, source: Source) -> Any:
        function = getattr(self.method, "__func__", self.method)
        code = getattr(function, "__code__", None)
        if code is not None and source.names[0] in code.co_freevars:
            cell = function.__closure__[code.co_freevars.index(source.names[0])]
            try:
                return cell.cell_contents
            except ValueError:
                pass
        raise _gone(source)


def _gone(source: Source, why: str = "") -> SourceError:
    name = source_words(source.text)
    return SourceError(f"{name} was there when this was compiled and is gone now{why}.", path=name)


def leads_to(source: str, places: Iterable[str]) -> bool:
    """Return whether a source is one of these places or leads to a part of one."""
    return any(source == place or source.startswith((f"{place}.", f"{place}[", f"{place}|")) for place in places)


#: The value of an empty place.
ABSENT: Any = object()


class Place:
    """A place in the live model that holds a value: an attribute of the object itself, or an item of a dict.

    Args:
        roots: The objects that sources start from.
        text: The source of the value.

    Raises:
        SourceError: The source is neither an attribute nor an item, or an object on its path no longer exists.
    """

    def __init__(self, roots: Roots, text: str) -> None:
        source = parse_source(text)
        if not source.accessors or source.accessors[-1].word not in {"attr", "item"}:
            raise _unknown(text)
        self.text = text
        self._base = roots.resolve(source.prefixes[0])
        *self._path, self._last = source.accessors
        self.owner()

    def owner(self) -> Any:
        """Return the object that now has the attribute or the item."""
        return functools.reduce(apply_accessor, self._path, self._base)

    def get(self) -> Any:
        """Return the current value, or `ABSENT`."""
        owner, key = self.owner(), self._last.key
        if self._last.word == "item":
            return owner.get(key, ABSENT)
        holders = [vars(owner).get(part, {}) for part in PARTS]
        return next((holder[key] for holder in (vars(owner), *holders) if key in holder), ABSENT)

    def set(self, value: Any) -> None:
        """Store `value`, or delete the attribute or item if `value` is `ABSENT`."""
        owner, key = self.owner(), self._last.key
        if self._last.word == "item" and value is not ABSENT:
            owner[key] = value
        elif self._last.word == "item":
            owner.pop(key, None)
        elif value is not ABSENT:
            setattr(owner, str(key), value)
        elif self.get() is not ABSENT:
            delattr(owner, str(key))


def apply_accessor(base: Any, accessor: Accessor) -> Any:
    """Return the part of `base` that the accessor leads to; errors of the access propagate."""
    key = accessor.key
    if accessor.word == "attr":
        return getattr(base, str(key))
    if accessor.word == "item":
        return base[key]
    if accessor.word == "type":
        return type(base)
    if accessor.word == "dict":
        return dict(vars(base))
    if accessor.word == "call":
        if not isinstance(base, weakref.ref):
            raise TypeError("only weak references may be called")
        return base()
    if accessor.word == "list":
        elements = list(base)
    else:
        elements = list(stored_values(base) if accessor.word == "values" else stored_keys(base))
    return elements[int(key)] if key is not None else elements


def stored_keys(mapping: Mapping[Any, Any]) -> Iterable[Any]:
    """Return the keys that a dict holds, in order, whatever its class returns for them.

    A class may compute them: the values of transformers' `CONFIG_MAPPING` are imported from hundreds of modules.
    Dynamo reads the dict itself, too.
    """
    keys: Iterable[Any] = _dict_class(mapping).keys(mapping)
    return keys


def stored_values(mapping: Mapping[Any, Any]) -> Iterable[Any]:
    """Return the values that a dict holds, as `stored_keys` does the keys."""
    values: Iterable[Any] = _dict_class(mapping).values(mapping)
    return values


def _dict_class(mapping: Mapping[Any, Any]) -> Any:
    """Return the built-in class whose methods read a dict; other mappings are read by their own."""
    return next((kind for kind in (OrderedDict, dict) if isinstance(mapping, kind)), type(mapping))


def find_module(name: str) -> ModuleType:
    """Return the imported module of that name; the running script is found by its import name.

    Raises:
        NotImportedError: This process has not imported it. A name in a plan never causes an import.
    """
    if name in sys.modules:
        return sys.modules[name]
    main = sys.modules.get("__main__")
    if main is not None and canonical_module_name("__main__") == name:
        return main
    msg = f"The module {name} was imported when this was compiled and is not imported now."
    raise NotImportedError(msg, path=name)


def canonical_module_name(name: str) -> str:
    """Return the name of a module that is the same in every process: for `__main__`, the script's import name."""
    if name != "__main__":
        return name
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name)
    path = getattr(main, "__file__", None)
    if not path:
        return name
    return re.sub(r"\.py$", "", str(path).replace("\\", "/").rsplit("/", 1)[-1])


def qualified_name(thing: Any) -> str:
    """Return `module:Qualname` of a class or function, with the import name of the running script."""
    module = getattr(thing, "__module__", None) or ""
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or type(thing).__name__
    return f"{canonical_module_name(module)}:{name}"


def find_qualified(name: str) -> Any:
    """Return the class or function that `qualified_name` named.

    Raises:
        SourceError: This process has not imported its module.
        AttributeError: The module no longer has that name.
    """
    module, _, path = name.partition(":")
    return operator.attrgetter(path)(find_module(module))
