"""Restores eager's strides for outputs of a model that eager lays out differently from the trace.

Pieces return the strides that the trace promises, because the next piece was compiled for them. But the model's outputs
should have eager's strides, so a last step copies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace

from cgtool.compiler.proof.twins import leaves_of
from cgtool.graph.expressions import symbols_of
from cgtool.plan.pieces import Dim, Json, PieceGraph, TensorMeta
from cgtool.plan.records import Plan, Step, Variant
from cgtool.runtime.call_guards import with_sizes_from_data
from cgtool.runtime.generate import Code, template_needs, template_source

#: The dimensions of a tensor, outermost in memory first.
Order = tuple[int, ...]


def order_of(tensor: torch.Tensor) -> Order | None:
    """Return the order of a tensor's dimensions in memory; None if it is not dense.

    Dimensions of size 1, whose strides do not matter, come first.
    """
    sizes, strides = tensor.shape, tensor.stride()
    order = tuple(sorted(range(len(sizes)), key=lambda dim: (sizes[dim] != 1, -strides[dim])))
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            return None
        step *= sizes[dim]
    return order


def with_restrides(plan: Plan, restrides: Sequence[Mapping[str, Order]]) -> Plan:
    """Return a plan whose variants restride their outputs, which are named as by `leaves_of`."""
    graphs, variants = dict(plan.graphs), []
    for variant, orders in zip(plan.variants, restrides, strict=True):
        values = _values_of_leaves(variant) if orders else {}
        for name, order in orders.items():
            variant = _with_step(variant, values[name], order, graphs)  # noqa: PLW2901 - each adds to the last
        variants.append(variant)
    return replace(plan, graphs=graphs, variants=tuple(variants))


def _values_of_leaves(variant: Variant) -> dict[str, int]:
    """Return the value id of each tensor output, by its name."""
    symbols = with_sizes_from_data(variant, tuple(symbol.name for symbol in variant.symbols))
    code = Code("leaves")
    marks = {value: torch.empty(0) for value in template_needs(variant.output, symbols)[0] if type(value) is int}
    for symbol in symbols:
        code.add(f"{symbol} = 1")
    output = template_source(
        variant.output, code, symbols=symbols, value=lambda v: code.constant(marks[v]), source=lambda _: "None"
    )
    code.add(f"return {output}")
    found = code.define("leaves", [])()
    numbers = {id(mark): value for value, mark in marks.items()}
    return {name: numbers[id(leaf)] for name, leaf in leaves_of(found, "output") if id(leaf) in numbers}


def _with_step(variant: Variant, value: int, order: Order, graphs: dict[str, PieceGraph]) -> Variant:
    maker = next(step for step in variant.steps if value in step.outputs)
    made = graphs[maker.graph]
    meta = made.results[maker.outputs.index(value)]
    promised = replace(meta, stride=_strides(meta, order))
    used = {name for dim in meta.dims for name in symbols_of(dim)}
    graph = PieceGraph(
        symbols=tuple(symbol for symbol in made.symbols if symbol.name in used),
        facts=(),
        inputs=(meta,),
        aliases=(),
        nodes=(),
        outputs=("%0",),
        results=(promised,),
        ops={},
    )
    graphs[graph.identity()] = graph
    new = max(len(variant.inputs) - 1, *(number for step in variant.steps for number in step.outputs)) + 1
    step = Step(
        piece=-1,
        splitting=True,
        graph=graph.identity(),
        symbols={name: text for name, text in maker.symbols.items() if name in used},
        inputs=(value,),
        outputs=(new,),
    )
    return replace(variant, steps=(*variant.steps, step), output=_renamed(variant.output, value, new))


def _strides(meta: TensorMeta, order: Order) -> tuple[Dim, ...]:
    strides: dict[int, Dim] = {}
    inner: list[Dim] = []
    for dim in reversed(order):
        number = 1
        for size in inner:
            number *= size if isinstance(size, int) else 1
        strides[dim] = "*".join([str(number), *(f"({size})" for size in inner if isinstance(size, str))])
        strides[dim] = number if strides[dim] == str(number) else strides[dim]
        inner.append(meta.shape[dim])
    return tuple(strides[dim] for dim in range(len(order)))


def _renamed(template: Json, value: int, new: int) -> Json:
    if template == ["v", value]:
        return ["v", new]
    if isinstance(template, list | tuple) and template and template[0] != "const":
        return [_renamed(part, value, new) for part in template]
    return template
