"""Which tensors a node writes to.

What cannot be known is said to write: an extra hazard costs speed, a missed one truth.

Sources of the truth, all of them consulted:
- the schema of the op, or of the ATen op of the same name, for overloads that the call can mean;
- names: methods and functions that end in one underscore, `out=`, `inplace=True`, `operator.setitem` and `i...`;
- ops whose schema says nothing although they write (batch norm's running statistics);
- tensors' version counters: memory that was written while Dynamo looked, by nobody of the above, was written by
  whichever Python function took it.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

from cgtool.split import _torch as private
from cgtool.split.nodes import RUNS, Kind, example, tensors_in

_IN_PLACE_OPERATORS = frozenset(
    {
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "iconcat", "setitem", "delitem"),
    }
)
_IN_PLACE_METHODS = frozenset({f"__{name}__" for name in _IN_PLACE_OPERATORS})
#: Functions that write to arguments of these positions or names when they train, whatever their schema says.
_RUNNING_STATISTICS = {"batch_norm": 5, "instance_norm": 5, "native_batch_norm": 5, "_native_batch_norm_legit": 5}
_STATISTICS = ("running_mean", "running_var", 1, 2, 3, 4)


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of `node` whose memory it writes to, as far as the call itself tells."""
    found: dict[fx.Node, None] = {}
    for value in _written_values(node):
        for leaf in _nodes_in(value):
            if any(True for _ in tensors_in(example(leaf))):
                found[leaf] = None
    return list(found)


def changes_shape(node: fx.Node) -> bool:
    """Return whether `node` changes the shape or strides of an argument in place (`unsqueeze_`, `resize_`, `t_`)."""
    return any(torch.Tag.inplace_view in op.tags or op.__name__.startswith(("resize_", "set_")) for op in _ops_of(node))


def unexplained_writes(
    kinds: dict[fx.Node, Kind], storage_of: dict[fx.Node, frozenset[int]], written: set[int]
) -> Iterator[tuple[fx.Node, int]]:
    """Yield (node, storage) for memory that was written by nobody known, with each function that may have done it.

    Args:
        kinds: All nodes.
        storage_of: The storages of what each node gives.
        written: Storages for which a writer is known.
    """
    suspects: set[int] = set()
    for node, kind in kinds.items():
        if kind in (Kind.INPUT, Kind.TENSOR):
            keys = storage_of.get(node, frozenset())
            if not keys & written and any(private.version_of(tensor) > 0 for tensor in tensors_in(example(node))):
                suspects |= keys
    if not suspects:
        return
    for node, kind in kinds.items():
        if kind in RUNS and isinstance(node.target, types.FunctionType):
            for argument in node.all_input_nodes:
                for key in storage_of.get(argument, frozenset()) & suspects:
                    yield node, key


def _written_values(node: fx.Node) -> Iterator[Any]:
    args, kwargs = node.args, node.kwargs
    name = _short_name(node)
    yield kwargs.get("out")
    if args and _writes_to_first(node, name):
        yield args[0]
    if name in _RUNNING_STATISTICS and _trains(node, name):
        for place in _STATISTICS:
            yield kwargs.get(place) if isinstance(place, str) else _at(args, place)
    for op in _ops_of(node):
        for index, argument in enumerate(private.schema_of(op).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield kwargs.get(argument.name) if argument.name in kwargs else _at(args, index)


def _at(args: tuple[Any, ...], index: int) -> Any:
    return args[index] if index < len(args) else None


def _writes_to_first(node: fx.Node, name: str) -> bool:
    if name.endswith("_") and not name.endswith("__"):
        # `and_` and its like are plain operators whose underscore keeps them apart from keywords.
        return getattr(operator, name, None) is not node.target
    if node.op == "call_method":
        return name in _IN_PLACE_METHODS
    if name in _IN_PLACE_OPERATORS:
        return getattr(operator, name, None) is node.target
    inplace = node.kwargs.get("inplace")
    if inplace is None and isinstance(node.target, types.FunctionType):
        position = _position_of_inplace(node.target)
        inplace = _at(node.args, position) if position is not None else None
    return inplace is not None and inplace is not False


@cache
def _position_of_inplace(function: types.FunctionType) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def _trains(node: fx.Node, name: str) -> bool:
    for word in ("training", "train", "use_input_stats"):
        if word in node.kwargs:
            return node.kwargs[word] is not False
    position = _RUNNING_STATISTICS[name]
    return len(node.args) > position and node.args[position] is not False


def _short_name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, private.OpOverload | private.OpOverloadPacket):
        return private.op_name(node.target).partition("::")[2].partition(".")[0]
    return getattr(node.target, "__name__", "")


def _ops_of(node: fx.Node) -> list[Any]:
    """Return the overloads that the call can mean: its own, or those of the ATen op of the same name."""
    target = node.target
    if isinstance(target, private.OpOverload):
        return [target]
    if isinstance(target, private.OpOverloadPacket):
        overloads = private.overloads_of(target)
    elif node.op == "call_method" or not isinstance(target, types.FunctionType):
        overloads = _aten_overloads(_short_name(node))
    else:
        return []
    return overloads if len(overloads) == 1 else [op for op in overloads if _can_mean(op, node)]


@cache
def _aten_overloads(short: str) -> list[Any]:
    packet = getattr(torch.ops.aten, short, None) if short and not short.startswith("__") else None
    return private.overloads_of(packet) if isinstance(packet, private.OpOverloadPacket) else []


def _can_mean(op: Any, node: fx.Node) -> bool:
    """Return whether an overload takes these keywords, and all that it needs by keyword is there (`out`)."""
    arguments = private.schema_of(op).arguments
    if not set(node.kwargs) <= {argument.name for argument in arguments} | {"input", "axis", "keepdims"}:
        return False
    return all(
        not argument.kwarg_only or argument.has_default_value() or argument.name in node.kwargs
        for argument in arguments
    )


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found
