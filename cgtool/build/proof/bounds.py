"""In which range the integers of a piece's inputs must lie, found by watching where they go.

The piece is run op by op with every integer at zero (or one), and each value that depends on an integer input is
followed as a linear form of it, through views, casts and arithmetic, to the op that takes it for an index. Must not
import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from cgtool.build.proof.forms import RULES, Linear, join
from cgtool.graph.targets import check_method, resolve_target
from cgtool.graph.values import decode_value
from cgtool.pieces import Json, Node, PieceGraph

#: No index of a piece is larger.
_UNBOUNDED = 1 << 31


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


class OutOfRangeError(Exception):
    """The integers that a watched run began with are outside of what an op takes; the ranges know better now."""


def index_ranges(graph: PieceGraph, inputs: Sequence[torch.Tensor], ranges: dict[int, Range]) -> None:
    """Find out what the ops of `graph` allow each integer input to hold.

    Args:
        graph: The piece.
        inputs: Inputs that it runs on, each integer input filled with the `low` of its range; they may be written to.
        ranges: By input, updated in place as far as the run comes.

    Raises:
        OutOfRangeError: A range changed so that `inputs` are outside of it.
        Exception: Whatever an op raises on them.
    """
    watch = _Watch(graph, inputs, ranges)
    with torch.no_grad():
        watch.run()


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether a dtype holds integers; booleans are none."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


class _Watch:
    def __init__(self, graph: PieceGraph, inputs: Sequence[torch.Tensor], ranges: dict[int, Range]) -> None:
        self._graph = graph
        self._values: list[Any] = list(inputs)
        #: value number → its form; None where it depends on an integer input in some other way
        self._forms: dict[int, Linear | None] = {}
        self._ranges = ranges
        self._began = {number: found.low for number, found in ranges.items()}
        for number in ranges:
            self._forms[number] = Linear(factors={number: Fraction(1)})

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
            self._note_indexing(name, args[0], encoded, index)

    def _note_indexing(self, name: str, data: torch.Tensor, encoded: Json, index: Any) -> None:
        distinct = 0 if name in _WRITES_BY_INDEXING else None
        items = list(index) if isinstance(index, tuple | list) else [index]
        words = (
            encoded["t"]
            if isinstance(encoded, dict) and "t" in encoded
            else encoded
            if type(encoded) is list
            else [encoded]
        )
        if name in _ATEN_INDEXING:  # there, None is a whole dimension
            items = [slice(None) if item is None else item for item in items]
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
            found = self._ranges[number]
            if factor > 0:
                high = math.floor((size - 1 - form.high) / (share * factor))
                found.low = max(found.low, math.ceil(-form.low / factor))
            else:
                high = math.floor(form.low / (share * -factor))
            found.high = high if found.high is None else min(found.high, high)
            found.high = max(found.high, found.low)
            if distinct is not None:
                found.distinct_along = distinct
            if self._began[number] < found.low:
                # not a step further: an accelerator does not survive an index out of range
                raise OutOfRangeError

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
        rule = RULES.get(name)
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
            return join([self._lift(w, v) for w, v in zip(words, value, strict=False)])
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
    return isinstance(value, torch.Tensor) and is_integer(value.dtype)


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
_ATEN_INDEXING = frozenset({"index", "index_put", "unsafe_index", "index_put_impl"})
_WRITES_BY_INDEXING = frozenset({"setitem", "index_put", "index_put_impl"})
