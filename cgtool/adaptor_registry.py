"""The registry of adaptors: cgtool's own and third-party ones.

A third-party adaptor is found in one of two ways. A distribution lists its class in the entry-point group
`cgtool.adaptors`, which makes it available to every process of that environment. Or the class is decorated with
`register_adaptor`, which makes it available to every process that imports its module; compile workers and proofs do.
The artifacts of a third-party adaptor have the adaptor's name as their kind.

Must not import torch. Imports the module of an adaptor only when that adaptor is used.
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

#: The entry-point group of adaptors.
GROUP = "cgtool.adaptors"

_BUILTIN = {
    AOT_INDUCTOR: ("cgtool.compiler.adaptors.aot_inductor", "AotInductorAdaptor"),
    "inductor_standalone": ("cgtool.compiler.adaptors.inductor", "InductorStandaloneAdaptor"),
    "inductor": ("cgtool.compiler.adaptors.inductor", "InductorAdaptor"),
    EAGER: ("cgtool.compiler.adaptors.eager", "EagerAdaptor"),
}
#: cgtool's own adaptors, the default first.
ADAPTORS = tuple(_BUILTIN)

#: A name becomes the suffix of a file name.
_NAME = "[a-z][a-z0-9_]{0,39}"
_registered: dict[str, type] = {}
_Adaptor = TypeVar("_Adaptor", bound=type)


def register_adaptor(name: str) -> Callable[[_Adaptor], _Adaptor]:
    """Return a decorator that registers a `CompilerInterface` as an adaptor in every process that imports its module.

    Args:
        name: The adaptor's name in a configuration: at most 40 lower-case letters, digits and underscores.

    Raises:
        ConfigError: The name is malformed, reserved by cgtool, or taken by another class.
    """
    _check_name(name, "an adaptor was registered")

    def register(adaptor: _Adaptor) -> _Adaptor:
        other = _registered.get(name, adaptor)
        if (other.__module__, other.__qualname__) != (adaptor.__module__, adaptor.__qualname__):
            raise ConfigError(
                f"{adaptor.__module__}.{adaptor.__qualname__} cannot be registered as the adaptor {name!r}, which is "
                f"already {other.__module__}.{other.__qualname__}. Choose another name.",
                path=name,
            )
        _registered[name] = adaptor
        return adaptor

    return register


def adaptor_names() -> tuple[str, ...]:
    """Return the names of all adaptors, cgtool's own first."""
    return (*ADAPTORS, *sorted({*_registered, *_installed()}))


def is_adaptor(name: str) -> bool:
    """Return whether there is an adaptor `name`. Entry points are read only if the process does not know it."""
    return name in _BUILTIN or name in _registered or name in _installed()


def is_kind(kind: str) -> bool:
    """Return whether an adaptor produces artifacts of this kind."""
    return kind in KINDS.values() or (kind not in _BUILTIN and is_adaptor(kind))


def adaptor_class(name: str) -> Any:
    """Import an adaptor's module and return its class.

    Raises:
        ConfigError: There is no such adaptor, or it cannot be imported.
    """
    if name in _registered:
        return _registered[name]
    if name in _BUILTIN:
        module, attribute = _BUILTIN[name]
        return getattr(import_module(module), attribute)
    if name not in _installed():
        raise ConfigError(
            f"There is no adaptor {name!r}; available are {', '.join(adaptor_names())}. Install the distribution that "
            f"provides it (entry-point group {GROUP}), or import the module that registers it.",
            expected=adaptor_names(),
            actual=name,
        )
    point = _installed()[name]
    try:
        return point.load()
    except Exception as error:  # third-party code can raise anything
        raise ConfigError(
            f"The adaptor {name!r} cannot be imported from {point.value}: {type(error).__name__}: {error}. Fix or "
            "remove the distribution that provides it.",
            path=name,
            actual=str(error),
        ) from error


@cache
def _installed() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # takes 10 ms or more; needed for third-party adaptors only

    installed: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        _check_name(point.name, f"the entry point {point.value} provides an adaptor")
        if installed.setdefault(point.name, point).value != point.value:
            raise ConfigError(
                f"Two distributions provide an adaptor {point.name!r}: {installed[point.name].value} and "
                f"{point.value}. Remove one of them.",
                path=point.name,
            )
    return installed


def _check_name(name: str, source: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(_NAME, name) or name in _BUILTIN or name in KINDS.values():
        raise ConfigError(
            f"{name!r}, under which {source}, is not a valid name. Use at most 40 lower-case letters, digits and "
            f"underscores, beginning with a letter, and none of {', '.join((*_BUILTIN, *KINDS.values()))}.",
            path=str(name),
            actual=name,
        )
