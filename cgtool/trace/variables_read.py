"""The variables of the environment that a model reads: Dynamo folds their values into the graph without a guard.

Every variable that the traced code reads by a constant name counts, with its value or its absence, and so do those that
the user's modules read as they are imported. A traced read of a name that is computed is refused, since no load could
know which variable was meant; so is the environment taken as a whole.
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
#: Names of functions that read the variables which a text names.
_EXPANDING = frozenset({"expandvars"})
#: The names that tell that code reads the environment, and the live objects through which it does.
_NAMES = _MAPPINGS | _FUNCTIONS
_READERS = tuple(vars(os)[name] for name in sorted(_NAMES))
#: Methods of the mapping that take a variable's name first.
_METHODS = frozenset({"get", "pop", "setdefault", "__getitem__", "__contains__"})


@dataclass(frozen=True)
class Read:
    """A place that reads the environment.

    Args:
        line: Its line.
        name: The variable; None where it is computed, or the environment is taken as a whole.
        at_import: Whether it runs as its module is imported.
    """

    line: int
    name: str | None
    at_import: bool


def variables_read(reads: Mapping[str, Iterable[Read]], codes: Mapping[str, Iterable[types.CodeType]]) -> set[str]:
    """Return the variables that a model reads.

    Args:
        reads: The reads of the user's modules, and of all others of which code was traced.
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
                raise _computed(f"{file}:{read.line}")
    return found


def names_a_variable(code: types.CodeType) -> bool:
    """Return whether code may read the environment itself."""
    return not _NAMES.isdisjoint(code.co_names)


def variables_read_by_given(
    reads: Mapping[str, Iterable[Read]], codes: Mapping[str, Iterable[types.CodeType]]
) -> set[str]:
    """Return the variables that traced code of torch and of the standard library reads by constant names.

    A name that is computed there came from code that calls it, which is looked at itself.
    """
    lines = {module: {line for code in of for _, _, line in code.co_lines()} for module, of in codes.items()}
    return {
        read.name
        for module, places in reads.items()
        for read in places
        if read.name is not None and not read.at_import and read.line in lines[module]
    }


def refuse_alias(source: str, value: Any) -> None:
    """Refuse the environment, or a function that reads it, under a name that does not tell what it is."""
    if any(value is reader for reader in _READERS) and re.split(r"[.:]", source)[-1] not in _NAMES:
        root, _, name = source.removeprefix("global:").partition(":")
        if source.startswith("global:") and name in _imported_from_os(root):
            return  # the module's text tells what it is
        name = source_words(source)
        msg = (
            f"{name} is the environment, or reads it, under a name that does not say so: what is read through it while "
            "the model runs cannot be known. Write os.environ or os.getenv where it is used."
        )
        raise TraceError(msg, path=name, expected="os.environ[...] with a constant name")


def _imported_from_os(module: str) -> set[str]:
    """Return the names under which a module's imports give it the environment, or a function that reads it."""
    file = file_of(module)
    tree = None if file is None else parse(Path(file).read_bytes())
    return set() if tree is None else {as_name for name, as_name in imported_from_os(tree) if name in _NAMES}


def _computed(place: str) -> TraceError:
    msg = (
        f"{place} reads a variable of the environment whose name is no constant, or the environment as a whole, while "
        "the model runs. The graph would keep what it was, and no load could notice a change. Read it by its plain "
        "name, or read it as the model is built and keep the value in an attribute."
    )
    return TraceError(msg, path=place, expected="os.environ[...] with a constant name")


def parse(data: bytes) -> ast.Module | None:
    """Return the syntax tree of a file; None where it holds no Python, as a compiled module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever imports the file was told
        try:
            return ast.parse(data)
        except (SyntaxError, ValueError, RecursionError):
            return None


def imported_from_os(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each name that a module takes from `os`, and what it calls it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from ((alias.name, alias.asname or alias.name) for alias in node.names)


def reads_in(tree: ast.Module) -> list[Read]:
    """Return every place of a module that reads the environment."""
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
        """Decorators and defaults run with what is around the function, its body when it is called."""
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
        """Take `getenv(name)`, `environ.get(name)` and their like; `getattr(os, "environ")` takes the whole."""
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
        """Take `environ[name]`; one that is assigned or deleted is not read."""
        if not self._is(node.value, self._mappings):
            self.generic_visit(node)
            return
        if isinstance(node.ctx, ast.Load):
            self._add(node, [node.slice])
        self.visit(node.slice)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Take `name in environ`."""
        operands = [node.left, *node.comparators]
        for operand, left, operator in zip(node.comparators, operands, node.ops, strict=False):
            if self._is(operand, self._mappings) and isinstance(operator, ast.In | ast.NotIn):
                self._add(node, [left])
                operands.remove(operand)
        for operand in operands:
            self.visit(operand)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Take the whole environment, under whatever name it is kept."""
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
    """Return the names of a module that are assigned once, and a constant at that."""
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
