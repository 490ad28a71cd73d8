"""Straight-line Python made from a plan: the one place of the runtime that compiles text.

Every string of a plan that reaches a line was matched to a grammar by whoever wrote the line; values never become text
but stand in the function's namespace. The namespace has no builtins but the import that torch's own C code looks for in
the frame that calls it, and no line may name that: a line can use only what it was given.
"""

from __future__ import annotations

import builtins
import functools
import keyword
import types
from collections.abc import Callable, Iterable
from typing import Any, cast

from cgtool.errors import ArtifactError
from cgtool.graph.expressions import FUNCTIONS, check_expression, python_source

_INDENT = "    "


class Code:
    """A function that is being written.

    Args:
        label: What a traceback calls the text.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.depth = 1
        self._lines: list[str] = []
        self._names: dict[str, Any] = {"__builtins__": {"__import__": builtins.__import__}, **FUNCTIONS}
        self._known: dict[int, str] = {}

    def add(self, line: str) -> None:
        """Add a line at the present depth."""
        self._lines.append(_INDENT * self.depth + line)

    def constant(self, value: Any) -> str:
        """Return the name under which `value` stands in the function's namespace."""
        name = self._known.get(id(value))
        if name is None:
            # The namespace keeps the value alive, so its id stays its own.
            name = self._known[id(value)] = f"k{len(self._known)}"
            self._names[name] = value
        return name

    @property
    def next_line(self) -> int:
        """The number of the line that `add` adds next, in the function's text."""
        return len(self._lines) + 2

    def define_later(self, name: str, parameters: Iterable[str] = ()) -> Callable[..., Any]:
        """Return what `define` returns, compiled when it is first called; all that can be refused is refused now."""
        if any("__import__" in line for line in self._lines):
            raise malformed("function", "__import__")
        return _Later(functools.partial(self.define, name, tuple(parameters)))

    def define(self, name: str, parameters: Iterable[str] = ()) -> Callable[..., Any]:
        """Compile what was written as `def name(parameters)` and return the function."""
        text = "\n".join([f"def {name}({', '.join(parameters)}):", *(self._lines or [_INDENT + "return None"]), ""])
        exec(compile(text, f"<cgtool {self.label}>", "exec"), self._names)  # noqa: S102 - what this module is for
        function: Any = self._names[name]
        if _names_import(function.__code__):
            raise malformed("function", "__import__")
        return cast("Callable[..., Any]", function)


class _Later:
    """A function that is compiled when it is first called; two threads may both do so, to the same end."""

    __slots__ = ("_function", "_make")

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._make = make
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        function = self._function
        if function is None:
            function = self._function = self._make()
        return function(*args)


def _names_import(code: types.CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return "__import__" in code.co_names or any(map(_names_import, inner))


@functools.lru_cache(maxsize=65536)
def expression(dim: int | str, symbols: tuple[str, ...]) -> str:
    """Return a size of a plan as Python over the names `symbols`, in parentheses where it needs them.

    Raises:
        ArtifactError: It is neither an integer nor an expression of the grammar over these symbols.
    """
    if type(dim) is int:
        return str(dim) if dim >= 0 else f"({dim})"
    if type(dim) is not str:
        raise malformed("size", dim)
    check_expression(dim, symbols)
    return dim if dim in symbols else f"({python_source(dim)})"


def tuple_source(parts: Iterable[str]) -> str:
    """Return the source of a tuple of `parts`."""
    return f"({''.join(f'{part}, ' for part in parts)})"


def check_identifier(text: Any) -> str:
    """Return `text` if it can stand as a keyword argument's name.

    Raises:
        ArtifactError: It cannot.
    """
    if type(text) is not str or not text.isascii() or not text.isidentifier() or keyword.iskeyword(text):
        raise malformed("name", text)
    return text


def malformed(what: str, data: Any) -> ArtifactError:
    """Return the error of a plan that holds something outside its grammar."""
    return ArtifactError(
        f"{str(data)[:120]!r} is not a {what} that a plan can hold; the cache is damaged or was changed: warm again.",
        actual=data,
    )
