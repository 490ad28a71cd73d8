"""What Dynamo's ShapeEnv knows of a trace's sizes, as the plan's symbols and expressions.

Dynamo's guard filter has no value for SHAPE_ENV, so the relations between sizes come from here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import sympy

from cgtool.errors import SplitError, TraceError
from cgtool.graph.sympy_text import expression_text
from cgtool.plan.pieces import SymbolRange
from cgtool.trace import _torch as private


def symbols_of_trace(shape_env: Any, names: Mapping[str, str]) -> tuple[SymbolRange, ...]:
    """Return the variant's symbols and the sizes that each may take.

    Args:
        shape_env: Dynamo's ShapeEnv.
        names: Its symbols' names in the plan.
    """
    by_name = {symbol.name: symbol for symbol in shape_env.var_to_range}
    found = []
    for old, new in names.items():
        bounds = shape_env.var_to_range[by_name[old]]
        high = None if bounds.upper in (private.int_oo, sympy.oo) else int(bounds.upper)
        found.append(SymbolRange(name=new, min=int(bounds.lower), max=high))
    return tuple(sorted(found, key=lambda symbol: int(symbol.name[1:])))


def relations_of_trace(shape_env: Any, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return what the trace found true of its sizes, without what the ranges imply.

    Raises:
        TraceError: A relation has no words in a plan, or speaks of a number that no input shows.
    """
    texts: dict[str, None] = {}
    for guard in shape_env.guards:
        expr = shape_env.simplify(shape_env.replace(guard.expr))
        if expr == sympy.true or _is_bound(expr):
            continue
        unknown = sorted(s.name for s in expr.free_symbols if s.name not in names)
        if unknown:
            msg = (
                f"This model depends on {guard.expr}, in which {', '.join(unknown)} is no size of an input of the "
                f"graph ({guard.sloc}). Pass it in as a size, or make it constant."
            )
            raise TraceError(msg, actual=str(guard.expr))
        try:
            texts[expression_text(expr, names)] = None
        except SplitError as error:
            msg = f"This model depends on {guard.expr}, which a plan cannot say ({error}). Simplify it at {guard.sloc}."
            raise TraceError(msg, actual=str(guard.expr)) from error
    return tuple(texts)


def lines_of_relations(shape_env: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return where torch took each relation for granted: its text, as `relations_of_trace` has it, → torch's SLoc."""
    found: dict[str, Any] = {}
    for guard in shape_env.guards:
        expr = shape_env.simplify(shape_env.replace(guard.expr))
        if all(symbol.name in names for symbol in getattr(expr, "free_symbols", ())):
            with contextlib.suppress(SplitError):
                found.setdefault(expression_text(expr, names), guard.sloc)
    return found


def _is_bound(expr: Any) -> bool:
    """Return whether `expr` compares one symbol with a number: the symbol's range holds it already."""
    if not isinstance(expr, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)):
        return False
    return any(a.is_Symbol and b.is_Integer for a, b in (expr.args, expr.args[::-1]))
