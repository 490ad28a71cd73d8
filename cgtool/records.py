"""Frozen records that cost little to declare: what `dataclasses.dataclass(frozen=True, kw_only=True)` gives.

The standard decorator writes and compiles six functions for each class, half a millisecond, and a process that loads a
model from the cache declares some forty records on its way. Here all records share them. Type checkers see the standard
decorator; `dataclasses.replace`, `fields` and `is_dataclass` work as they do on one. Must not import torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

#: Where a record class keeps what the shared methods need.
_FIELDS = "__record_fields__"
_Record = TypeVar("_Record")

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - said twice, it is exported
else:

    def dataclass(*, frozen: bool, kw_only: bool) -> Callable[[type], type]:
        """Return a decorator that makes a class a record; both arguments must be true."""
        if not (frozen and kw_only):
            msg = "a record is frozen and its fields are keywords"
            raise TypeError(msg)
        return _record


def replace(record: _Record, **changes: Any) -> _Record:
    """Return a record like `record` with some fields changed, as `dataclasses.replace` does."""
    return type(record)(**{**vars(record), **changes})


class _Fields:
    """What the shared methods need to know of one record class."""

    __slots__ = ("defaults", "finish", "given", "hashed", "makers", "names", "read")

    def __init__(self, cls: type, types: dict[str, Any], given: dict[str, Any]) -> None:
        self.given = given
        self.names = types.keys()
        self.finish = getattr(cls, "__post_init__", None)
        self.defaults: dict[str, Any] = {}
        self.makers: dict[str, Any] = {}
        hashed = list(types)
        for name, value in given.items():
            if not isinstance(value, dataclasses.Field):
                self.defaults[name] = value
                continue
            if value.hash is False:
                hashed.remove(name)
            if value.default_factory is not dataclasses.MISSING:
                self.makers[name] = value.default_factory
            elif value.default is not dataclasses.MISSING:
                self.defaults[name] = value.default
        self.read = _reader(types)
        self.hashed = self.read if len(hashed) == len(types) else _reader(hashed)


def _record(cls: type) -> type:
    types, given = _declared(cls)
    fields = _Fields(cls, types, given)
    for name, value in given.items():
        if isinstance(value, dataclasses.Field) and name in vars(cls):
            delattr(cls, name)
    for name, value in {**fields.defaults, **_METHODS, _FIELDS: fields}.items():
        if name not in vars(cls):
            setattr(cls, name, value)
    for name in _STANDARD:
        setattr(cls, name, _OfTheStandard(cls, name, types, given))
    return cls


def _declared(cls: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the annotation of each field, and what it was given as its default or `field(...)`."""
    types: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        made = vars(base).get(_FIELDS)
        values = vars(base) if made is None else made.given
        for name, kind in vars(base).get("__annotations__", {}).items():
            types[name] = kind
            if name in values:
                given[name] = values[name]
    return types, given


def _reader(names: Iterable[str]) -> Callable[[Any], Any]:
    return operator.attrgetter(*names) if names else _nothing


def _nothing(_record: object) -> tuple[()]:
    return ()


def _initialise(self: Any, /, **values: Any) -> None:
    fields = self.__record_fields__
    if values.keys() != fields.names:
        given, values = values, {**fields.defaults, **values}
        values.update({name: make() for name, make in fields.makers.items() if name not in given})
        if values.keys() != fields.names:
            raise _misfit(type(self), fields.names, values)
    vars(self).update(values)
    if fields.finish is not None:
        fields.finish(self)


def _misfit(cls: type, known: Iterable[str], values: dict[str, Any]) -> TypeError:
    strange = [name for name in values if name not in known]
    if strange:
        return TypeError(f"{cls.__name__}.__init__() got an unexpected keyword argument {strange[0]!r}")
    missing = ", ".join(repr(name) for name in known if name not in values)
    return TypeError(f"{cls.__name__}.__init__() missing required keyword-only arguments: {missing}")


def _equal(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    read = self.__record_fields__.read
    return read(self) == read(other)


def _hash(self: Any) -> int:
    return hash(self.__record_fields__.hashed(self))


def _represent(self: Any) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{n}={getattr(self, n)!r}' for n in self.__record_fields__.names)})"


def _refuse_assignment(_self: Any, name: str, _value: object) -> NoReturn:
    msg = f"cannot assign to field {name!r}"
    raise dataclasses.FrozenInstanceError(msg)


def _refuse_deletion(_self: Any, name: str) -> NoReturn:
    msg = f"cannot delete field {name!r}"
    raise dataclasses.FrozenInstanceError(msg)


#: One function serves all records.
_METHODS = {
    "__init__": _initialise,
    "__repr__": _represent,
    "__setattr__": _refuse_assignment,
    "__delattr__": _refuse_deletion,
    "__eq__": _equal,
    "__hash__": _hash,
    "__match_args__": (),
}

#: What others ask a dataclass for, and a start from the cache does not.
_STANDARD: dict[str, Callable[[Any], Any]] = {
    "__dataclass_fields__": lambda twin: twin.__dataclass_fields__,
    "__dataclass_params__": lambda twin: twin.__dataclass_params__,
    "__signature__": inspect.signature,
}


class _OfTheStandard:
    """An attribute that the standard decorator would have set; asked of a twin of the class when it is first read."""

    def __init__(self, cls: type, name: str, types: dict[str, Any], given: dict[str, Any]) -> None:
        self._cls = cls
        self._name = name
        self._types = types
        self._given = given

    def __get__(self, _instance: object, _owner: type | None = None) -> Any:
        body = {**self._given, "__annotations__": self._types, "__module__": self._cls.__module__}
        twin: Any = dataclasses.dataclass(frozen=True, kw_only=True)(type(self._cls.__name__, (), body))
        for name, find in _STANDARD.items():
            setattr(self._cls, name, find(twin))
        return vars(self._cls)[self._name]
