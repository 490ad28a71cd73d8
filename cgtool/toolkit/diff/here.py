"""An entry and this machine: the factors of its key that a machine decides. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cgtool.plan.pieces import Json
from cgtool.store.key import Factor, Key
from cgtool.toolkit.diff.keys import factor_differences
from cgtool.toolkit.diff.records import Difference
from cgtool.toolkit.diff.traced import NOTHING_KNOWN

if TYPE_CHECKING:
    from cgtool.store.machine import Machine  # costs more to load than two entries to compare

#: Where the machine's None means that only torch could say, or that a machine without one serves all the same.
_UNKNOWN = frozenset({"compiler"})


def machine_differences(key: Key, machine: Machine) -> list[Difference]:
    """Return in which factors a machine differs from the one on which an entry was compiled.

    What the machine cannot say without torch is no difference, nor is a C++ compiler that it lacks.

    Args:
        key: The entry's.
        machine: This one.
    """
    stored, now = [], []
    for name, value in machine.factors.items():
        was = key.value(name)
        if any(factor.name == name for factor in key.factors) and not (value is None and name in _UNKNOWN):
            stored.append(Factor(name=name, value=was))
            now.append(Factor(name=name, value=_known(was, value) if name == "target" else value))
    return factor_differences(Key.of(stored), Key.of(now), lambda _: NOTHING_KNOWN)


def _known(stored: Json, value: Json) -> Json:
    """Return a machine's value with what it does not know taken as it is stored."""
    if value is None:
        return stored
    if isinstance(value, dict) and isinstance(stored, dict):
        return dict(_members(stored, value))
    return value


def _members(stored: dict[str, Json], value: dict[str, Json]) -> Iterator[tuple[str, Json]]:
    for name, now in value.items():
        if name in stored or now is not None:
            yield name, _known(stored.get(name), now)
