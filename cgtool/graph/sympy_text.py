"""Sympy expressions of torch's ShapeEnv as text in the grammar of `cgtool.graph.expressions`, and back.

The one module of this floor that imports sympy; only trace, split and build import it. The text does not depend on the
names that symbols have in this process: the terms of sums and products are ordered by their text after renaming.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import sympy
from torch.utils._sympy import functions as torch_sympy

from cgtool.errors import SplitError
from cgtool.graph.expressions import check_expression

_COMPARE: dict[type, str] = {
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.StrictLessThan: "<",
    sympy.LessThan: "<=",
    sympy.StrictGreaterThan: ">",
    sympy.GreaterThan: ">=",
}
_FLIPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_DIVISIONS: dict[type, str] = {
    torch_sympy.FloorDiv: "//",
    torch_sympy.CleanDiv: "//",
    torch_sympy.Mod: "%",
    torch_sympy.PythonMod: "%",
    sympy.Mod: "%",
}
_EXTREMES: dict[type, str] = {
    sympy.Max: "Max",
    sympy.Min: "Min",
    torch_sympy.Max: "Max",
    torch_sympy.Min: "Min",
}


def expression_text(expr: Any, names: Mapping[str, str]) -> str:
    """Return `expr` as text.

    Args:
        expr: A sympy expression, or an int.
        names: ShapeEnv symbol → the name to write.

    Returns:
        Text that `check_expression` accepts; the same for equal expressions whatever the symbols are called here.

    Raises:
        SplitError: `expr` holds a function or a symbol that has no word in the grammar.
    """
    return _text(sympy.sympify(expr), names)


def _text(expr: Any, names: Mapping[str, str]) -> str:
    if expr in (sympy.true, sympy.false):
        return "1 == 1" if expr else "1 == 0"
    if isinstance(expr, sympy.Symbol):
        if expr.name not in names:
            raise _unknown(expr, f"{expr.name} is not a size of a tensor that the piece takes")
        return names[expr.name]
    if isinstance(expr, sympy.Integer):
        return str(int(expr))
    kind = type(expr)
    if isinstance(expr, sympy.Add):
        return _sum(expr, names)
    if isinstance(expr, sympy.Mul):
        return _product(expr, names)
    if isinstance(expr, sympy.Pow):
        base, exponent = expr.args
        if not (isinstance(exponent, sympy.Integer) and int(exponent) >= 0):
            raise _unknown(expr, "its exponent is not a number")
        return f"{_inner(base, names)} ** {int(exponent)}"
    if kind in _DIVISIONS:
        left, right = expr.args
        return f"{_inner(left, names)} {_DIVISIONS[kind]} {_inner(right, names)}"
    if kind in _EXTREMES:
        return f"{_EXTREMES[kind]}({', '.join(sorted(_text(arg, names) for arg in expr.args))})"
    return _truth(expr, names)


def _truth(expr: Any, names: Mapping[str, str]) -> str:
    kind = type(expr)
    if kind in _COMPARE:
        return _comparison(expr, _COMPARE[kind], names)
    if isinstance(expr, sympy.And | sympy.Or):
        word = " and " if isinstance(expr, sympy.And) else " or "
        return word.join(sorted(_inner(arg, names) for arg in expr.args))
    if isinstance(expr, sympy.Not):
        return f"not {_inner(expr.args[0], names)}"
    raise _unknown(expr, f"{kind.__name__} has no word in a plan")


def _inner(expr: Any, names: Mapping[str, str]) -> str:
    text = _text(expr, names)
    return text if text.isidentifier() or text.isdigit() or _is_call(text) else f"({text})"


def _is_call(text: str) -> bool:
    return isinstance(ast.parse(text, mode="eval").body, ast.Call)


def _sum(expr: Any, names: Mapping[str, str]) -> str:
    plus, minus = [], []
    for term in expr.args:
        coefficient, rest = term.as_coeff_Mul()
        if isinstance(coefficient, sympy.Integer) and int(coefficient) < 0:
            minus.append(_term(-coefficient * rest, names))
        else:
            plus.append(_term(term, names))
    plus.sort(key=_numbers_last)
    minus.sort(key=_numbers_last)
    first = " + ".join(plus) if plus else "0"
    return "".join([first, *(f" - {term}" for term in minus)])


def _term(expr: Any, names: Mapping[str, str]) -> str:
    # a product binds tighter than the sum around it
    return _text(expr, names) if isinstance(expr, sympy.Mul) else _inner(expr, names)


def _product(expr: Any, names: Mapping[str, str]) -> str:
    numbers = [arg for arg in expr.args if arg.is_number]
    if any(not isinstance(number, sympy.Integer) for number in numbers):
        raise _unknown(expr, "it holds a fraction")
    others = sorted(_inner(arg, names) for arg in expr.args if not arg.is_number)
    return " * ".join([*(_inner(number, names) for number in numbers), *others])


def _numbers_last(text: str) -> tuple[bool, str]:
    return text.isdigit(), text


def _comparison(expr: Any, word: str, names: Mapping[str, str]) -> str:
    left, right = (_inner(arg, names) for arg in expr.args)
    if expr.args[0].is_number or (word in ("==", "!=") and not expr.args[1].is_number and right < left):
        left, right, word = right, left, _FLIPPED[word]
    return f"{left} {word} {right}"


def _unknown(expr: Any, why: str) -> SplitError:
    return SplitError(
        f"the size {expr} cannot be written down: {why}; make that dimension static, or compute the size another way",
        actual=str(expr),
    )


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Pow: lambda a, b: a**b,
    ast.FloorDiv: torch_sympy.FloorDiv,
    ast.Mod: torch_sympy.PythonMod,
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}


def to_sympy(text: str | int, symbols: Mapping[str, sympy.Symbol]) -> Any:
    """Return the sympy expression of `text`.

    Raises:
        ArtifactError: `text` is outside the grammar, or names a symbol that is not in `symbols`.
    """
    check_expression(str(text), symbols)
    return _build(ast.parse(str(text), mode="eval").body, symbols)


def _build(node: ast.expr, symbols: Mapping[str, sympy.Symbol]) -> Any:
    match node:
        case ast.Name(id=name):
            return symbols[name]
        case ast.Constant(value=value):
            return sympy.Integer(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand, symbols)
        case ast.UnaryOp(operand=operand):
            return sympy.Not(_build(operand, symbols))
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            return _BINARY[type(op)](_build(left, symbols), _build(right, symbols))
        case ast.BoolOp(op=op, values=values):
            join = sympy.And if isinstance(op, ast.And) else sympy.Or
            return join(*(_build(value, symbols) for value in values))
        case ast.Call(func=ast.Name(id=name), args=args):
            extreme = torch_sympy.Max if name == "Max" else torch_sympy.Min
            return extreme(*(_build(arg, symbols) for arg in args))
        case _:  # unreachable: the grammar was checked
            raise SplitError(f"{ast.dump(node)} is outside the grammar; report this to cgtool's authors")
