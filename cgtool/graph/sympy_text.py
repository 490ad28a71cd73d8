"""Conversion of the ShapeEnv's sympy expressions to text in the grammar of `cgtool.graph.expressions`.

The only module of this folder that imports sympy; only trace, split and compiler import it. The text does not depend
on the names of symbols in this process: the terms of sums and products are ordered by their text after renaming.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
from torch.utils._sympy import functions as torch_sympy

from cgtool.errors import SplitError
from cgtool.graph.expressions import MAX_EXPONENT

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
    torch_sympy.IntTrueDiv: "/",
    torch_sympy.FloatTrueDiv: "/",
    torch_sympy.Mod: "%",
    torch_sympy.PythonMod: "%",
    sympy.Mod: "%",
}
_ROUNDINGS: dict[type, str] = {
    torch_sympy.TruncToInt: "Trunc",
    torch_sympy.FloorToInt: "Floor",
    torch_sympy.CeilToInt: "Ceil",
    torch_sympy.RoundToInt: "Round",
}
_BITWISE: dict[type, str] = {
    torch_sympy.BitwiseFn_bitwise_and: "&",
    torch_sympy.BitwiseFn_bitwise_or: "|",
    torch_sympy.BitwiseFn_bitwise_xor: "^",
}
_EXTREMES: dict[type, str] = {
    sympy.Max: "Max",
    sympy.Min: "Min",
    torch_sympy.Max: "Max",
    torch_sympy.Min: "Min",
}


def expression_text(expr: Any, names: Mapping[str, str]) -> str:
    """Return a sympy expression or an int as text, which does not depend on the names of symbols in this process.

    Raises:
        SplitError: `expr` contains a function or a symbol that the grammar does not have.
    """
    return _text(sympy.sympify(expr), names)


def _text(expr: Any, names: Mapping[str, str]) -> str:
    if isinstance(expr, sympy.Symbol):
        if expr.name not in names:
            raise _unknown(expr, f"{expr.name} is not a size of an input of the piece")
        return names[expr.name]
    if isinstance(expr, sympy.Integer):
        return str(int(expr))
    if isinstance(expr, sympy.Float) and math.isfinite(expr):
        return repr(float(expr))
    if isinstance(expr, torch_sympy.ToFloat):  # integers can stand among real numbers
        return _text(expr.args[0], names)
    if isinstance(expr, sympy.logic.boolalg.Boolean):
        return _truth(expr, names)
    kind = type(expr)
    for family, writer in _WRITERS.items():
        if issubclass(kind, family):
            return writer(expr, names)
    if kind in _DIVISIONS:
        left, right = expr.args
        return f"{_inner(left, names)} {_DIVISIONS[kind]} {_inner(right, names)}"
    if kind in _BITWISE:
        return f" {_BITWISE[kind]} ".join(sorted(_inner(arg, names) for arg in expr.args))
    if kind in _EXTREMES:
        return f"{_EXTREMES[kind]}({', '.join(sorted(_text(arg, names) for arg in expr.args))})"
    raise _unknown(expr, f"a plan cannot contain {kind.__name__}")


def _rounded(expr: Any, names: Mapping[str, str]) -> str:
    # Below 2**53, rounding the true division of two sizes gives the same result as integer division.
    [number] = expr.args
    if isinstance(number, torch_sympy.IntTrueDiv) and not isinstance(expr, torch_sympy.RoundToInt):
        dividend, divisor = number.args
        if isinstance(expr, torch_sympy.CeilToInt):
            return f"-({_inner(-dividend, names)} // {_inner(divisor, names)})"
        if isinstance(expr, torch_sympy.FloorToInt) or (dividend.is_nonnegative and divisor.is_positive):
            return f"{_inner(dividend, names)} // {_inner(divisor, names)}"
    return f"{_ROUNDINGS[type(expr)]}({_text(number, names)})"


def _absolute(expr: Any, names: Mapping[str, str]) -> str:
    [number] = expr.args
    return f"Max({', '.join(sorted((_text(number, names), _text(-number, names))))})"


def _modular_indexing(expr: Any, names: Mapping[str, str]) -> str:
    base, divisor, modulus = (_inner(arg, names) for arg in expr.args)
    return f"({base} // {divisor}) % {modulus}"


def _power(expr: Any, names: Mapping[str, str]) -> str:
    base, exponent = expr.args
    if not (isinstance(exponent, sympy.Integer) and 0 <= int(exponent) <= MAX_EXPONENT):
        raise _unknown(expr, "its exponent is not a small number")
    return f"{_inner(base, names)} ** {int(exponent)}"


def _truth(expr: Any, names: Mapping[str, str]) -> str:
    kind = type(expr)
    if expr in (sympy.true, sympy.false):
        return "1 == 1" if expr else "1 == 0"
    if kind in _COMPARE:
        return _comparison(expr, _COMPARE[kind], names)
    if isinstance(expr, sympy.And | sympy.Or):
        word = " and " if isinstance(expr, sympy.And) else " or "
        return word.join(sorted(_inner(arg, names) for arg in expr.args))
    if isinstance(expr, sympy.Not):
        return f"not {_inner(expr.args[0], names)}"
    raise _unknown(expr, f"a plan cannot contain {kind.__name__}")


def _inner(expr: Any, names: Mapping[str, str]) -> str:
    text = _text(expr, names)
    is_whole = text.isidentifier() or text.isdigit() or isinstance(ast.parse(text, mode="eval").body, ast.Call)
    return text if is_whole else f"({text})"


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
    # products need no parentheses within a sum
    return _text(expr, names) if isinstance(expr, sympy.Mul) else _inner(expr, names)


def _product(expr: Any, names: Mapping[str, str]) -> str:
    numbers = [arg for arg in expr.args if arg.is_number]
    if any(not isinstance(number, sympy.Integer | sympy.Float) for number in numbers):
        raise _unknown(expr, "it contains a fraction")
    others = sorted(_inner(arg, names) for arg in expr.args if not arg.is_number)
    return " * ".join([*(_inner(number, names) for number in numbers), *others])


def _numbers_last(text: str) -> tuple[bool, str]:
    return text.isdigit(), text


def _comparison(expr: Any, word: str, names: Mapping[str, str]) -> str:
    left, right = (_inner(arg, names) for arg in expr.args)
    if expr.args[0].is_number or (word in ("==", "!=") and not expr.args[1].is_number and right < left):
        left, right, word = right, left, _FLIPPED[word]
    return f"{left} {word} {right}"


_WRITERS: dict[type, Callable[[Any, Mapping[str, str]], str]] = {
    sympy.Add: _sum,
    sympy.Mul: _product,
    sympy.Pow: _power,
    sympy.Abs: _absolute,
    **dict.fromkeys(_ROUNDINGS, _rounded),
    torch_sympy.ModularIndexing: _modular_indexing,
}


def _unknown(expr: Any, why: str) -> SplitError:
    return SplitError(
        f"the size {expr} cannot be stored in a plan: {why}; make that dimension static, or compute it differently",
        actual=str(expr),
    )
