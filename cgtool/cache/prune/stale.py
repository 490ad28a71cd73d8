"""Which entries cannot serve on this machine any more, found without torch and without running any code of a model.

An entry is stale where a load would miss whatever it is given: torch, triton, Python or the target differ from the
entry's factors, a traced source file has other bytes, or an older version of cgtool wrote it. A module that cannot be
found from here may be found by the program that loads, so nothing is concluded from it. Modules are looked for without
importing what is above them, since a name in a stranger's cache must not run anything. Must not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgtool.cache.key import Key, difference_between, read_key, sentences
from cgtool.cache.layout import CacheLayout
from cgtool.cache.prune.collect import EntryFacts
from cgtool.cache.prune.records import unique
from cgtool.digests import sha256_hex
from cgtool.errors import CacheError, CacheSchemaError
from cgtool.pieces import Json
from cgtool.records import dataclass

if TYPE_CHECKING:
    from cgtool.cache.machine import Machine

_FACTORS = ("torch", "triton", "python", "target")


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """What is known of one entry.

    Args:
        reasons: Why it is stale; none where nothing says so.
        unknown: What could not be told from here.
    """

    reasons: tuple[str, ...]
    unknown: tuple[str, ...]


class StaleFinder:
    """Compares entries with this machine.

    Args:
        layout: Where the cache lies.
        pythonpath: Folders in which modules are looked for first.
        machine: This machine; None asks it.
    """

    def __init__(self, layout: CacheLayout, *, pythonpath: Sequence[str] = (), machine: Machine | None = None) -> None:
        self._layout = layout
        self._path = [*pythonpath, *_importable()]
        self._machine = machine
        self._digests: dict[str, str | None] = {}

    @functools.cached_property
    def _factors(self) -> dict[str, Json]:
        from cgtool.cache.machine import this_machine  # which only `stale` asks

        return (self._machine or this_machine()).factors

    def of(self, entry: EntryFacts) -> Staleness:
        """Return whether an entry is stale; never raises on account of what is in it."""
        try:
            key = read_key(self._layout, entry.hash)
        except CacheSchemaError as error:
            return Staleness(reasons=(str(error),), unknown=())
        except CacheError as error:
            return Staleness(reasons=(), unknown=(str(error),))
        if key is None:
            return Staleness(reasons=(), unknown=("it has no key.json",))
        source_reasons, unknown = self._sources(key)
        return Staleness(reasons=unique((*source_reasons, *self._machine_reasons(key))), unknown=unknown)

    def _machine_reasons(self, key: Key) -> tuple[str, ...]:
        if self._factors["torch"] is None:
            return ()  # a machine without torch runs none of it, and was not meant to
        reasons: list[str] = []
        for factor in key.factors:
            if factor.name in _FACTORS:
                now = self._factors[factor.name]
                known = now if factor.name == "triton" else _as_far_as_known(factor.value, now)
                reasons += sentences(difference_between(factor.name, factor.value, known))
        return tuple(reasons)

    def _sources(self, key: Key) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What changed, and the modules that cannot be found."""
        stored = key.value("sources")
        if not isinstance(stored, dict):
            return (), ()
        now = {name: self._digest(name) for name in stored}
        missing = tuple(f"the module {name} cannot be found from here" for name in stored if now[name] is None)
        found = {name: digest for name, digest in now.items() if digest is not None}
        return sentences(difference_between("sources", {name: stored[name] for name in found}, found)), missing

    def _digest(self, module: str) -> str | None:
        if module not in self._digests:
            file = find_source(module, self._path)
            try:
                self._digests[module] = None if file is None else sha256_hex(Path(file).read_bytes())
            except OSError:
                self._digests[module] = None
        return self._digests[module]


def _importable() -> list[str]:
    """`sys.path` without the current folder: what lies in it by chance is not what a model was traced from."""
    # `python -m` puts it first by its name; a second time it is there because somebody asked for it.
    first = 0
    with contextlib.suppress(OSError):  # the current folder may be gone
        first = int("-m" in sys.orig_argv and sys.path[:1] == [os.getcwd()])  # noqa: PTH109 - a str
    return [folder for folder in sys.path[first:] if folder]


def find_source(module: str, path: Sequence[str]) -> str | None:
    """Return the file of a module, without importing anything; None where it cannot be found so.

    Args:
        module: Its dotted name.
        path: Where top-level modules are looked for, as `sys.path`.
    """
    above, found = path, None
    names = module.split(".")
    for count in range(1, len(names) + 1):
        found = _spec(".".join(names[:count]), above)
        if found is None:
            return None
        above = list(found.submodule_search_locations or ())
    return found.origin if found is not None and found.has_location else None


def _spec(name: str, path: Sequence[str]) -> ModuleSpec | None:
    # Packages that are installed in place bring finders of their own, which map names to paths and run nothing.
    editable = [finder for finder in sys.meta_path if getattr(finder, "__module__", "").startswith("__editable__")]
    finders: list[Any] = [PathFinder, *editable]
    for finder in finders:
        with contextlib.suppress(Exception):  # a hook of another package; what it cannot find is not found
            spec: ModuleSpec | None = finder.find_spec(name, path)
            if spec is not None:
                return spec
    return None


def _as_far_as_known(stored: Json, now: Json) -> Json:
    """The facts of this machine, with the stored ones in the places of those that only torch could tell."""
    if now is None:
        return stored
    if isinstance(stored, dict) and isinstance(now, dict):
        return {name: _as_far_as_known(value, now.get(name)) for name, value in stored.items()}
    return now
