"""Which modules a worker must import before a piece means to it what it means here: those that register its ops.

A module that is `__main__`, or that no file was read for, exists in one process only: a piece that needs it stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cgtool.build.workers import _torch
from cgtool.build.workers.unit import StaysHereError
from cgtool.guards import _torch as guards_private
from cgtool.guards.ops import op_digest
from cgtool.pieces import Json
from cgtool.runtime.custom_ops import provider_of

#: Packages whose modules every worker has.
_OURS = ("torch", "cgtool")


def imports_for(ops: Iterable[str], adaptor: object) -> tuple[dict[str, Json], ...]:
    """Return the modules to import for a piece with these custom ops and an adaptor.

    Returns:
        Items as `cgtool.build.imports` takes them.

    Raises:
        StaysHereError: One of them is not to be found by another process.
    """
    names: dict[str, None] = {}
    for op in ops:
        found = dict.fromkeys(_providers(op))
        if not found:
            raise StaysHereError(f"no module is known to register the op {op}", path=op)
        names.update(found)
    names[type(adaptor).__module__] = None
    return tuple(_found(name) for name in names if name.partition(".")[0] not in _OURS)


def why_ops_differ(ops: dict[str, str]) -> str | None:
    """Return why the custom ops here are not those that a piece was traced with, or None."""
    for name, digest in ops.items():
        if guards_private.find_op(name) is None:
            return f"importing its modules registers no op {name}"
        if op_digest(name) != digest:
            return f"the op {name} has another schema or fake implementation in a fresh process"
    return None


def _providers(op: str) -> Iterator[str]:
    """Yield the names of the modules that registered an op, as far as they can be known."""
    provider = provider_of(op.partition(".")[0])
    if provider is not None:
        yield provider
        return
    found = guards_private.find_op(op)
    if found is None:
        return
    files = {place.rpartition(":")[0] for place in _torch.places_of(op)}
    written = [guards_private.fake_implementation(found), _torch.author_of(op)]
    yield from (function.__module__ for function in written if getattr(function, "__module__", None))
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) in files and name.partition(".")[0] not in _OURS:
            yield name


def _found(name: str) -> dict[str, Json]:
    module = sys.modules.get(name)
    if name == "__main__" or module is None:
        raise StaysHereError(f"the module {name} exists in this process only", path=name)
    file = getattr(module, "__file__", None)
    if file is None:
        raise StaysHereError(f"the module {name} was read from no file", path=name)
    return {"module": name, "file": None if _is_findable(name, file) else str(Path(file).resolve())}


def _is_findable(name: str, file: str) -> bool:
    """Return whether an import statement finds this very file by the name."""
    finders: list[Any] = [*sys.meta_path]
    path: Any = None
    parent = name.rpartition(".")[0]
    if parent:
        path = getattr(sys.modules.get(parent), "__path__", None)
        if path is None or not _is_findable(parent, getattr(sys.modules[parent], "__file__", None) or ""):
            return False
    for finder in finders:
        spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)
    return False
