"""The code that a trace depends on: files by module and digest, distributions by version, functions by name and digest.

Files of torch and of the standard library are left out, because the versions of torch and of Python are separate
factors; their functions are included, because a program can replace them. Dynamo's functions are left out: it
substitutes them for the model's calls (such as the construction of a dataclass), the model itself never calls them, and
a load would have to import Dynamo to check them.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cgtool.guards.code import code_digest
from cgtool.guards.files import file_of, installed_versions
from cgtool.guards.sources import SourceError, canonical_module_name, find_qualified
from cgtool.plan.grammar import Record
from cgtool.plan.records import Guard
from cgtool.trace.closure import closure_of, is_covered_by_versions, module_of, modules_by_file, resolved, text_of
from cgtool.trace.variables_read import Read, may_read_environment, variables_read, variables_read_by_platform

_TRACER = "torch._dynamo"


class UserCode(Record, frozen=True, kw_only=True):
    """The user's code as factors of a key.

    Args:
        sources: {module: SHA-256 of its file}; None for a module that is imported but does not exist.
        distributions: {normalised name: version} of those that it imports or looks up; None if not installed.
        variables: The environment variables that it reads.
    """

    sources: dict[str, str | None]
    distributions: dict[str, str | None]
    variables: tuple[str, ...]


def user_code(
    codes: Iterable[types.CodeType],
    classes: Iterable[type],
    *,
    variables: Iterable[str],
    modules: Iterable[str],
    distributions: Iterable[str],
) -> UserCode:
    """Return the user's code that a trace depends on.

    Args:
        codes: The traced code.
        classes: The user's classes that the trace could have read; their base classes are included.
        variables: Environment variables that the code is known to have read.
        modules: Modules that the code looked up, whether they exist or not.
        distributions: Distributions that the code looked up, installed or not, by normalised name.

    Raises:
        TraceError: The code reads an environment variable whose name is computed.
    """
    by_file = modules_by_file()
    traced: dict[str, list[types.CodeType]] = {}
    platform: dict[str, list[types.CodeType]] = {}
    for code in codes:
        module = module_of(code, by_file)
        if module is None:
            continue
        if not is_covered_by_versions(code.co_filename):
            traced.setdefault(module, []).append(code)
        elif may_read_environment(code):
            platform.setdefault(module, []).append(code)
    inherited = {canonical_module_name(str(base.__module__)) for kind in classes for base in kind.__mro__}
    found = closure_of({*traced, *(name for name in inherited if file_of(name) is not None)}, asked=modules)
    # the imports of an installed distribution's module are not followed, but its environment reads count
    reads = {module: text.reads for module, text in found.texts.items()}
    reads |= _reads_of(module for module in traced if module not in reads)
    read = {*variables, *variables_read(reads, traced), *variables_read_by_platform(_reads_of(platform), platform)}
    return UserCode(
        sources=dict(sorted(found.digests.items())),
        distributions=dict(sorted({**installed_versions(distributions), **found.distributions}.items())),
        variables=tuple(sorted(read)),
    )


def joined(codes: Iterable[UserCode]) -> UserCode:
    """Return the union of the user's code of several traces."""
    found = list(codes)
    return UserCode(
        sources=dict(sorted(item for code in found for item in code.sources.items())),
        distributions=dict(sorted(item for code in found for item in code.distributions.items())),
        variables=tuple(sorted({name for code in found for name in code.variables})),
    )


def _reads_of(modules: Iterable[str]) -> dict[str, tuple[Read, ...]]:
    texts = ((module, text_of(Path(file).read_bytes())) for module in modules if (file := file_of(module)) is not None)
    return {module: text.reads for module, text in texts if text is not None}


def function_guards(codes: Iterable[types.CodeType]) -> tuple[Guard, ...]:
    """Return a guard on the code of every traced function that its qualified name resolves to."""
    by_file = modules_by_file()
    guards: dict[str, Guard] = {}
    for code in codes:
        module = by_file.get(resolved(code.co_filename))
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
