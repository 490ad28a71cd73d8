"""Find stale entries, which every load would miss. Must not import torch; runs no code of a model.

An entry is stale if cgtool's own code, torch, triton, Python or the target differ from its factors, if a traced source
file has changed, or if an older version of cgtool wrote it. A module that is not found here may be found by the loading
program, so it does not count as changed.
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

#: The factors that depend on the machine and the installed software.
_FACTORS = ("cgtool", "torch", "triton", "python", "target")


class StaleFinder:
    """Compares entries with this machine and its source files."""

    def __init__(self, layout: CacheLayout, *, pythonpath: Sequence[str] = (), machine: Machine | None = None) -> None:
        self._layout = layout
        self._path = [*pythonpath, *_importable()]
        self._machine = machine
        self._digests: dict[str, str | None] = {}

    def reasons(self, hash_: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return why an entry is stale, and what could not be determined; never raises for damaged entries."""
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
        return self._machine or this_machine()  # lazy: it starts a compiler

    def _machine_reasons(self, key: Key) -> tuple[str, ...]:
        if self._here.torch is None:
            return ()  # a machine without torch is not meant to load entries
        return sentences([found for found in differences_here(key, self._here) if found.factor in _FACTORS])

    def _sources(self, key: Key) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what changed, and which modules were not found."""
        stored = key.value("sources")
        if not isinstance(stored, dict):
            return (), ()
        now = {name: self._digest(name) for name in stored}
        missing = tuple(f"the module {name} cannot be found here" for name in stored if now[name] is None)
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
    """Return `sys.path` without the working directory, whose files are not the model's unless requested."""
    # `python -m` inserts the absolute path first; any further occurrence was requested by the user.
    first = 0
    with contextlib.suppress(OSError):  # the working directory may be gone
        first = int("-m" in sys.orig_argv and sys.path[:1] == [str(Path.cwd())])
    return [folder for folder in sys.path[first:] if folder]
