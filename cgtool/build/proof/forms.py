"""Integers as linear forms of the inputs that they follow from, and how ops change those. Must not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A value that lies in `low + sum(factor * input)` to `high + sum(factor * input)`."""

    factors: Mapping[int, Fraction] = field(default_factory=dict)
    low: Fraction = Fraction(0)
    high: Fraction = Fraction(0)


def join(forms: Sequence[Linear | None]) -> Linear | None:
    """Return a form that covers each of `forms`."""
    if not forms or any(form is None for form in forms):
        return None
    known = [form for form in forms if form is not None]
    factors: dict[int, Fraction] = {}
    for form in known:
        for number, factor in form.factors.items():
            factors[number] = max(factors.get(number, factor), factor)
    return Linear(factors=factors, low=min(f.low for f in known), high=max(f.high for f in known))


def _add(one: Linear | None, other: Linear | None, sign: int = 1) -> Linear | None:
    if one is None or other is None:
        return None
    factors = dict(one.factors)
    for number, factor in other.factors.items():
        factors[number] = factors.get(number, Fraction(0)) + sign * factor
    ends = (sign * other.low, sign * other.high)
    kept = {number: factor for number, factor in factors.items() if factor}
    return Linear(factors=kept, low=one.low + min(ends), high=one.high + max(ends))


def _times(one: Linear | None, other: Linear | None) -> Linear | None:
    if one is None or other is None:
        return None
    if one.factors:
        one, other = other, one
    if one.factors or one.low != one.high:
        return None
    ends = (one.low * other.low, one.low * other.high)
    factors = {number: factor * one.low for number, factor in other.factors.items() if one.low}
    return Linear(factors=factors, low=min(ends), high=max(ends))


def _divided(one: Linear | None, by: Any) -> Linear | None:
    if one is None:
        return None
    part = Fraction(1) / Fraction(by)
    return Linear(
        factors={number: factor * part for number, factor in one.factors.items()},
        low=one.low * part,
        high=one.high * part,
    )


def _clamped(form: Linear | None, low: Any, high: Any) -> Linear | None:
    if isinstance(low, int) and isinstance(high, int):
        return Linear(low=Fraction(low), high=Fraction(high))
    if isinstance(low, int) and form is not None:  # at least `low`: it may be that, or what it was
        return Linear(factors=form.factors, low=max(form.low, Fraction(low)), high=max(form.high, Fraction(low)))
    return form


def _sum_of(form: Linear | None, count: int) -> Linear | None:
    return _times(form, Linear(low=Fraction(count), high=Fraction(count)))


_Rule = Callable[[list[Linear | None], list[Any], dict[str, Any]], Linear | None]
#: op → the form of what it gives, from the forms of its operands, its arguments and its keywords
RULES: dict[str, _Rule] = {
    "add": lambda forms, _args, kwargs: _add(forms[0], forms[1]) if not kwargs else None,
    "iadd": lambda forms, _args, _kwargs: _add(forms[0], forms[1]),
    "radd": lambda forms, _args, _kwargs: _add(forms[0], forms[1]),
    "sub": lambda forms, _args, kwargs: _add(forms[0], forms[1], -1) if not kwargs else None,
    "rsub": lambda forms, _args, _kwargs: _add(forms[1], forms[0], -1),
    "mul": lambda forms, _args, _kwargs: _times(forms[0], forms[1]),
    "neg": lambda forms, _args, _kwargs: _add(Linear(), forms[0], -1),
    "floordiv": lambda forms, args, _kwargs: _divided(forms[0], args[1]),
    "floor_divide": lambda forms, args, _kwargs: _divided(forms[0], args[1]),
    "div": lambda forms, args, _kwargs: _divided(forms[0], args[1]),
    "mod": lambda _forms, args, _kwargs: Linear(high=Fraction(args[1] - 1)),
    "remainder": lambda _forms, args, _kwargs: Linear(high=Fraction(args[1] - 1)),
    "and": lambda _forms, args, _kwargs: Linear(high=Fraction(args[1])),
    "bitwise_and": lambda _forms, args, _kwargs: Linear(high=Fraction(args[1])),
    "clamp": lambda forms, args, kwargs: _clamped(
        forms[0], kwargs.get("min", args[1] if len(args) > 1 else None), kwargs.get("max", (*args, None, None)[2])
    ),
    "clamp_min": lambda forms, args, _kwargs: _clamped(forms[0], args[1], None),
    "relu": lambda forms, _args, _kwargs: _clamped(forms[0], 0, None),
    "maximum": lambda forms, _args, _kwargs: join(forms[:2]),
    "minimum": lambda forms, _args, _kwargs: join(forms[:2]),
    "where": lambda forms, _args, _kwargs: join(forms[1:3]),
    "masked_fill": lambda forms, _args, _kwargs: join([forms[0], forms[2]]),
    "cat": lambda forms, _args, _kwargs: forms[0],
    "stack": lambda forms, _args, _kwargs: forms[0],
    "concat": lambda forms, _args, _kwargs: forms[0],
    "cumsum": lambda forms, args, kwargs: _sum_of(forms[0], args[0].shape[kwargs.get("dim", args[-1])]),
    "sum": lambda forms, args, _kwargs: _sum_of(forms[0], args[0].numel()),
    "zeros_like": lambda _forms, _args, _kwargs: Linear(),
    "ones_like": lambda _forms, _args, _kwargs: Linear(low=Fraction(1), high=Fraction(1)),
    **dict.fromkeys(
        ("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "bool"),
        lambda _forms, _args, _kwargs: Linear(high=Fraction(1)),
    ),
}
