"""The files of modules and the versions of distributions, as they are on disk now. Must not import torch.

Modules are searched for as an import would, but neither they nor their parents are imported: a name in an untrusted
cache must not run code, and a module that the model imports lazily is not imported yet.
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

#: From this many files on, a second thread reads half of them.
_MANY_FILES = 64
#: Bytes per read; few files are larger.
_CHUNK_BYTES = 1 << 18


def source_digests(modules: Iterable[str]) -> dict[str, str | None]:
    """Return {module: SHA-256 of its file as it is on disk now}, None for a module or file that does not exist."""
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
    [descriptor] = opening(os.open, file, os.O_RDONLY | os.O_CLOEXEC)  # eight times faster than Path.read_bytes
    try:
        parts = [os.read(descriptor, _CHUNK_BYTES)]
        while parts[-1]:
            parts.append(os.read(descriptor, _CHUNK_BYTES))
    finally:
        os.close(descriptor)
    return sha256_hex(b"".join(parts))


def file_of(name: str, specs: dict[str, ModuleSpec | None] | None = None) -> str | None:
    """Return the file that a module was imported from, or that an import would load.

    Args:
        name: Its dotted name; the running script is found by its import name.
        specs: A cache of the specs found so far, for looking up many modules.
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
    """Return the spec of a module without importing anything; None if it cannot be found.

    Args:
        name: Its dotted name.
        path: The search path for top-level modules; None means `sys.path`.
        specs: A cache of the specs found so far on that path, by name; this call adds to it.
    """
    specs = {} if specs is None else specs
    imported = sys.modules if path is None else {}
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        whole = ".".join(parts[:count])
        if whole not in specs:
            specs[whole] = _search(whole, path)
        spec = specs[whole]
        if spec is None:
            return None
        if whole in imported:
            path = getattr(imported[whole], "__path__", ())
        else:
            path = list(spec.submodule_search_locations or ())
    return spec


def _search(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    # Editable installs add finders that map names to paths and run nothing.
    editable = [finder for finder in sys.meta_path if getattr(finder, "__module__", "").startswith("__editable__")]
    finders: list[Any] = [PathFinder, *editable]
    for finder in finders:
        with contextlib.suppress(Exception):  # third-party code; a finder that fails has not found the module
            spec: ModuleSpec | None = finder.find_spec(name, path)
            if spec is not None:
                return spec
    # PathFinder finds a nested namespace package only if its parent was imported.
    leaf = name.rpartition(".")[2]
    folders = [folder for above in path or () if os.path.isdir(folder := os.path.join(above, leaf))]  # noqa: PTH112, PTH118
    if not folders:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = folders
    return namespace


def installed_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Return {distribution: its installed version}, None for one that is not installed.

    Args:
        names: Normalised names, as `installed_in` returns them.
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
    """Return {normalised name: metadata folder} of the distributions in a folder, from its listing alone."""
    try:
        return _listed(folder or ".", os.stat(folder or ".").st_mtime_ns)  # noqa: PTH116 - a str: this is on the load path
    except OSError:
        return {}


@functools.lru_cache(maxsize=64)
def _listed(folder: str, _mtime_ns: int) -> dict[str, str]:
    records = [entry for entry in os.listdir(folder) if entry.endswith((".dist-info", ".egg-info"))]  # noqa: PTH208
    # Metadata without a version belongs to a checkout.
    return {normalised(entry.partition("-")[0]): entry for entry in records if "-" in os.path.splitext(entry)[0]}  # noqa: PTH122


def version_of(record: str) -> str:
    """Return the version in the name of a metadata folder: "Foo-1.5.dist-info", "foo-1.5-py3.11.egg-info"."""
    return record.rpartition(".")[0].partition("-")[2].partition("-py")[0]


def normalised(name: str) -> str:
    """Return a distribution's normalised name: `Foo.Bar_baz` becomes `foo-bar-baz`."""
    result = name.lower().replace("_", "-").replace(".", "-")  # no regex: a load normalises every installed name
    while "--" in result:
        result = result.replace("--", "-")
    return result
