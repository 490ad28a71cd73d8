"""The code that a trace rests on: files by module and digest, distributions by version, functions by name and digest.

Files of torch and of the standard library are left out, because the versions of torch and of Python are factors of
their own; their functions are not, because a program can replace them. Dynamo's own are: it traces them in the place of
what the model calls (a dataclass's making, say), the model itself never comes there, and to look at them a process that
loads would have to import Dynamo.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgtool.guards.code import code_digest
from cgtool.guards.files import file_of
from cgtool.guards.names import find_qualified
from cgtool.guards.sources import SourceError, canonical_module_name
from cgtool.plan.records import Guard
from cgtool.trace.closure import closure_of, is_covered_by_versions, modules_by_file, parse
from cgtool.trace.variables_read import variables_read

_TRACER = "torch._dynamo"


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """What the user wrote, as factors of a key.

    Args:
        sources: {module: SHA-256 of its file}; None for one that is imported and is not there.
        distributions: {normalised name: version} of what it imports.
        variables: The variables of the environment that it reads.
    """

    sources: Mapping[str, str | None]
    distributions: Mapping[str, str]
    variables: tuple[str, ...]


def user_code(codes: Iterable[types.CodeType], classes: Iterable[type], variables: Iterable[str] = ()) -> UserCode:
    """Return the user's code that a trace rests on.

    Args:
        codes: The code that the trace went through.
        classes: The classes of the objects that it touched; those that they inherit from count with them.
        variables: The variables of the environment that it is known to have read.

    Raises:
        TraceError: The code reads a variable of the environment whose name is computed.
    """
    modules = modules_by_file()
    traced: dict[str, list[types.CodeType]] = {}
    for code in codes:
        module = modules.get(os.path.realpath(code.co_filename))
        if module is not None and not is_covered_by_versions(code.co_filename):
            traced.setdefault(module, []).append(code)
    inherited = {canonical_module_name(str(base.__module__)) for kind in classes for base in kind.__mro__}
    found = closure_of({*traced, *(name for name in inherited if file_of(name) is not None)})
    trees = dict(found.trees)
    for module in traced:  # one of an installed distribution is not followed, and read all the same
        file = file_of(module)
        if module not in trees and file is not None and (tree := parse(Path(file).read_bytes())) is not None:
            trees[module] = tree
    return UserCode(
        sources=dict(sorted(found.digests.items())),
        distributions=dict(sorted(found.distributions.items())),
        variables=tuple(sorted({*variables, *variables_read(trees, traced)})),
    )


def function_guards(codes: Iterable[types.CodeType]) -> tuple[Guard, ...]:
    """Return a guard on the code of every traced function that can be found again by its qualified name."""
    modules = modules_by_file()
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
