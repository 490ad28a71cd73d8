"""The files of modules and the versions of distributions, as they are on disk now. Must not import torch.

A module is looked for as an import would, and neither it nor what is above it is imported: a name in a stranger's cache
must not run anything, and what a model imports late has not been imported yet.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from cgtool.guards.sources import canonical_module_name
from cgtool.host import on_two_threads, opening
from cgtool.plan.grammar import sha256_hex

#: From this many files on a second thread reads half of them.
_MANY_FILES = 64
#: How many bytes of a file are read at once; few hold more.
_AT_ONCE = 1 << 18


def sources_now(modules: Iterable[str]) -> dict[str, str | None]:
    """Return {module: SHA-256 of its file as it is on disk now}, None where there is no such module or file."""
    specs: dict[str, ModuleSpec | None] = {}
    files = {name: file_of(name, specs) for name in modules}
    digests: dict[str, str | None] = dict.fromkeys(files)

    def read(names: Sequence[str]) -> None:
        for name in names:
            file = files[name]
            if file is not None:
                with contextlib.suppress(OSError):
                    digests[name] = _digest(file)

    if len(files) < _MANY_FILES:
        read(list(files))
    else:
        on_two_threads(read, list(files))
    return digests


def _digest(file: str) -> str:
    [descriptor] = opening(os.open, file, os.O_RDONLY | os.O_CLOEXEC)  # an eighth of the time of Path's
    try:
        parts = [os.read(descriptor, _AT_ONCE)]
        while parts[-1]:
            parts.append(os.read(descriptor, _AT_ONCE))
    finally:
        os.close(descriptor)
    return sha256_hex(b"".join(parts))


def file_of(name: str, specs: dict[str, ModuleSpec | None] | None = None) -> str | None:
    """Return the file of a module: where it was imported from, or else where an import would find it.

    Args:
        name: Its dotted name; the running script answers to its own.
        specs: What was found before, for who asks for many.
    """
    module = sys.modules.get(name)
    if module is None and canonical_module_name("__main__") == name:
        module = sys.modules["__main__"]
    if module is not None:
        file = getattr(module, "__file__", None)
        return file if isinstance(file, str) else None
    spec = find_spec(name, specs=specs)
    return spec.origin if spec is not None and spec.has_location else None


def find_spec(
    name: str, path: Sequence[str] | None = None, *, specs: dict[str, ModuleSpec | None] | None = None
) -> ModuleSpec | None:
    """Return where an import would find a module, importing nothing; None where it cannot be found so.

    Args:
        name: Its dotted name.
        path: Where top-level modules are looked for; None takes `sys.path`.
        specs: What was found before on that path, by name; what is found now is added.
    """
    specs = {} if specs is None else specs
    imported = sys.modules if path is None else {}
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        whole = ".".join(parts[:count])
        if whole not in specs:
            specs[whole] = _found(whole, path)
        spec = specs[whole]
        if spec is None:
            return None
        if whole in imported:
            path = getattr(imported[whole], "__path__", ())
        else:
            path = list(spec.submodule_search_locations or ())
    return spec


def _found(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    # Packages that are installed in place bring finders of their own, which map names to paths and run nothing.
    editable = [finder for finder in sys.meta_path if getattr(finder, "__module__", "").startswith("__editable__")]
    finders: list[Any] = [PathFinder, *editable]
    for finder in finders:
        with contextlib.suppress(Exception):  # a hook of another package; what it cannot find is not found
            spec: ModuleSpec | None = finder.find_spec(name, path)
            if spec is not None:
                return spec
    # Python's own finder knows a package without a file only where what is above it was imported.
    leaf = name.rpartition(".")[2]
    folders = [folder for above in path or () if os.path.isdir(folder := os.path.join(above, leaf))]  # noqa: PTH112, PTH118
    if not folders:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = folders
    return namespace


def distributions_now(names: Iterable[str]) -> dict[str, str | None]:
    """Return {distribution: its version as it is installed now}, None where it is not.

    Args:
        names: Normalised names, as `installed_in` gives them.
    """
    versions: dict[str, str | None] = dict.fromkeys(names)
    for folder in sys.path:
        missing = [name for name, version in versions.items() if version is None]
        if not missing:
            break
        found = installed_in(folder)
        versions.update({name: version_of(found[name]) for name in missing if name in found})
    return versions


def installed_in(folder: str) -> dict[str, str]:
    """Return {normalised name: its record's file name} of what is installed in a folder, by its listing alone."""
    try:
        return _listed(folder or ".", os.stat(folder or ".").st_mtime_ns)  # noqa: PTH116 - a str, on the way of a load
    except OSError:
        return {}


@functools.lru_cache(maxsize=64)
def _listed(folder: str, _mtime_ns: int) -> dict[str, str]:
    records = [entry for entry in os.listdir(folder) if entry.endswith((".dist-info", ".egg-info"))]  # noqa: PTH208
    # One without a version belongs to a checkout.
    return {normalised(entry.partition("-")[0]): entry for entry in records if "-" in os.path.splitext(entry)[0]}  # noqa: PTH122


def version_of(record: str) -> str:
    """Return the version that a record's file name tells: "Foo-1.5.dist-info", "foo-1.5-py3.11.egg-info"."""
    return record.rpartition(".")[0].partition("-")[2].partition("-py")[0]


def normalised(name: str) -> str:
    """Return the one spelling of a distribution's name: `Foo.Bar_baz` is `foo-bar-baz`."""
    spelled = name.lower().replace("_", "-").replace(".", "-")  # a load asks for each of what is installed
    while "--" in spelled:
        spelled = spelled.replace("--", "-")
    return spelled
