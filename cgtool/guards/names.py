"""How types and functions are named in every record: `module:Qualname`, in every process alike. No torch here."""

from __future__ import annotations

from typing import Any

from cgtool.guards.sources import canonical_module_name, find_module


def qualified_name(thing: Any) -> str:
    """Return `module:Qualname` of a class or function; the running script goes by its import name."""
    module = getattr(thing, "__module__", None) or ""
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or type(thing).__name__
    return f"{canonical_module_name(module)}:{name}"


def find_qualified(name: str) -> Any:
    """Return the class or function that `qualified_name` named.

    Raises:
        SourceError: Its module cannot be imported here.
        AttributeError: The module has no such name any more.
    """
    module, _, path = name.partition(":")
    found: Any = find_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
