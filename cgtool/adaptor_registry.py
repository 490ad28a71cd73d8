"""Which adaptors there are: cgtool's own, and those that others bring.

Others bring an adaptor in one of two ways. A distribution names its class in the entry-point group `cgtool.adaptors`:
every process that has the distribution knows it. Or the class is decorated with `register_adaptor`: each process knows
it that imports its module, as compile workers and proofs do. The kind of another's artifacts is the adaptor's name.

Must not import torch, and imports an adaptor's module only when that adaptor is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from cgtool.errors import ConfigError
from cgtool.plan.pieces import AOT_INDUCTOR, EAGER, KINDS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: The entry-point group in which distributions name their adaptors.
GROUP = "cgtool.adaptors"

_OURS = {
    AOT_INDUCTOR: ("cgtool.compiler.adaptors.aot_inductor", "AotInductorAdaptor"),
    "inductor_standalone": ("cgtool.compiler.adaptors.inductor", "InductorStandaloneAdaptor"),
    "inductor": ("cgtool.compiler.adaptors.inductor", "InductorAdaptor"),
    EAGER: ("cgtool.compiler.adaptors.eager", "EagerAdaptor"),
}
#: cgtool's own adaptors, the default first.
ADAPTORS = tuple(_OURS)

#: As narrow as the suffix of a file's name.
_NAME = "[a-z][a-z0-9_]{0,39}"
_registered: dict[str, type] = {}
_Adaptor = TypeVar("_Adaptor", bound=type)


def register_adaptor(name: str) -> Callable[[_Adaptor], _Adaptor]:
    """Return a decorator that makes a `CompilerInterface` the adaptor `name`, in each process that imports its module.

    Args:
        name: How configuration spells it: lower-case letters, digits and underscores, at most 40.

    Raises:
        ConfigError: The name is malformed, cgtool's own, or that of another class.
    """
    _check_name(name, "is registered")

    def register(adaptor: _Adaptor) -> _Adaptor:
        other = _registered.get(name, adaptor)
        if (other.__module__, other.__qualname__) != (adaptor.__module__, adaptor.__qualname__):
            raise ConfigError(
                f"The adaptor {name!r} is {other.__module__}.{other.__qualname__} already, and cannot be "
                f"{adaptor.__module__}.{adaptor.__qualname__}, too; choose another name.",
                path=name,
            )
        _registered[name] = adaptor
        return adaptor

    return register


def adaptor_names() -> tuple[str, ...]:
    """Return the names of all adaptors, cgtool's own first."""
    return (*ADAPTORS, *sorted({*_registered, *_installed()}))


def is_adaptor(name: str) -> bool:
    """Return whether there is an adaptor `name`; distributions are asked only where the process does not know it."""
    return name in _OURS or name in _registered or name in _installed()


def is_kind(kind: str) -> bool:
    """Return whether some adaptor makes artifacts of this kind."""
    return kind in KINDS.values() or (kind not in _OURS and is_adaptor(kind))


def adaptor_class(name: str) -> Any:
    """Return the class of an adaptor; its module is imported.

    Raises:
        ConfigError: There is no such adaptor, or what brings it cannot be imported.
    """
    if name in _registered:
        return _registered[name]
    if name in _OURS:
        module, attribute = _OURS[name]
        return getattr(import_module(module), attribute)
    if name not in _installed():
        raise ConfigError(
            f"There is no adaptor {name!r}; there are {', '.join(adaptor_names())}. Install the distribution that "
            f"brings it (entry-point group {GROUP}), or import the module that registers it.",
            expected=adaptor_names(),
            actual=name,
        )
    point = _installed()[name]
    try:
        return point.load()
    except Exception as error:  # the code of another distribution raises what it likes
        raise ConfigError(
            f"The adaptor {name!r} cannot be imported from {point.value}: {type(error).__name__}: {error}. Mend or "
            "remove the distribution that brings it.",
            path=name,
            actual=str(error),
        ) from error


@cache
def _installed() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # a hundredth of a second and more: only for adaptors of others

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        _check_name(point.name, f"the entry point {point.value} brings")
        if found.setdefault(point.name, point).value != point.value:
            raise ConfigError(
                f"Two distributions bring an adaptor {point.name!r}: {found[point.name].value} and {point.value}. "
                "Remove one of them.",
                path=point.name,
            )
    return found


def _check_name(name: str, how: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(_NAME, name) or name in _OURS or name in KINDS.values():
        raise ConfigError(
            f"{name!r}, which {how} as an adaptor, is not a name for one: it has lower-case letters, digits and "
            f"underscores, at most 40, begins with a letter, and is none of {', '.join((*_OURS, *KINDS.values()))}.",
            path=str(name),
            actual=name,
        )
