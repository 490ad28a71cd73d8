"""Frozen records that cost little to declare: what `dataclasses.dataclass(frozen=True, kw_only=True)` gives.

The standard decorator writes and compiles six functions for each class, half a millisecond, and a process that loads a
model from the cache declares some forty records on its way. Here they are closures. Type checkers see the standard
decorator; `dataclasses.replace`, `fields` and `is_dataclass` work as they do on one. Must not import torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

#: Where a record keeps what its fields were given as defaults.
_GIVEN = "__record_given__"

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - said twice, it is exported
else:

    def dataclass(*, frozen: bool, kw_only: bool) -> Callable[[type], type]:
        """Return a decorator that makes a class a record; both arguments must be true."""
        if not (frozen and kw_only):
            msg = "a record is frozen and its fields are keywords"
            raise TypeError(msg)
        return _record


def _record(cls: type) -> type:
    types, given = _declared(cls)
    defaults, makers, unhashed = {}, {}, set()
    for name, value in given.items():
        if not isinstance(value, dataclasses.Field):
            defaults[name] = value
            continue
        if value.hash is False:
            unhashed.add(name)
        if value.default_factory is not dataclasses.MISSING:
            makers[name] = value.default_factory
        elif value.default is not dataclasses.MISSING:
            defaults[name] = value.default
        if name in vars(cls):
            delattr(cls, name)
    names = tuple(types)
    own: dict[str, Any] = {
        **defaults,
        "__init__": _initialiser(cls, frozenset(names), defaults, makers),
        "__repr__": _representer(names),
        "__setattr__": _refuse_assignment,
        "__delattr__": _refuse_deletion,
        "__eq__": _equality(names),
        "__hash__": _hash([name for name in names if name not in unhashed]),
        "__match_args__": (),
        **{name: _OfTheStandard(cls, name, types, given) for name in _STANDARD},
    }
    for name, value in own.items():
        if name not in vars(cls):
            setattr(cls, name, value)
    return cls


def _declared(cls: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the annotation of each field, and what it was given as its default or `field(...)`."""
    types: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        made = vars(base).get(_GIVEN)
        for name, kind in vars(base).get("__annotations__", {}).items():
            types[name] = kind
            value = vars(base).get(name, dataclasses.MISSING) if made is None else made.get(name, dataclasses.MISSING)
            if value is not dataclasses.MISSING:
                given[name] = value
    setattr(cls, _GIVEN, given)
    return types, given


def _initialiser(
    cls: type, known: frozenset[str], defaults: dict[str, Any], makers: dict[str, Callable[[], Any]]
) -> Callable[..., None]:
    finish = getattr(cls, "__post_init__", None)

    def __init__(self: Any, /, **values: Any) -> None:  # noqa: N807 - it becomes the method of that name
        if values.keys() != known:
            given, values = values, {**defaults, **values}
            values.update({name: make() for name, make in makers.items() if name not in given})
            if values.keys() != known:
                raise _misfit(cls, known, values)
        vars(self).update(values)
        if finish is not None:
            finish(self)

    return __init__


def _misfit(cls: type, known: frozenset[str], values: dict[str, Any]) -> TypeError:
    strange = sorted(values.keys() - known)
    if strange:
        return TypeError(f"{cls.__name__}.__init__() got an unexpected keyword argument {strange[0]!r}")
    missing = ", ".join(map(repr, sorted(known - values.keys())))
    return TypeError(f"{cls.__name__}.__init__() missing required keyword-only arguments: {missing}")


def _equality(names: Sequence[str]) -> Callable[[Any, object], bool]:
    values = _reader(names)

    def __eq__(self: Any, other: object) -> bool:  # noqa: N807
        return bool(values(self) == values(other)) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(names: Sequence[str]) -> Callable[[Any], int]:
    values = _reader(names)

    def __hash__(self: Any) -> int:  # noqa: N807
        return hash(values(self))

    return __hash__


def _reader(names: Sequence[str]) -> Callable[[Any], Any]:
    return operator.attrgetter(*names) if names else lambda _: ()


def _representer(names: Sequence[str]) -> Callable[[Any], str]:
    def __repr__(self: Any) -> str:  # noqa: N807
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _refuse_assignment(_self: Any, name: str, _value: object) -> NoReturn:
    msg = f"cannot assign to field {name!r}"
    raise dataclasses.FrozenInstanceError(msg)


def _refuse_deletion(_self: Any, name: str) -> NoReturn:
    msg = f"cannot delete field {name!r}"
    raise dataclasses.FrozenInstanceError(msg)


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
