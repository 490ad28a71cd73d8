"""In which range the integers of a piece's inputs must lie, found by watching where they go.

The piece is run op by op with every integer at zero (or one), and each value that depends on an integer input is
followed as a linear form of it, through views, casts and arithmetic, to the op that takes it for an index. Must not
import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from cgtool.graph.targets import check_method, resolve_target
from cgtool.graph.values import decode_value
from cgtool.pieces import Json, Node, PieceGraph

#: No index of a piece is larger.
_UNBOUNDED = 1 << 31


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A value that lies in `low + sum(factor * input)` to `high + sum(factor * input)`."""

    factors: Mapping[int, Fraction] = field(default_factory=dict)
    low: Fraction = Fraction(0)
    high: Fraction = Fraction(0)


@dataclass(kw_only=True)
class Range:
    """The integers that one input may hold, inclusive.

    Args:
        low: The smallest.
        high: The largest; None where nothing bounds it.
        distinct_along: A dimension along which they must differ, being places that are written to; None where they
            need not.
    """

    low: int = 0
    high: int | None = None
    distinct_along: int | None = None


def index_ranges(graph: PieceGraph, inputs: Sequence[torch.Tensor]) -> dict[int, Range]:
    """Return for each integer input of `graph` what its ops allow.

    Args:
        graph: The piece.
        inputs: Inputs that it runs on, integers all zero or one; they may be written to.

    Raises:
        Exception: Whatever an op raises on them.
    """
    watch = _Watch(graph, inputs)
    with torch.no_grad():
        watch.run()
    return watch.ranges


class _Watch:
    def __init__(self, graph: PieceGraph, inputs: Sequence[torch.Tensor]) -> None:
        self._graph = graph
        self._values: list[Any] = list(inputs)
        #: value number → its form; None where it depends on an integer input in some other way
        self._forms: dict[int, Linear | None] = {}
        self.ranges: dict[int, Range] = {}
        for number, tensor in enumerate(inputs):
            if _is_integer(tensor):
                self._forms[number] = Linear(factors={number: Fraction(1)})
                self.ranges[number] = Range()

    def run(self) -> None:
        for node in self._graph.nodes:
            args = [decode_value(arg, self._value) for arg in node.args]
            kwargs = {name: decode_value(arg, self._value) for name, arg in node.kwargs.items()}
            name = _op_name(node)
            self._note_indices(name, node, args, kwargs)
            form, known = self._form(name, node, args, kwargs)
            if known:
                self._forms[len(self._values)] = form
            self._values.append(_run(node, args, kwargs))

    def _value(self, ref: str) -> Any:
        return self._values[int(ref[1:])]

    # which ops take an index, and of what size

    def _note_indices(self, name: str, node: Node, args: list[Any], kwargs: dict[str, Any]) -> None:
        def given(position: int, keyword: str) -> tuple[Json, Any]:
            if keyword in kwargs:
                return node.kwargs[keyword], kwargs[keyword]
            return (node.args[position], args[position]) if position < len(args) else (None, None)

        if name == "embedding":
            first, second = given(0, "input"), given(1, "weight")
            if isinstance(first[1], torch.Tensor) and first[1].is_floating_point():  # aten.embedding(weight, indices)
                first, second = second, first
            self._bound(first[0], second[1].shape[0])
        elif name in _ALONG_DIM:
            data, dim, index = args[0] if args else kwargs["input"], given(1, "dim")[1], given(2, "index")[0]
            distinct = dim if name in _WRITES_ALONG_DIM else None
            self._bound(index, data.shape[dim] if data.dim() else 1, distinct=distinct)
        elif name == "take_along_dim":
            index, dim = given(1, "indices"), given(2, "dim")[1]
            self._bound(index[0], args[0].numel() if dim is None else args[0].shape[dim])
        elif name in ("take", "put"):
            self._bound(given(1, "index")[0], args[0].numel())
        elif name == "one_hot":
            classes = given(1, "num_classes")[1]
            self._bound(given(0, "input")[0], classes if isinstance(classes, int) and classes > 0 else 8)
        elif name in ("cross_entropy", "nll_loss", "nll_loss_forward", "cross_entropy_loss"):
            self._bound(given(1, "target")[0], args[0].shape[1 if args[0].dim() > 1 else 0])
        elif name in _BY_INDEXING and isinstance(args[0], torch.Tensor):
            index, encoded = given(1, "indices")[1], given(1, "indices")[0]
            self._note_indexing(args[0], encoded, index, distinct=0 if name in _WRITES_BY_INDEXING else None)

    def _note_indexing(self, data: torch.Tensor, encoded: Json, index: Any, *, distinct: int | None) -> None:
        items = list(index) if isinstance(index, tuple | list) else [index]
        words = (
            encoded["t"]
            if isinstance(encoded, dict) and "t" in encoded
            else encoded
            if type(encoded) is list
            else [encoded]
        )
        consumed = sum(_dims_taken(item) for item in items)
        dim = 0
        for item, word in zip(items, words, strict=False):
            if item is ...:
                dim += data.dim() - consumed
                continue
            if isinstance(item, torch.Tensor) and item.dtype != torch.bool and dim < data.dim():
                self._bound(word, data.shape[dim], distinct=distinct)
            dim += _dims_taken(item)

    def _bound(self, ref: Json, size: int, *, distinct: int | None = None) -> None:
        """Note that the value `ref` must lie in 0 to size - 1."""
        form = self._forms.get(int(ref[1:])) if isinstance(ref, str) else None
        if form is None or not form.factors:
            return
        share = len(form.factors)
        for number, factor in form.factors.items():
            found = self.ranges[number]
            if factor > 0:
                high = math.floor((size - 1 - form.high) / (share * factor))
                found.low = max(found.low, math.ceil(-form.low / factor))
            else:
                high = math.floor(form.low / (share * -factor))
            found.high = high if found.high is None else min(found.high, high)
            found.high = max(found.high, found.low)
            if distinct is not None:
                found.distinct_along = distinct

    # how a value follows from others

    def _form(self, name: str, node: Node, args: list[Any], kwargs: dict[str, Any]) -> tuple[Linear | None, bool]:
        """Return the form of what the node gives, and whether it depends on an integer input at all."""
        words = [*node.args, *node.kwargs.values()]
        if not any(ref in self._forms for ref in _numbers_in(words)):
            return None, False
        if name in _PASSES:
            return self._lift(node.args[0], args[0]) if node.args else None, True
        if name in ("select", "slice", "narrow", *_READS, *_BY_INDEXING):  # values of the data, wherever they were
            return self._lift(node.args[0], args[0]), True
        operands = [self._lift(word, value) for word, value in zip(node.args, args, strict=False)]
        rule = _RULES.get(name)
        if rule is None:
            return None, True
        try:
            return rule(operands, args, kwargs), True
        except (IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            return None, True

    def _lift(self, word: Json, value: Any) -> Linear | None:
        if isinstance(word, str) and int(word[1:]) in self._forms:
            return self._forms[int(word[1:])]
        if isinstance(value, bool | int):
            return Linear(low=Fraction(int(value)), high=Fraction(int(value)))
        if isinstance(value, float) and math.isfinite(value):
            return Linear(low=Fraction(value), high=Fraction(value))
        if isinstance(value, torch.Tensor) and _is_integer(value) and value.numel():
            return Linear(low=Fraction(int(value.min())), high=Fraction(int(value.max())))
        if isinstance(value, list | tuple):
            words = word["t"] if isinstance(word, dict) and "t" in word else word
            return _join([self._lift(w, v) for w, v in zip(words, value, strict=False)])
        return None


def _run(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if node.kind == "size":
        return args[0].size(args[1])
    if node.kind == "method":
        return getattr(args[0], check_method(str(node.target)))(*args[1:], **kwargs)
    return resolve_target(str(node.target))(*args, **kwargs)


def _op_name(node: Node) -> str:
    parts = str(node.target).split(".")
    if str(node.target).startswith("torch.ops."):
        return parts[3].strip("_")
    return parts[-1].strip("_")


def _is_integer(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and not value.is_complex()
        and value.dtype != torch.bool
    )


def _numbers_in(data: Any) -> list[int]:
    if isinstance(data, str):
        return [int(data[1:])]
    if isinstance(data, list | tuple):
        return [number for item in data for number in _numbers_in(item)]
    if isinstance(data, dict):
        return [] if set(data) & {"s", "f"} else [n for item in data.values() for n in _numbers_in_body(item)]
    return []


def _numbers_in_body(body: Any) -> list[int]:
    return _numbers_in(body) if isinstance(body, list) else []


def _dims_taken(item: Any) -> int:
    if item is None or item is ... or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype == torch.bool:
        return item.dim()
    return 1


def _join(forms: Sequence[Linear | None]) -> Linear | None:
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
_RULES: dict[str, _Rule] = {
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
    "maximum": lambda forms, _args, _kwargs: _join(forms[:2]),
    "minimum": lambda forms, _args, _kwargs: _join(forms[:2]),
    "where": lambda forms, _args, _kwargs: _join(forms[1:3]),
    "masked_fill": lambda forms, _args, _kwargs: _join([forms[0], forms[2]]),
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
_PASSES = frozenset(
    [
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "permute",
        "transpose",
        "t",
        "flatten",
        "unflatten",
        "contiguous",
        "clone",
        "to",
        "long",
        "int",
        "type",
        "detach",
        "chunk",
        "split",
        "unbind",
        "tensor_split",
        "repeat",
        "roll",
        "flip",
        "alias",
        "broadcast_to",
        "movedim",
        "swapaxes",
        "tile",
        "float",
        "double",
        "repeat_interleave",
        "to_copy",
        "convert_element_type",
        "split_with_sizes",
        "view_as",
        "reshape_as",
        "lift_fresh_copy",
        "abs",
        "max",
        "min",
        "amax",
        "amin",
        "sort",
        "unfold",
        "as_strided",
        "diagonal",
        "triu",
        "tril",
        "short",
        "half",
        "bfloat16",
        "to_dtype",
        "cummax",
    ]
)
_ALONG_DIM = frozenset(
    [
        "gather",
        "index_select",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "index_add",
        "index_copy",
        "index_fill",
        "index_reduce",
    ]
)
_WRITES_ALONG_DIM = frozenset({"scatter", "index_copy"})
_READS = frozenset({"gather", "index_select", "take_along_dim", "take"})
_BY_INDEXING = frozenset({"getitem", "index", "setitem", "index_put", "unsafe_index", "index_put_impl"})
_WRITES_BY_INDEXING = frozenset({"setitem", "index_put", "index_put_impl"})
