"""Sources as Python: how generated code reads the object that a source of the plan names, at every call anew."""

from __future__ import annotations

import contextlib
import keyword
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from cgtool.guards.sources import Accessor, Roots, Source, find_module, parse_source
from cgtool.runtime.generate import Code, malformed


class Reader:
    """Writes the reading of sources into a function.

    Args:
        code: The function that is being written.
        module: The live model.
        method: Its bound method that was traced.
        arguments: Root locals of the call → names of the function's parameters.
    """

    def __init__(self, code: Code, module: Any, method: Any, arguments: Mapping[str, str] | None = None) -> None:
        self._code = code
        self._module = module
        self._method = method
        self._arguments = arguments or {}

    def read(self, text: str) -> str:
        """Return an expression for the object that `text` names; it raises as the access does when the object is gone.

        Modules on the way from the model are looked up now and bound, so the function must be written anew when the
        module tree changes. Their parameters, buffers and other attributes are read when the function runs.

        Raises:
            SourceError: The source is malformed, or a module on its way is gone.
            ArtifactError: It names an argument that the model's method does not have.
        """
        source = parse_source(text)
        if source.root == "self":
            return self._from_module(source)
        return self._chain(self._root(source), source.accessors)

    def _root(self, source: Source) -> str:
        constant = self._code.constant
        if source.root == "arg":
            if source.names[0] not in self._arguments:
                raise malformed("name of an argument of this model", source.text)
            return self._arguments[source.names[0]]
        if source.root == "global":
            return f"{constant(vars(find_module(source.names[0])))}[{constant(source.names[1])}]"
        if source.root == "module":
            return constant(find_module(source.names[0]))
        if source.root == "free":
            return f"{constant(_resolver(self._module, self._method, source.text))}()"
        raise malformed("source of an object", source.text)

    def _from_module(self, source: Source) -> str:
        base, used = walk(self._module, source)
        rest = source.accessors[used:]
        where = _holder(base, rest[0]) if rest else None
        if where is None:
            return self._chain(self._code.constant(base), rest)
        return self._chain(f"{self._code.constant(where)}[{self._code.constant(rest[0].key)}]", rest[1:])

    def _chain(self, text: str, accessors: tuple[Accessor, ...]) -> str:
        constant = self._code.constant
        for accessor in accessors:
            key = accessor.key
            if accessor.word == "attr" and str(key).isidentifier() and not keyword.iskeyword(str(key)):
                text = f"{text}.{key}"
            elif accessor.word == "attr":
                text = f"{constant(getattr)}({text}, {constant(key)})"
            elif accessor.word == "item":
                text = f"{text}[{key if type(key) is int else constant(key)}]"
            elif accessor.word == "type":
                text = f"{constant(type)}({text})"
            elif accessor.word == "call":
                text = f"{constant(_referent)}({text})"
            else:
                text = f"{constant(_LISTED[accessor.word])}({text}, {key})"
        return text


def walk(module: Any, source: Source) -> tuple[Any, int]:
    """Return the last submodule on the way from `module` along `source`, and how many accessors lead to it."""
    base = module
    for index, accessor in enumerate(source.accessors):
        child = _child(base, accessor)
        if child is None:
            return base, index
        base = child
    return base, len(source.accessors)


def place(module: Any, text: str) -> tuple[dict[str, Any], str] | None:
    """Return the dict and the key under which a module of the model holds what `text` names.

    Returns:
        None when the source is no parameter, buffer or plain attribute of a module.

    Raises:
        SourceError: The source is malformed.
    """
    source = parse_source(text)
    if source.root != "self":
        return None
    base, used = walk(module, source)
    if used != len(source.accessors) - 1:
        return None
    holder = _holder(base, source.accessors[-1])
    return None if holder is None else (holder, str(source.accessors[-1].key))


class Places:
    """Where a model holds what sources name; modules on the way are looked up once.

    Args:
        module: The live model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: dict[str, nn.Module | None] = {"self": module}

    def place(self, text: str) -> tuple[dict[str, Any], str] | None:
        """Return what the function `place` returns."""
        owner, _, key = text.rpartition(".")
        if "[" in text or "|" in text or (base := self.module(owner)) is None:
            return place(self._module, text)
        for holder in (base._parameters, base._buffers, vars(base)):  # noqa: SLF001 - read as torch's own walks do
            if key in holder:
                return holder, key
        return None

    def module(self, text: str) -> nn.Module | None:
        """Return the submodule that `text` names by attributes alone, or None where it names something else."""
        if text not in self._found and ("[" in text or "|" in text):
            self._found[text] = None
        if text not in self._found:
            owner, _, name = text.rpartition(".")
            base = self.module(owner) if owner else None
            child = None if base is None else base._modules.get(name)  # noqa: SLF001 - as above
            self._found[text] = child if isinstance(child, nn.Module) else None
        return self._found[text]


def _child(base: Any, accessor: Accessor) -> nn.Module | None:
    """Return the submodule that the accessor leads to, or None when it leads elsewhere."""
    if not isinstance(base, nn.Module):
        return None
    if accessor.word == "attr":
        return base._modules.get(str(accessor.key))  # noqa: SLF001 - read as torch's own named_modules does
    if accessor.word == "item" and isinstance(base, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        with contextlib.suppress(IndexError, KeyError, TypeError):
            found = base[accessor.key]  # type: ignore[index]  # a wrong key is suppressed
            return found if isinstance(found, nn.Module) else None
    return None


def _holder(base: Any, accessor: Accessor) -> dict[str, Any] | None:
    """Return the dict of a module that holds the attribute, or None when it is computed (a property)."""
    if not isinstance(base, nn.Module) or accessor.word != "attr":
        return None
    for holder in (base._parameters, base._buffers, vars(base)):  # noqa: SLF001 - as above
        if accessor.key in holder:
            return holder
    return None


def _resolver(module: Any, method: Any, text: str) -> Callable[[], Any]:
    return lambda: Roots(module, method).resolve(text)


def _referent(base: Any) -> Any:
    if not isinstance(base, weakref.ref):
        msg = f"{base!r} is no weak reference"
        raise TypeError(msg)
    return base()


_LISTED: dict[str, Callable[..., Any]] = {
    "dict": lambda base, _key: dict(vars(base)),
    "keys": lambda base, key: list(base)[key],
    "list": lambda base, key: list(base)[key],
    "values": lambda base, key: list(base.values())[key],
}
