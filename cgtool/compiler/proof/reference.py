"""A piece in a higher precision: the same graph with every float in float64. Pure data, and what it says of precision.

Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import replace

from cgtool.graph.metas import dtype_of, dtype_text
from cgtool.graph.values import decode_value, encode_value
from cgtool.plan.pieces import Json, Node, PieceGraph, TensorMeta

_ENTER = "torch.amp.autocast_mode._enter_autocast"
_EXIT = "torch.amp.autocast_mode._exit_autocast"
_CASTS = {"float": "double", "half": "double", "bfloat16": "double", "cfloat": "cdouble"}
#: A small difference of what they are given can be a large one of what they give.
_STEPS = frozenset(
    [
        "topk",
        "sort",
        "argsort",
        "argmax",
        "argmin",
        "kthvalue",
        "mode",
        "msort",
        "median",
        "gt",
        "lt",
        "ge",
        "le",
        "eq",
        "ne",
        "isclose",
        "round",
        "floor",
        "ceil",
        "trunc",
        "sign",
        "fix",
        "floor_divide",
        "floordiv",
        "remainder",
        "fmod",
        "mod",
        "int",
        "long",
        "short",
        "char",
        "byte",
        "bool",
        "searchsorted",
        "bucketize",
        "histc",
        "heaviside",
        "nonzero",
        "unique",
        "masked_select",
        "frac",
        "max",
        "min",
        "aminmax",
        "cummax",
        "cummin",
        "multinomial",
        "isin",
    ]
)


def widened(graph: PieceGraph) -> PieceGraph | None:
    """Return `graph` with float64 for every float; None where it looks at the bytes of a float."""
    nodes = []
    for node in graph.nodes:
        if _looks_at_bytes(node):
            return None
        nodes.append(_wide_node(node))
    return replace(
        graph,
        nodes=tuple(nodes),
        inputs=tuple(_wide_meta(meta) for meta in graph.inputs),
        results=tuple(_wide_meta(meta) for meta in graph.results),
    )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for every float, complex128 for every complex dtype, and others as they are."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def lowest_dtype(graph: PieceGraph) -> torch.dtype:
    """Return the float of the least precision that `graph` holds anywhere; float64 where it holds none."""
    found = [dtype_of(meta.dtype) for meta in (*graph.inputs, *graph.results)]
    for node in graph.nodes:
        found += _dtypes_in([*node.args, *node.kwargs.values()])
        if node.kind == "method" and node.target in _CASTS:
            found.append(_METHOD_DTYPES[str(node.target)])
    real = [dtype.to_real() if dtype.is_complex else dtype for dtype in found]
    floats = [dtype for dtype in real if dtype.is_floating_point]
    return max(floats, key=_eps, default=torch.float64)


def takes_steps(graph: PieceGraph) -> bool:
    """Return whether floats decide something in `graph`: then a rounding may change a result by more than itself."""
    floating = {n for n, meta in enumerate(graph.inputs) if wide_dtype(dtype_of(meta.dtype)) != dtype_of(meta.dtype)}
    floating |= {n for n, meta in enumerate(graph.inputs) if meta.dtype in ("float64", "complex128")}
    for index, node in enumerate(graph.nodes):
        if node.kind == "size" or not floating.intersection(_refs_in([*node.args, *node.kwargs.values()])):
            continue
        floating.add(len(graph.inputs) + index)
        given = _dtypes_in([*node.args, *node.kwargs.values()])
        if short_name(node) in _STEPS or any(not dtype.is_floating_point for dtype in given):
            return True
    return False


def filled(graph: PieceGraph, value: float) -> PieceGraph:
    """Return `graph` with memory that it leaves uninitialised set to `value`; the graph itself where there is none."""
    nodes: list[Node] = []
    places = {f"%{n}": f"%{n}" for n in range(len(graph.inputs))}
    for index, node in enumerate(graph.nodes):
        nodes.append(
            replace(
                node,
                args=tuple(_renamed(arg, places) for arg in node.args),
                kwargs={name: _renamed(arg, places) for name, arg in node.kwargs.items()},
            )
        )
        place = f"%{len(graph.inputs) + len(nodes) - 1}"
        places[f"%{len(graph.inputs) + index}"] = place
        if node.kind != "size" and short_name(node) in _UNINITIALISED:
            nodes.append(Node(kind="method", target="fill_", args=(place, {"f": repr(value)}), kwargs={}))
    if len(nodes) == len(graph.nodes):
        return graph
    return replace(graph, nodes=tuple(nodes), outputs=tuple(places[ref] for ref in graph.outputs))


def _renamed(data: Json, places: Mapping[str, str]) -> Json:
    if isinstance(data, str):
        return places[data]
    if isinstance(data, list):
        return [_renamed(item, places) for item in data]
    if isinstance(data, dict):
        return {
            tag: _renamed(body, places) if tag in _HOLD_VALUES and isinstance(body, list) else body
            for tag, body in data.items()
        }
    return data


def short_name(node: Node) -> str:
    """Return what a node's op is called, without its library and its underscores."""
    target = str(node.target)
    parts = target.removeprefix("torch.ops.aten.").split(".")
    return (parts[0] if target.startswith("torch.ops.aten.") else parts[-1]).strip("_")


_UNINITIALISED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
_HOLD_VALUES = frozenset({"t", "d", "slice"})
_METHOD_DTYPES = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "cfloat": torch.complex64,
}


def _eps(dtype: torch.dtype) -> float:
    try:
        return torch.finfo(dtype).eps
    except TypeError:
        return 1.0


def _wide_meta(meta: TensorMeta) -> TensorMeta:
    return replace(meta, dtype=dtype_text(wide_dtype(dtype_of(meta.dtype))))


def _looks_at_bytes(node: Node) -> bool:
    target = str(node.target)
    is_view = (node.kind == "method" and target == "view") or target.endswith(".view.dtype") or target == "torch.view"
    return is_view and bool(_dtypes_in([*node.args, *node.kwargs.values()]))


def _wide_node(node: Node) -> Node:
    if node.target == _ENTER:
        # device type, dtype, enabled, cache
        args = (*node.args[:2], False, *node.args[3:])
        return replace(node, args=args)
    target = _CASTS.get(str(node.target), node.target) if node.kind == "method" else node.target
    return replace(
        node,
        target=target,
        args=tuple(_wide_value(arg) for arg in node.args),
        kwargs={name: _wide_value(arg) for name, arg in node.kwargs.items()},
    )


def _wide_value(data: Json) -> Json:
    if isinstance(data, list):
        return [_wide_value(item) for item in data]
    if not isinstance(data, dict):
        return data
    [(tag, body)] = data.items()
    if tag == "dtype":
        return {"dtype": dtype_text(wide_dtype(dtype_of(body)))}
    if tag == "const":
        constant = decode_value(data, str)
        return encode_value(constant.to(wide_dtype(constant.dtype)), str)
    if isinstance(body, list):
        return {tag: [_wide_value(item) for item in body]}
    return data


def _dtypes_in(data: Any) -> list[torch.dtype]:
    if isinstance(data, list | tuple):
        return [dtype for item in data for dtype in _dtypes_in(item)]
    if isinstance(data, dict):
        if "dtype" in data and isinstance(data["dtype"], str) and "data" not in data:
            return [dtype_of(data["dtype"])]
        if "const" in data:
            return [dtype_of(data["const"]["dtype"])] if dtype_of(data["const"]["dtype"]).is_floating_point else []
        return [dtype for body in data.values() if isinstance(body, list) for dtype in _dtypes_in(body)]
    return []


def _refs_in(data: Any) -> set[int]:
    if isinstance(data, str):
        return {int(data[1:])}
    if isinstance(data, list | tuple):
        return {ref for item in data for ref in _refs_in(item)}
    if isinstance(data, dict):
        return {ref for tag, body in data.items() if tag in _HOLD_VALUES for ref in _refs_in(body)}
    return set()
