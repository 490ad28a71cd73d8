"""Which entries are stale: a load would miss whatever it is given. Must not import torch; runs no code of a model.

cgtool's own code, torch, triton, Python or the target differ from the entry's factors, a traced source file has other
bytes, or an older version of cgtool wrote it. A module that cannot be found from here may be found by the program that
loads, so nothing is concluded from it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from cgtool.errors import CacheError, CacheSchemaError
from cgtool.guards.files import find_spec
from cgtool.plan.grammar import sha256_hex
from cgtool.store.key import difference_between, read_key, sentences
from cgtool.store.layout import CacheLayout
from cgtool.store.machine import Machine, differences_here, this_machine
from cgtool.store.records import Key

#: The factors that a machine and what is installed on it decide.
_FACTORS = ("cgtool", "torch", "triton", "python", "target")


class StaleFinder:
    """Compares entries with this machine."""

    def __init__(self, layout: CacheLayout, *, pythonpath: Sequence[str] = (), machine: Machine | None = None) -> None:
        self._layout = layout
        self._path = [*pythonpath, *_importable()]
        self._machine = machine
        self._digests: dict[str, str | None] = {}

    def of(self, hash_: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return why an entry is stale, and what could not be told; never raises on account of what is in it."""
        try:
            key = read_key(self._layout, hash_)
        except CacheSchemaError as error:
            return (str(error),), ()
        except CacheError as error:
            return (), (str(error),)
        if key is None:
            return (), ("it has no key.json",)
        changed, unknown = self._sources(key)
        return tuple(dict.fromkeys((*changed, *self._machine_reasons(key)))), unknown

    @functools.cached_property
    def _here(self) -> Machine:
        return self._machine or this_machine()  # which starts a compiler, and only `stale` asks

    def _machine_reasons(self, key: Key) -> tuple[str, ...]:
        if self._here.torch is None:
            return ()  # a machine without torch runs none of it, and was not meant to
        return sentences([one for one in differences_here(key, self._here) if one.factor in _FACTORS])

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
            spec = find_spec(module, self._path)
            file = spec.origin if spec is not None and spec.has_location else None
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
        first = int("-m" in sys.orig_argv and sys.path[:1] == [str(Path.cwd())])
    return [folder for folder in sys.path[first:] if folder]
