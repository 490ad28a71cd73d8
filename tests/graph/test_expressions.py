"""Expressions over sizes have the same meaning wherever they are evaluated."""

from __future__ import annotations

import operator

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy import functions as torch_sympy

from cgtool.compiler import _torch as compiler_private
from cgtool.compiler.fx_piece import rebuild_symbols, symbolic_value
from cgtool.graph import expressions
from cgtool.graph.sympy_text import expression_text
from cgtool.plan.pieces import PieceGraph, SymbolRange
from cgtool.runtime.generate import Code, expression

pytestmark = pytest.mark.torch

S0, S1 = SYMBOLS = tuple(sympy.Symbol(name, positive=True, integer=True) for name in ("s0", "s1"))
NAMES = {"s0": "s0", "s1": "s1"}
POSITIVE = st.one_of(st.sampled_from(SYMBOLS), st.integers(1, 40).map(sympy.Integer))
NUMBERS = {
    "sum": operator.add,
    "difference": operator.sub,
    "product": operator.mul,
    "maximum": sympy.Max,
    "minimum": torch_sympy.Min,
    "and": torch_sympy.BitwiseFn_bitwise_and,
    "or": torch_sympy.BitwiseFn_bitwise_or,
    "xor": torch_sympy.BitwiseFn_bitwise_xor,
}
DIVISIONS = {
    "floor": torch_sympy.FloorDiv,
    "ceiling": torch_sympy.CeilDiv,
    "ceiling of a fraction": lambda a, b: torch_sympy.CeilToInt(torch_sympy.IntTrueDiv(a, b)),
    "floor of a fraction": lambda a, b: torch_sympy.FloorToInt(torch_sympy.IntTrueDiv(a, b)),
    "remainder": torch_sympy.PythonMod,
    "sympy's remainder": sympy.Mod,
    "indexing": lambda a, b: torch_sympy.ModularIndexing(a, b, sympy.Integer(7)),
}
ROUNDINGS = (torch_sympy.TruncToInt, torch_sympy.FloorToInt, torch_sympy.CeilToInt, torch_sympy.RoundToInt)
COMPARISONS = (sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)


def extended(inner):
    return st.one_of(
        st.builds(lambda f, a, b: f(a, b), st.sampled_from(list(NUMBERS.values())), inner, inner),
        st.builds(lambda f, a, b: f(a, b), st.sampled_from(list(DIVISIONS.values())), inner, POSITIVE),
        st.builds(lambda a, n: a**n, inner, st.integers(0, 3)),
        st.builds(sympy.Abs, inner),
        st.builds(lambda f, a: f(1.5 * torch_sympy.ToFloat(a)), st.sampled_from(ROUNDINGS), POSITIVE),
        st.builds(lambda f, a, b: f(torch_sympy.IntTrueDiv(a, b)), st.sampled_from(ROUNDINGS), POSITIVE, POSITIVE),
    )


numbers = st.recursive(st.one_of(POSITIVE, st.integers(-9, 9).map(sympy.Integer)), extended, max_leaves=8)
comparisons = st.builds(lambda f, a, b: f(a, b), st.sampled_from(COMPARISONS), numbers, numbers)
truths = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.builds(sympy.And, inner, inner), st.builds(sympy.Or, inner, inner), st.builds(sympy.Not, inner)
    ),
    max_leaves=4,
)


def generated(text):
    """Return the function that the runtime generates for an expression."""
    code = Code("test")
    code.add(f"return {expression(text, ('s0', 's1'))}")
    return code.define("value", ["s0", "s1"])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(expr=st.one_of(numbers, truths), s0=st.integers(1, 70), s1=st.integers(1, 70))
def test_sympy_plan_and_generated_code_agree_on_an_expression(expr, s0, s1):
    wanted = sympy.sympify(expr).xreplace({S0: sympy.Integer(s0), S1: sympy.Integer(s1)})
    text = expression_text(expr, NAMES)
    assert expressions.evaluate(text, {"s0": s0, "s1": s1}) == wanted
    assert generated(text)(s0, s1) == wanted
    assert symbolic_value(text, {"s0": s0, "s1": s1}) == wanted


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    text=st.one_of(numbers, truths).map(lambda expr: expression_text(expr, NAMES)), values=st.tuples(POSITIVE, POSITIVE)
)
def test_renaming_symbols_changes_no_value(text, values):
    sizes = {"s0": 5, "s1": 11}
    new = {name: expression_text(value + 1, NAMES) for name, value in zip(("s0", "s1"), values, strict=True)}
    inner = {name: expressions.evaluate(value, sizes) for name, value in new.items()}
    assert expressions.evaluate(expressions.rename(text, new), sizes) == expressions.evaluate(text, inner)


def test_the_order_of_commutative_operands_does_not_depend_on_names():
    first, second = (sympy.Symbol(name, positive=True, integer=True) for name in ("b", "a"))
    for function in (sympy.Max, torch_sympy.BitwiseFn_bitwise_or, torch_sympy.BitwiseFn_bitwise_and):
        text = expression_text(function(first, second), {"b": "s0", "a": "s1"})
        assert text == expression_text(function(S0, S1), NAMES)


@pytest.mark.parametrize(
    "text",
    [
        *("Max(s0)", "Max()", "max(s0, 1)", "s0 << 2", "~s0", "s0 / 2", "And(s0, s1)"),
        *("1.5 * s0", "Trunc(s0, s1)", "Trunc(s0 % 1.5)", "Max(1.5, s0)", "Round(s0) / 2", "1.5"),
    ],
)
def test_unsupported_expressions_are_outside_the_grammar(text):
    with pytest.raises(expressions.ArtifactError, match="outside the grammar"):
        expressions.check_expression(text, ["s0", "s1"])


@pytest.mark.parametrize("text", ["s0 % s1 == 0", "s0 // s1 < 9", "not s0 % (s1 - 1) == 0", "s0 > 1 and 8 // s1 == 4"])
def test_division_by_zero_makes_a_relation_false_and_a_value_an_error(text):
    zero = 1 if "s1 - 1" in text else 0
    assert not expressions.holds(text, {"s0": 4, "s1": zero})
    with pytest.raises(expressions.ArtifactError, match="divides by zero"):
        expressions.evaluate(text, {"s0": 4, "s1": zero})
    with pytest.raises(expressions.ArtifactError, match="has no value"):
        expressions.holds(text, {"s0": 4})


def test_a_fact_with_or_does_not_fix_a_size():
    graph = PieceGraph(
        nodes=(),
        inputs=(),
        outputs=(),
        results=(),
        aliases=(),
        ops={},
        symbols=(SymbolRange(name="s0", min=2, max=None),),
        facts=("s0 % 67 == 0 or s0 < 9", "not s0 == 12"),
    )
    rebuilt = rebuild_symbols(graph)
    (fact, other) = compiler_private.guard_exprs(rebuilt.mode)
    assert isinstance(fact, sympy.Or)
    assert isinstance(other, sympy.Ne)
