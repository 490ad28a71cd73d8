"""Rewrites a piece's graph to float64, and answers questions on its precision. Works on data alone.

Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import msgspec
import torch
from msgspec.structs import replace

from cgtool.graph.values import decode_value, dtype_of, dtype_text, encode_value
from cgtool.plan.pieces import Body, Json, Node, PieceGraph, TensorMeta, with_atoms

_ENTER = "torch.amp.autocast_mode._enter_autocast"
_CASTS = {"float": "double", "half": "double", "bfloat16": "double", "cfloat": "cdouble"}
#: Discontinuous ops: a small change of an input can be a large change of the result.
_STEPS = frozenset(
    {
        *("topk", "sort", "argsort", "msort", "argmax", "argmin", "kthvalue", "mode", "median", "max", "min"),
        *("aminmax", "cummax", "cummin", "gt", "lt", "ge", "le", "eq", "ne", "isclose", "isin", "sign", "heaviside"),
        *("round", "floor", "ceil", "trunc", "fix", "frac", "floor_divide", "floordiv", "remainder", "fmod", "mod"),
        *("int", "long", "short", "char", "byte", "bool", "searchsorted", "bucketize", "histc", "unique"),
        *("nonzero", "masked_select", "multinomial"),
    }
)
_ALLOCATING = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
_SORTING = frozenset({"sort", "argsort", "msort"})
_METHOD_DTYPES = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "cfloat": torch.complex64,
}


def widened(graph: PieceGraph) -> PieceGraph | None:
    """Return `graph` with every float as float64; None if it reinterprets the bytes of a float."""
    if any(_reinterprets_bytes(node) for node in graph.every_node()):
        return None
    return replace(
        graph,
        nodes=tuple(_wide_node(node) for node in graph.nodes),
        inputs=tuple(_wide_meta(meta) for meta in graph.inputs),
        results=tuple(_wide_meta(meta) for meta in graph.results),
    )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for a float, complex128 for a complex dtype, and any other dtype unchanged."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def eps_of(dtype: torch.dtype) -> float:
    """Return the machine epsilon of a float; 1 if torch does not know it."""
    try:
        return torch.finfo(dtype).eps
    except TypeError:
        return 1.0


def lowest_dtype(graph: PieceGraph) -> torch.dtype:
    """Return the least precise float dtype in `graph`; float64 if it has no floats."""
    found = [dtype_of(meta.dtype) for meta in (*graph.inputs, *graph.results)]
    for node in graph.every_node():
        found += _dtypes_in(node)
        if node.kind == "method" and node.target in _CASTS:
            found.append(_METHOD_DTYPES[str(node.target)])
    real = [dtype.to_real() if dtype.is_complex else dtype for dtype in found]
    return max((dtype for dtype in real if dtype.is_floating_point), key=eps_of, default=torch.float64)


def takes_steps(graph: PieceGraph) -> bool:
    """Return whether floats enter a discontinuous op in `graph`, so that rounding may be amplified."""
    dtypes = [dtype_of(meta.dtype) for meta in graph.inputs]
    floating = {f"%{n}" for n, dtype in enumerate(dtypes) if dtype.is_floating_point or dtype.is_complex}
    for index, node in enumerate(graph.nodes):
        if node.kind == "size" or not any(tag == "ref" and body in floating for tag, body in node.atoms()):
            continue
        floating.add(f"%{len(graph.inputs) + index}")
        if (
            short_name(node) in _STEPS
            or any(short_name(inner) in _STEPS for body in node.bodies() for inner in body.nodes)
            or any(not dtype.is_floating_point for dtype in _dtypes_in(node))
        ):
            return True
    return False


def leaves_open(graph: PieceGraph) -> bool:
    """Return whether results of `graph` are undefined in part: uninitialized memory, or the order of equal elements."""
    return sorts(graph) or any(short_name(node) in _ALLOCATING for node in graph.every_node())


def sorts(graph: PieceGraph) -> bool:
    """Return whether `graph` sorts, in which case equal elements may come in any order."""
    return any(short_name(node) in _SORTING for node in graph.every_node())


def short_name(node: Node) -> str:
    """Return the name of a node's op without its library and underscores."""
    target = str(node.target)
    parts = target.removeprefix("torch.ops.aten.").split(".")
    return (parts[0] if target.startswith("torch.ops.aten.") else parts[-1]).strip("_")


def _wide_meta(meta: TensorMeta) -> TensorMeta:
    return replace(meta, dtype=dtype_text(wide_dtype(dtype_of(meta.dtype))))


def _reinterprets_bytes(node: Node) -> bool:
    target = str(node.target)
    is_view = (node.kind == "method" and target == "view") or target.endswith(".view.dtype") or target == "torch.view"
    return is_view and bool(_dtypes_in(node))


def _wide_node(node: Node) -> Node:
    if node.target == _ENTER:
        # device type, dtype, enabled, cache
        return replace(node, args=(*node.args[:2], False, *node.args[3:]))
    if node.kind == "method":
        node = replace(node, target=_CASTS.get(str(node.target), node.target))
    return node.mapped(lambda data: with_atoms(data, _wide_atom))


def _wide_atom(tag: str, body: Json) -> Json:
    if tag == "dtype":
        return {tag: dtype_text(wide_dtype(dtype_of(body)))}
    if tag == "graph":
        body = msgspec.convert(body, Body)
        return {tag: msgspec.to_builtins(replace(body, nodes=tuple(map(_wide_node, body.nodes))))}
    if tag == "const":
        constant = decode_value({tag: body}, str)
        return encode_value(constant.to(wide_dtype(constant.dtype)), str)
    return body if tag == "ref" else {tag: body}


def _dtypes_in(node: Node) -> list[torch.dtype]:
    """Return the dtypes among a node's arguments, and those of its float constants."""
    found = []
    for tag, body in node.atoms():
        if tag == "dtype":
            found.append(dtype_of(body))
        elif tag == "const" and dtype_of(body["dtype"]).is_floating_point:
            found.append(dtype_of(body["dtype"]))
    return found
