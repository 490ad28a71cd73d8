"""Expressions over symbols as text: checking, evaluation, renaming and conversion to Python, without sympy.

Grammar, a subset of Python::

    expr = name | int | -expr | expr (+ - * // % ** & | ^) expr | Max(expr, ...) | Min(expr, ...)
         | real (== != < <= > >=) real | expr (and or) expr | not expr | (expr)
         | Trunc(real) | Floor(real) | Ceil(real) | Round(real)     a real number rounded to a size
    real = expr | float | -real | real (+ - * /) real

Expressions are evaluated as Python, here and in generated code, with the functions in `FUNCTIONS`. `check_expression`
checks every expression before it enters generated code. Must not import torch or sympy.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, overload

from cgtool.errors import ArtifactError

_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor)
_REAL = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_COMPARE = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
#: The functions of expressions, which the namespace of an expression's Python needs.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Max": max,
    "Min": min,
    "Trunc": math.trunc,
    "Floor": math.floor,
    "Ceil": math.ceil,
    "Round": round,
}
#: The functions of one real number; the others take two or more sizes.
ROUNDINGS = frozenset({"Trunc", "Floor", "Ceil", "Round"})
#: No size needs larger exponents, and computing with them could take for ever.
MAX_EXPONENT = 16


def check_expression(text: str, symbols: Collection[str]) -> None:
    """Check that `text` is an expression of the grammar over `symbols`.

    Raises:
        ArtifactError: It is not one.
    """
    unknown = [name for name in symbols_of(text) if name not in symbols]
    if unknown:
        raise _malformed(text, f"{unknown[0]} is not a symbol of this graph")


def symbols_of(text: str | int) -> tuple[str, ...]:
    """Return the symbols of `text` without duplicates, in order of appearance; a number has none.

    Raises:
        ArtifactError: `text` is outside the grammar.
    """
    return () if isinstance(text, int) else _parsed(text)[1]


def python_source(text: str) -> str:
    """Return `text` as Python on one line, without comments; its namespace must contain `FUNCTIONS`.

    Raises:
        ArtifactError: `text` is outside the grammar.
    """
    return ast.unparse(_parsed(text)[0])


def evaluate(text: str | int, values: Mapping[str, int]) -> int:
    """Return the value of `text` (a bool for comparisons) with the symbols replaced by `values`.

    Raises:
        ArtifactError: `text` is outside the grammar, contains a symbol without a value, or divides by zero.
    """
    if isinstance(text, int):
        return text
    missing = [name for name in symbols_of(text) if name not in values]
    if missing:
        raise _malformed(text, f"{missing[0]} has no value")
    try:
        return _compiled(text)(values)
    except ArithmeticError as error:
        raise _malformed(text, "it divides by zero or overflows") from error


def holds(text: str, values: Mapping[str, int]) -> bool:
    """Return whether a relation is true for `values`; False if it divides by zero or overflows.

    Raises:
        ArtifactError: `text` is outside the grammar, or contains a symbol without a value.
    """
    try:
        return bool(evaluate(text, values))
    except ArtifactError as error:
        if not isinstance(error.__cause__, ArithmeticError):
            raise
        return False


@overload
def rename(text: str, names: Mapping[str, str]) -> str: ...
@overload
def rename(text: str | int, names: Mapping[str, str]) -> str | int: ...
def rename(text: str | int, names: Mapping[str, str]) -> str | int:
    """Return `text` with each symbol in `names` replaced by an expression; a number is returned unchanged.

    Raises:
        ArtifactError: `text` or a replacement is outside the grammar.
    """
    if isinstance(text, int):
        return text
    replacements = {name: _parsed(new)[0].body for name, new in names.items()}
    return ast.unparse(_Renamer(replacements).visit(ast.parse(text, mode="eval")))


class _Renamer(ast.NodeTransformer):
    def __init__(self, replacements: Mapping[str, ast.expr]) -> None:
        self._replacements = replacements

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._replacements.get(node.id, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [self.visit(arg) for arg in node.args]  # the function is not a symbol
        return node


@lru_cache(maxsize=65536)
def _parsed(text: str) -> tuple[ast.Expression, tuple[str, ...]]:
    if not isinstance(text, str):
        raise _malformed(str(text), "it is not text")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _malformed(text, "it does not parse") from error
    names: dict[str, None] = {}
    _check(tree.body, text, names)
    return tree, tuple(names)


def _check(node: ast.expr, text: str, names: dict[str, None], *, is_real: bool = False) -> None:
    """Collect the symbols of `node` into `names`; raise an error for anything outside the grammar."""
    operands: Sequence[ast.expr] = ()
    match node:
        case ast.Name(id=name) if name.isascii() and name[0] != "_":  # the parser ensures that it is an identifier
            names[name] = None
        case ast.Constant(value=value) if type(value) is int or (is_real and type(value) is float):
            pass
        case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
            is_real = is_real and isinstance(op, ast.USub)
            operands = (operand,)
        case ast.BinOp(left=left, op=ast.Pow(), right=right) if _is_small_exponent(right):
            operands, is_real = (left,), False
        case ast.BinOp(left=left, op=op, right=right) if is_real and isinstance(op, _REAL):
            operands = (left, right)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BINARY):
            operands, is_real = (left, right), False
        case ast.Compare(left=left, ops=[op], comparators=[right]) if isinstance(op, _COMPARE):
            operands, is_real = (left, right), True
        case ast.BoolOp(values=values):
            operands, is_real = values, False
        case ast.Call(func=ast.Name(id=name), args=[real], keywords=[]) if name in ROUNDINGS:
            operands, is_real = (real,), True
        case ast.Call(func=ast.Name(id="Max" | "Min"), args=[_, _, *_] as args, keywords=[]):
            operands, is_real = args, False
        case _:
            raise _malformed(text, f"{ast.unparse(node)[:80]} is outside the grammar")
    for operand in operands:
        _check(operand, text, names, is_real=is_real)


def _is_small_exponent(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MAX_EXPONENT


@lru_cache(maxsize=65536)
def _compiled(text: str) -> Callable[[Mapping[str, int]], int]:
    code = compile(_parsed(text)[0], "<expression>", "eval")
    space = {"__builtins__": {}, **FUNCTIONS}
    return lambda values: eval(code, space, dict(values))  # noqa: S307 - arithmetic only


def _malformed(text: str, why: str) -> ArtifactError:
    return ArtifactError(
        f"{text[:200]!r} is not an expression over sizes: {why}. The plan was changed or truncated; warm the model "
        "again.",
        actual=text,
    )
