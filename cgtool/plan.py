"""The plan: the stitched programs of one rank and prefix as data. Must not import torch.

`plan.json` is what `load` generates Python from. Everything that reaches generated code is matched to a grammar first
(`cgtool.runtime`). Grammar::

    plan     = {"schema": 1, "method": str, "qualname": "module:Class", "variants": [variant...],
                "graphs": {identity: graph}}
    variant  = {"name": str, "fixed": {dim name: int}, "dims": {dim name: [symbol...]}, "symbols": [symbol...],
                "relations": [expr...], "inputs": [[source, tensor]...], "model_guards": [guard...],
                "call_guards": [guard...], "steps": [step...], "output": template}
    guard    = [source, kind, expected]  see cgtool.guards.kinds
    source   = root accessor*            see cgtool.guards.sources
    step     = {"piece": int, "splitting": bool, "graph": identity, "symbols": {piece symbol: variant expr},
                "in": [value id...], "out": [value id...]}
               value ids: inputs are 0..n-1, then every output of every step in order.
    template = ["v", value id] | ["const", literal] | ["expr", expr] | ["list"|"tuple", [template...]]
             | ["dict", [[key literal, template]...]] | ["call", "module:Qual", [template...], [[name, template]...]]
             | ["source", source]        the very object that was passed in, or an attribute of the model
    literal  = a value as data           see cgtool.guards.literals
"""

from __future__ import annotations

import json
from pathlib import Path

from cgtool.errors import CacheCorruptError, CacheSchemaError
from cgtool.pieces import Json, PieceGraph, SymbolRange, TensorMeta
from cgtool.records import dataclass

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A fact that held when the model was traced: `describe(kind, resolve(source)) == expected`."""

    source: str
    kind: str
    expected: Json

    def to_json(self) -> Json:
        """Return the record as JSON; the grammar stands at the head of this module."""
        return [self.source, self.kind, self.expected]

    @classmethod
    def from_json(cls, data: Json) -> Guard:
        """Return the Guard of `data`, as `to_json` wrote it."""
        source, kind, expected = data
        return cls(source=source, kind=kind, expected=expected)


@dataclass(frozen=True, kw_only=True)
class Input:
    """A tensor that the stitched program takes.

    Args:
        source: Where it comes from: a parameter or buffer of the model, an argument, a global.
        meta: Its dtype, shape, stride and device, over the variant's symbols.
    """

    source: str
    meta: TensorMeta

    def to_json(self) -> Json:
        """Return the record as JSON; the grammar stands at the head of this module."""
        return [self.source, self.meta.to_json()]

    @classmethod
    def from_json(cls, data: Json) -> Input:
        """Return the Input of `data`, as `to_json` wrote it."""
        source, meta = data
        return cls(source=source, meta=TensorMeta.from_json(meta))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One piece of a stitched program.

    Args:
        piece: Its `piece_index`; a step that only computes sizes for the output has -1.
        splitting: Whether it holds a splitting op; such a piece runs as it stands and is never compiled.
        graph: The identity of its `PieceGraph` in the plan.
        symbols: The piece's symbols over the variant's.
        inputs: Value ids, one for each input of the graph.
        outputs: Value ids, one for each output of the graph.
    """

    piece: int
    splitting: bool
    graph: str
    symbols: dict[str, str]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def to_json(self) -> Json:
        """Return the record as JSON; the grammar stands at the head of this module."""
        return {
            "piece": self.piece,
            "splitting": self.splitting,
            "graph": self.graph,
            "symbols": self.symbols,
            "in": list(self.inputs),
            "out": list(self.outputs),
        }

    @classmethod
    def from_json(cls, data: Json) -> Step:
        """Return the Step of `data`, as `to_json` wrote it."""
        return cls(
            piece=data["piece"],
            splitting=data["splitting"],
            graph=data["graph"],
            symbols=dict(data["symbols"]),
            inputs=tuple(data["in"]),
            outputs=tuple(data["out"]),
        )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One stitched program and what must hold for a call that it serves; see the module's grammar.

    Args:
        name: The example call's name.
        fixed: Dimensions that this variant fixes, by name: {"num_tokens": 1}.
        dims: Dynamic dimensions by name, and the symbols that carry each.
        symbols: The variant's symbols and their ranges.
        relations: Expressions over the symbols that must be true.
    """

    name: str
    fixed: dict[str, int]
    dims: dict[str, tuple[str, ...]]
    symbols: tuple[SymbolRange, ...]
    relations: tuple[str, ...]
    inputs: tuple[Input, ...]
    model_guards: tuple[Guard, ...]
    call_guards: tuple[Guard, ...]
    steps: tuple[Step, ...]
    output: Json

    def to_json(self) -> Json:
        """Return the record as JSON; the grammar stands at the head of this module."""
        return {
            "name": self.name,
            "fixed": self.fixed,
            "dims": {name: list(symbols) for name, symbols in self.dims.items()},
            "symbols": [s.to_json() for s in self.symbols],
            "relations": list(self.relations),
            "inputs": [i.to_json() for i in self.inputs],
            "model_guards": [g.to_json() for g in self.model_guards],
            "call_guards": [g.to_json() for g in self.call_guards],
            "steps": [s.to_json() for s in self.steps],
            "output": self.output,
        }

    @classmethod
    def from_json(cls, data: Json) -> Variant:
        """Return the Variant of `data`, as `to_json` wrote it."""
        return cls(
            name=data["name"],
            fixed=dict(data["fixed"]),
            dims={name: tuple(symbols) for name, symbols in data["dims"].items()},
            symbols=tuple(SymbolRange.from_json(s) for s in data["symbols"]),
            relations=tuple(data["relations"]),
            inputs=tuple(Input.from_json(i) for i in data["inputs"]),
            model_guards=tuple(Guard.from_json(g) for g in data["model_guards"]),
            call_guards=tuple(Guard.from_json(g) for g in data["call_guards"]),
            steps=tuple(Step.from_json(s) for s in data["steps"]),
            output=data["output"],
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All variants of one rank and prefix, and the graphs of their pieces by identity."""

    method: str
    qualname: str
    variants: tuple[Variant, ...]
    graphs: dict[str, PieceGraph]

    def to_json(self) -> Json:
        """Return the record as JSON; the grammar stands at the head of this module."""
        return {
            "schema": SCHEMA,
            "method": self.method,
            "qualname": self.qualname,
            "variants": [v.to_json() for v in self.variants],
            "graphs": {identity: graph.to_json() for identity, graph in self.graphs.items()},
        }

    @classmethod
    def from_json(cls, data: Json) -> Plan:
        """Return the Plan of `data`, as `to_json` wrote it."""
        return cls(
            method=data["method"],
            qualname=data["qualname"],
            variants=tuple(Variant.from_json(v) for v in data["variants"]),
            graphs={identity: PieceGraph.from_json(graph) for identity, graph in data["graphs"].items()},
        )


def parse_plan(data: bytes, *, path: Path) -> Plan:
    """Return the plan in the bytes of a file, whose digest the manifest has vouched for.

    Args:
        data: The bytes.
        path: Where they were read, for errors.

    Raises:
        CacheSchemaError: Another version of cgtool wrote it.
        CacheCorruptError: It is no plan.
    """
    try:
        document = json.loads(data)
        schema = document["schema"]
        plan = Plan.from_json(document) if schema == SCHEMA else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is no plan ({error}). Warm the model again."
        raise CacheCorruptError(message, path=path) from error
    if plan is None:
        message = f"{path} has schema {schema}; this cgtool reads schema {SCHEMA}. Warm the model again with it."
        raise CacheSchemaError(message, path=path, expected=SCHEMA, actual=schema)
    return plan
