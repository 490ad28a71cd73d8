"""Outputs of native code that are views: how they are taken of what it was given or gave.

Grammar, as JSON in a package's metadata::

    outputs = [output...]                          the piece's outputs, in order
    output  = [source, index]                      the very tensor: "native" 0 is the first that the native code gives,
                                                   "input" 1 the second that the piece takes (its constants are last)
            | [source, index, [dim...], [dim...], dim]   a view of it by sizes, strides and an offset, in elements
    dim     = int | an expression over the piece's symbols (`cgtool.graph.expressions`)

Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from cgtool.plan.pieces import Json, PieceGraph
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.generate import Code, expression, malformed, tuple_source

#: The metadata's name for how outputs are made.
OUTPUTS = "CGTOOL_OUTPUTS"
_SOURCES = frozenset({"input", "native"})
_SYMBOL = re.compile(r"s(0|[1-9][0-9]*)\Z")
_WHOLE, _VIEW = 2, 5


def with_views(run: Boxed, outputs: str, graph: PieceGraph, *, num_constants: int) -> Boxed:
    """Return `run` as a function that gives the piece's outputs.

    Args:
        run: The native code.
        outputs: The JSON of the grammar above.
        graph: The piece.
        num_constants: How many constants `run` takes after the piece's inputs.

    Raises:
        ArtifactError: `outputs` is outside the grammar.
    """
    recipe = _parsed(outputs, graph)
    code = Code("outputs")
    symbols = _bind_inputs(code, recipe, graph, len(graph.inputs) + num_constants)
    code.add(f"outs = {code.constant(run)}(args)")
    parts = [_part(entry, code, symbols) for entry in recipe]
    code.add(f"return [{', '.join(parts)}]")
    return code.define("outputs", ["args"])


def _parsed(outputs: str, graph: PieceGraph) -> list[Any]:
    try:
        recipe = json.loads(outputs)
    except (ValueError, RecursionError) as error:
        raise malformed("list of outputs", outputs) from error
    if type(recipe) is not list or len(recipe) != len(graph.outputs):
        raise malformed("list of outputs", outputs)
    for entry in recipe:
        whole = type(entry) is list and len(entry) in {_WHOLE, _VIEW} and type(entry[1]) is int and entry[1] >= 0
        if not whole or type(entry[0]) is not str or entry[0] not in _SOURCES:
            raise malformed("output", entry)
        if len(entry) == _VIEW and not (all(type(part) is list for part in entry[2:4]) and _are_dims(entry)):
            raise malformed("output", entry)
    return recipe


def _are_dims(entry: list[Any]) -> bool:
    return all(type(dim) in {int, str} for dim in (*entry[2], *entry[3], entry[4]))


def _bind_inputs(code: Code, recipe: list[Any], graph: PieceGraph, num_inputs: int) -> tuple[str, ...]:
    """Keep the inputs that views are taken of, and the sizes that these are taken by; return the sizes' names.

    Native code empties the list of inputs.
    """
    for index in sorted({entry[1] for entry in recipe if entry[0] == "input"}):
        if index >= num_inputs:
            raise malformed("output", ["input", index])
        code.add(f"i{index} = args[{index}]")
    if all(len(entry) == _WHOLE for entry in recipe):
        return ()
    places = {dim: (n, axis) for n, meta in enumerate(graph.inputs) for axis, dim in enumerate(meta.shape)}
    symbols = tuple(symbol.name for symbol in graph.symbols if symbol.name in places)
    for name in symbols:
        if not _SYMBOL.match(name):
            raise malformed("symbol", name)
        code.add(f"{name} = args[{places[name][0]}].shape[{places[name][1]}]")
    return symbols


def _part(entry: list[Json], code: Code, symbols: tuple[str, ...]) -> str:
    source = f"i{entry[1]}" if entry[0] == "input" else f"outs[{entry[1]}]"
    if len(entry) == _WHOLE:
        return source
    shape, stride = (tuple_source(expression(dim, symbols) for dim in part) for part in entry[2:4])
    offset = f"{source}.storage_offset() + {expression(entry[4], symbols)}"
    return f"{code.constant(torch.as_strided)}({source}, {shape}, {stride}, {offset})"
