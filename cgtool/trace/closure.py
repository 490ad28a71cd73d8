"""The user's code that a trace depends on: the files of traced code and, recursively, the user's modules they import.

Other imports lead to an installed distribution, which is recorded by name and version, or to torch or the standard
library, whose versions are separate factors. An editable install is user code. Imports are read from the source, so
they count wherever they are: in a function, under a condition, after `try`. A module that is imported but does not
exist is recorded as None, because the model would use it if it existed.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import msgspec
import torch

from cgtool.guards.files import file_of, find_spec, installed_in, normalised, version_of
from cgtool.guards.sources import canonical_module_name
from cgtool.plan.grammar import sha256_hex
from cgtool.trace.variables_read import Read, parse, reads_in

#: Distributions whose versions are separate factors.
_FACTORS = frozenset({"torch", "cgtool"})
_FROZEN = re.compile(r"<frozen ([\w.]+)>")


@dataclass(frozen=True)
class Import:
    """An import: `module` is relative if `level` is not 0, and `names` are those after `from ... import`."""

    level: int
    module: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Text:
    """The imports and the environment reads of a Python file."""

    imports: tuple[Import, ...]
    reads: tuple[Read, ...]


class Closure(msgspec.Struct, frozen=True, kw_only=True):
    """The import closure of some modules.

    Args:
        digests: {module: SHA-256 of its file, None if it does not exist} of the modules and of the user's modules that
            they import.
        distributions: {normalised name: version} of the installed distributions that these import.
        texts: The imports and environment reads of the user's modules.
    """

    digests: dict[str, str | None]
    distributions: dict[str, str]
    texts: dict[str, Text]


def closure_of(modules: Iterable[str], *, asked: Iterable[str] = ()) -> Closure:
    """Return the import closure of modules.

    Args:
        modules: The modules of traced code, by their canonical names.
        asked: Further modules that the code looked up, whether they exist or not.
    """
    found = Closure(digests={}, distributions={}, texts={})
    traced = set(modules)
    seen = traced.union(asked)
    pending = sorted(seen)
    while pending:
        name = pending.pop()
        for other in _add(found, name, is_traced=name in traced):
            if other not in seen:
                seen.add(other)
                pending.append(other)
    return found


def _add(found: Closure, name: str, *, is_traced: bool) -> Iterator[str]:
    """Add a module to the closure; yield the names of the modules that it imports, if it is the user's."""
    file = file_of(name)
    if file is None:
        if not _exists(name):
            found.digests[name] = None
        return
    if is_covered_by_versions(file) or name.partition(".")[0] in _FACTORS:
        return
    distributions = _distributions_with(name, file)
    found.distributions.update(distributions)
    if is_traced or not distributions:
        try:
            data = Path(file).read_bytes()
        except OSError:
            return
        found.digests[name] = sha256_hex(data)
        if not distributions and (text := text_of(data)) is not None:
            found.texts[name] = text
            yield from _imported(text, name, is_package=Path(file).name.startswith("__init__."))


def _exists(name: str) -> bool:
    """Return whether a module without a file exists: a namespace package, or a built-in module."""
    return name in sys.modules or name.partition(".")[0] in sys.stdlib_module_names or find_spec(name) is not None


@functools.lru_cache(maxsize=256)
def text_of(data: bytes) -> Text | None:
    """Return the imports and environment reads of a file, or None if it is not Python.

    Cached, because every variant is traced separately.
    """
    tree = parse(data)
    return None if tree is None else Text(tuple(_imports_in(tree)), tuple(reads_in(tree)))


def _imports_in(tree: ast.Module) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield Import(node.level, node.module or "", tuple(alias.name for alias in node.names))
        elif isinstance(node, ast.Call) and (literal := _import_by_name(node)) is not None:
            yield Import(0, literal)


def _imported(text: Text, name: str, *, is_package: bool) -> Iterator[str]:
    """Yield the names of the modules that a module imports, and of their parent packages."""
    package = name if is_package else name.rpartition(".")[0]
    for statement in text.imports:
        base = _absolute(statement.module, statement.level, package)
        if base is not None:
            yield from itertools.accumulate(base.split("."), "{}.{}".format)
            yield from (f"{base}.{part}" for part in statement.names if find_spec(f"{base}.{part}") is not None)


def _absolute(module: str, level: int, package: str) -> str | None:
    """Return the absolute name of an imported module; None if a relative import leaves its top-level package."""
    if level == 0:
        return module
    parts = package.split(".")
    if not package or level > len(parts):
        return None
    base = ".".join(parts[: len(parts) - level + 1])
    return f"{base}.{module}" if module else base


def _import_by_name(call: ast.Call) -> str | None:
    """Return the module that `importlib.import_module("m")` or `__import__("m")` names by a constant."""
    function = call.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    first = call.args[0] if call.args else None
    if called not in {"import_module", "__import__"} or not isinstance(first, ast.Constant):
        return None
    literal = first.value
    return literal if isinstance(literal, str) and literal and not literal.startswith(".") else None


def _distributions_with(name: str, file: str) -> dict[str, str]:
    """Return {distribution: version} of the distributions that installed a module; empty for the user's own."""
    path = Path(file).absolute()
    above = name.count(".") + (path.stem == "__init__")
    if above >= len(path.parents):
        return {}
    folder = path.parents[above]
    installed = installed_in(str(folder))
    top = name.partition(".")[0]
    likely = normalised(top)
    if likely in installed and top in _tops(folder / installed[likely]):
        return {likely: version_of(installed[likely])}
    return {other: version_of(record) for other, record in installed.items() if top in _tops(folder / record)}


@functools.lru_cache(maxsize=1024)
def _tops(record: Path) -> frozenset[str]:
    """Return the top-level modules that a distribution installed; empty for an editable install."""
    try:
        if '"editable": true' in _text(record / "direct_url.json"):
            return frozenset()
        lines = _text(record / "RECORD").splitlines() or _text(record / "top_level.txt").splitlines()
    except OSError:
        return frozenset()
    return frozenset(line.split("/", 1)[0].split(",", 1)[0].partition(".")[0] for line in lines)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


#: The last result of `modules_by_file`, and the modules that it was computed from.
_by_file: tuple[dict[str, ModuleType], Mapping[str, str]] = ({}, {})


def modules_by_file() -> Mapping[str, str]:
    """Return {resolved file: canonical name} of the imported modules.

    Cached until an import changes `sys.modules`: every trace asks three times, and visiting all modules takes 10 ms.
    """
    global _by_file  # replaced as a whole, so threads at worst compute it twice
    modules, files = _by_file
    if modules != sys.modules:
        modules = dict(sys.modules)
        found: dict[str, str] = {}
        for name, module in modules.items():
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.endswith(".py"):
                found.setdefault(resolved(file), canonical_module_name(name))
        _by_file, files = (modules, found), found
    return files


@functools.cache
def resolved(file: str) -> str:
    """Return the real path of a source file. Cached: a trace resolves thousands of modules three times."""
    folder, base = os.path.split(file)
    path = f"{_resolved_folder(folder)}{os.sep}{base}"
    return os.path.realpath(path) if Path(path).is_symlink() else path


@functools.cache
def _resolved_folder(folder: str) -> str:
    return os.path.realpath(folder)


def module_of(code: types.CodeType, by_file: Mapping[str, str]) -> str | None:
    """Return the module that contains code, including modules frozen into Python."""
    frozen = _FROZEN.fullmatch(code.co_filename)
    return frozen[1] if frozen is not None else by_file.get(resolved(code.co_filename))


def is_covered_by_versions(filename: str) -> bool:
    """Return whether a file belongs to torch or the standard library, or is not a real file."""
    if filename.startswith("<"):
        return True
    path = resolved(filename)
    torch_root, library = _versioned_folders()
    return path.startswith(torch_root) or (path.startswith(library) and not _is_in_site(path))


def is_installed(filename: str) -> bool:
    """Return whether a file belongs to torch, the standard library or an installed package, or is not a real file."""
    return is_covered_by_versions(filename) or _is_in_site(resolved(filename))


def _is_in_site(path: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path


@functools.cache
def _versioned_folders() -> tuple[str, str]:
    """Return the folders of torch and of the standard library, each with a trailing slash."""
    roots = (str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"])
    return os.path.realpath(roots[0]) + os.sep, os.path.realpath(roots[1]) + os.sep
