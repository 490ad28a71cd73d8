"""The environment variables that a model reads, whose values Dynamo folds into the graph without a guard.

Finds every variable that traced code reads by a constant name, set or unset, and those that the user's modules read
when they are imported. A traced read of a computed name is refused, because a load could not tell which variable it
reads; so is a read of the whole environment.
"""

from __future__ import annotations

import ast
import os
import re
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgtool.errors import TraceError
from cgtool.guards.files import file_of
from cgtool.plan.records import source_words

_MAPPINGS = frozenset({"environ", "environb"})
_FUNCTIONS = frozenset({"getenv", "getenvb"})
#: Functions that read the variables named in a text.
_EXPANDING = frozenset({"expandvars"})
#: The names by which code reads the environment, and the objects behind them.
_NAMES = _MAPPINGS | _FUNCTIONS
_READERS = tuple(vars(os)[name] for name in sorted(_NAMES))
#: Methods of the mapping whose first argument is a variable's name.
_METHODS = frozenset({"get", "pop", "setdefault", "__getitem__", "__contains__"})


@dataclass(frozen=True)
class Read:
    """An expression that reads the environment.

    Args:
        line: Its line.
        name: The variable; None if the name is computed, or the whole environment is read.
        at_import: Whether it runs when its module is imported.
    """

    line: int
    name: str | None
    at_import: bool


def variables_read(reads: Mapping[str, Iterable[Read]], codes: Mapping[str, Iterable[types.CodeType]]) -> set[str]:
    """Return the environment variables that a model reads.

    Args:
        reads: The reads in the user's modules and in all other modules with traced code.
        codes: The traced code by module.

    Raises:
        TraceError: Traced code reads a variable whose name is computed.
    """
    found: set[str] = set()
    for module, places in reads.items():
        traced = {line for code in codes.get(module, ()) for _, _, line in code.co_lines() if line is not None}
        for read in places:
            if not read.at_import and read.line not in traced:
                continue
            if read.name is not None:
                found.add(read.name)
            elif not read.at_import:
                file = next(code.co_filename for code in codes[module])
                raise _computed_name_error(f"{file}:{read.line}")
    return found


def may_read_environment(code: types.CodeType) -> bool:
    """Return whether code itself may read the environment."""
    return not _NAMES.isdisjoint(code.co_names)


def variables_read_by_platform(
    reads: Mapping[str, Iterable[Read]], codes: Mapping[str, Iterable[types.CodeType]]
) -> set[str]:
    """Return the variables that traced code of torch and of the standard library reads by constant names.

    A computed name there comes from the caller, whose code is checked itself.
    """
    lines = {module: {line for code in of for _, _, line in code.co_lines()} for module, of in codes.items()}
    return {
        read.name
        for module, places in reads.items()
        for read in places
        if read.name is not None and not read.at_import and read.line in lines[module]
    }


def refuse_alias(source: str, value: Any) -> None:
    """Refuse the environment, or a function that reads it, under a name that hides it from the search for reads."""
    if any(value is reader for reader in _READERS) and re.split(r"[.:]", source)[-1] not in _NAMES:
        root, _, name = source.removeprefix("global:").partition(":")
        if source.startswith("global:") and name in _imported_from_os(root):
            return  # an import in the module's source shows what it is
        name = source_words(source)
        msg = (
            f"{name} is an alias of os.environ or of a function that reads it, so cgtool cannot tell which variables "
            "the model reads. Use os.environ or os.getenv directly."
        )
        raise TraceError(msg, path=name, expected="os.environ[...] with a constant name")


def _imported_from_os(module: str) -> set[str]:
    """Return the names under which a module imports the environment, or a function that reads it."""
    file = file_of(module)
    tree = None if file is None else parse(Path(file).read_bytes())
    return set() if tree is None else {as_name for name, as_name in imported_from_os(tree) if name in _NAMES}


def _computed_name_error(place: str) -> TraceError:
    msg = (
        f"{place} reads an environment variable whose name is not a constant, or the whole environment, while the "
        "model runs. The graph would keep the value, and a load could not notice a change. Read it by a constant "
        "name, or read it when the model is built and keep the value in an attribute."
    )
    return TraceError(msg, path=place, expected="os.environ[...] with a constant name")


def parse(data: bytes) -> ast.Module | None:
    """Return the syntax tree of a file; None if it is not Python source, such as a compiled module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were reported when the file was imported
        try:
            return ast.parse(data)
        except (SyntaxError, ValueError, RecursionError):
            return None


def imported_from_os(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, alias) of each name that a module imports from `os`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from ((alias.name, alias.asname or alias.name) for alias in node.names)


def reads_in(tree: ast.Module) -> list[Read]:
    """Return every read of the environment in a module."""
    return _Finder(tree).reads


class _Finder(ast.NodeVisitor):
    """Collects the reads of one module."""

    def __init__(self, tree: ast.Module) -> None:
        self.reads: list[Read] = []
        self._depth = 0
        self._constants = _constants_of(tree)
        self._mappings, self._functions = set(_MAPPINGS), set(_FUNCTIONS)
        for names, kept in ((_MAPPINGS, self._mappings), (_FUNCTIONS, self._functions)):
            kept.update(as_name for name, as_name in imported_from_os(tree) if name in names)
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Visit decorators and defaults, which run with the surrounding code, and then the body, which runs later."""
        for around in (*node.decorator_list, node.args):
            self.visit(around)
        self._within(node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._within([node.body])

    def _within(self, body: Iterable[ast.AST]) -> None:
        self._depth += 1
        for node in body:
            self.visit(node)
        self._depth -= 1

    def visit_Call(self, node: ast.Call) -> None:
        """Record `getenv(name)`, `environ.get(name)` and the like; `getattr(os, "environ")` reads all of it."""
        function = node.func
        keys = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "key")]
        if self._is(function, self._functions):
            self._add(node, keys)
        elif isinstance(function, ast.Attribute) and self._is(function.value, self._mappings):
            self._add(node, keys if function.attr in _METHODS else [])
        else:
            if getattr(function, "id", None) == "getattr" and any(
                isinstance(arg, ast.Constant) and arg.value in _MAPPINGS | _FUNCTIONS for arg in node.args
            ):
                self._add(node, [])
            self.visit(function)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Record `environ[name]`, unless it is assigned or deleted."""
        if not self._is(node.value, self._mappings):
            self.generic_visit(node)
            return
        if isinstance(node.ctx, ast.Load):
            self._add(node, [node.slice])
        self.visit(node.slice)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Record `name in environ`."""
        operands = [node.left, *node.comparators]
        for operand, left, operator in zip(node.comparators, operands, node.ops, strict=False):
            if self._is(operand, self._mappings) and isinstance(operator, ast.In | ast.NotIn):
                self._add(node, [left])
                operands.remove(operand)
        for operand in operands:
            self.visit(operand)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Record a use of the whole environment."""
        if isinstance(node.ctx, ast.Load) and self._is(node, self._mappings | self._functions | _EXPANDING):
            self._add(node, [])
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and self._is(node, self._mappings | self._functions | _EXPANDING):
            self._add(node, [])

    def _is(self, node: ast.expr, names: set[str]) -> bool:
        return (isinstance(node, ast.Attribute) and node.attr in names) or (
            isinstance(node, ast.Name) and node.id in names
        )

    def _add(self, node: ast.expr, keys: list[ast.expr]) -> None:
        name = self._name_of(keys[0]) if keys else None
        self.reads.append(Read(node.lineno, name, at_import=self._depth == 0))

    def _name_of(self, key: ast.expr) -> str | None:
        value = key.value if isinstance(key, ast.Constant) else self._constants.get(getattr(key, "id", ""))
        if isinstance(value, bytes):
            return value.decode("utf-8", "surrogateescape")
        return value if isinstance(value, str) else None


def _constants_of(tree: ast.Module) -> dict[str, object]:
    """Return the names of a module that are assigned exactly once, and their constant values (None for others)."""
    assigned: dict[str, list[object]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned.setdefault(node.id, []).append(None)
        elif isinstance(node, ast.arg):
            assigned.setdefault(node.arg, []).append(None)
    constants: dict[str, object] = {}
    for statement in tree.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        if isinstance(target, ast.Name) and isinstance(statement, ast.Assign) and len(assigned[target.id]) == 1:
            constants[target.id] = statement.value.value if isinstance(statement.value, ast.Constant) else None
    return constants
