"""A plan as readable Python: `transformed_code.py`, for people. Nothing ever runs it. Must not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from cgtool.plan.pieces import Node, PieceGraph, TensorMeta
from cgtool.plan.records import Plan, Step
from cgtool.store.layout import short
from cgtool.words import source_words

_HEADER = '''"""The stitched programs of this entry, for people: what runs, in which order, on which tensors.

Generated from plan.json, which is what is loaded. v<n> are values; piece_<i> is a compiled piece.
"""
'''


def plan_text(plan: Plan) -> str:
    """Return all variants of `plan` as text."""
    parts = [_HEADER, *(line for index in range(len(plan.variants)) for line in _variant(plan, index))]
    return "\n".join(parts) + "\n"


def _variant(plan: Plan, index: int) -> Iterator[str]:
    variant = plan.variants[index]
    fixed = "".join(f", {name} = {size}" for name, size in variant.fixed.items())
    yield f"\n\ndef variant_{index}(self, call):  # {variant.name}{fixed}"
    for symbol in variant.symbols:
        carried = [name for name, symbols in variant.dims.items() if symbol.name in symbols]
        bounds = f"{symbol.min} to {symbol.max}" if symbol.max is not None else f"at least {symbol.min}"
        yield f"    # {symbol.name}: {', '.join(carried) or 'a size'}, {bounds}"
    for relation in variant.relations:
        yield f"    # holds: {relation}"
    for number, given in enumerate(variant.inputs):
        name = source_words(given.source)
        owner = "self." if given.source.startswith("self.") else "call."
        yield f"    v{number} = {owner}{name}  # {_tensor(given.meta)}"
    for step in variant.steps:
        yield from _step(plan.graphs[step.graph], step)
    yield f"    return {variant.output!r}"


def _step(graph: PieceGraph, step: Step) -> Iterator[str]:
    results = ", ".join(f"v{number}" for number in step.outputs)
    given = ", ".join(f"v{number}" for number in step.inputs)
    if not step.splitting and step.piece >= 0:
        assign = f"{results} = " if results else ""
        yield f"    {assign}piece_{step.piece}({given})  # {short(step.graph)}, {len(graph.nodes)} ops"
        return
    yield f"    # piece {step.piece}, splitting: runs as it stands"
    names = {f"%{place}": f"v{number}" for place, number in enumerate(step.inputs)}
    names.update(zip(graph.outputs, (f"v{number}" for number in step.outputs), strict=False))
    for offset, node in enumerate(graph.nodes):
        reference = f"%{len(graph.inputs) + offset}"
        target = names.get(reference, f"t{offset}")
        names.setdefault(reference, target)
        yield f"    {target} = {_call(node, names)}"


def _call(node: Node, names: dict[str, str]) -> str:
    args = [_value(value, names) for value in node.args]
    if node.kind == "size":
        return f"{args[0]}.shape[{args[1]}]"
    named = [f"{key}={_value(value, names)}" for key, value in node.kwargs.items()]
    if node.kind == "method":
        return f"{args[0]}.{node.target}({', '.join(args[1:] + named)})"
    return f"{node.target}({', '.join(args + named)})"


def _value(value: object, names: dict[str, str]) -> str:
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item, names) for item in value) + "]"
    if isinstance(value, dict):
        tag, inner = next(iter(value.items()))
        if tag == "s":
            return repr(inner)
        if tag == "t":
            return "(" + "".join(_value(item, names) + ", " for item in inner) + ")"
        return str(inner) if tag in {"f", "dtype", "device"} else f"{tag} {inner}"
    return str(value)


def _tensor(meta: TensorMeta) -> str:
    return f"{meta.dtype}[{', '.join(map(str, meta.shape))}] {meta.device}"
