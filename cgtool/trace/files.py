"""The code that a trace went through: files by module and digest, functions by qualified name and digest.

Files of torch and of the standard library are left out, because the versions of torch and of Python are factors of
their own; their functions are not, because a program can replace them. Dynamo's own are: it traces them in the place of
what the model calls (a dataclass's making, say), the model itself never comes there, and to look at them a process that
loads would have to import Dynamo.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from cgtool.digests import sha256_hex
from cgtool.guards.code import code_digest
from cgtool.guards.names import find_qualified
from cgtool.guards.sources import SourceError, canonical_module_name
from cgtool.plan import Guard

_TRACER = "torch._dynamo"


def traced_sources(codes: Iterable[types.CodeType]) -> dict[str, str]:
    """Return {module: SHA-256 of its file} of the traced files that belong to the user."""
    modules = _modules_by_file()
    digests: dict[str, str] = {}
    for filename in sorted({code.co_filename for code in codes}):
        if is_covered_by_versions(filename):
            continue
        module = modules.get(os.path.realpath(filename))
        if module is not None:
            digests[module] = sha256_hex(Path(filename).read_bytes())
    return digests


def function_guards(codes: Iterable[types.CodeType]) -> tuple[Guard, ...]:
    """Return a guard on the code of every traced function that can be found again by its qualified name."""
    modules = _modules_by_file()
    guards: dict[str, Guard] = {}
    for code in codes:
        module = modules.get(os.path.realpath(code.co_filename))
        if module is None or "<" in code.co_qualname or f"{module}.".startswith(f"{_TRACER}."):
            continue
        name = f"{module}:{code.co_qualname}"
        digest = code_digest(code)
        if _function_digest(name) == digest:
            head, _, rest = code.co_qualname.partition(".")
            source = f"global:{module}:{head}" + (f".{rest}" if rest else "")
            guards.setdefault(source, Guard(source=source, kind="code", expected=digest))
    return tuple(guards.values())


def _function_digest(name: str) -> str | None:
    try:
        found: Any = find_qualified(name)
    except (AttributeError, SourceError):
        return None
    found = getattr(found, "__func__", found)
    code = getattr(found, "__code__", None)
    return code_digest(code) if code is not None else None


def _modules_by_file() -> dict[str, str]:
    files: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            files.setdefault(os.path.realpath(file), canonical_module_name(name))
    return files


def is_covered_by_versions(filename: str) -> bool:
    """Return whether a file is torch's or the standard library's, or none at all."""
    if filename.startswith("<"):
        return True
    path = os.path.realpath(filename)
    torch_root = str(Path(torch.__file__).resolve().parent) + os.sep
    library = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
    in_site = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
    return path.startswith(torch_root) or (path.startswith(library) and not in_site)
