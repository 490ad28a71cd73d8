"""The plan: the stitched programs of one rank and prefix as data. Must not import torch.

`plan.json` is what `load` generates Python from. Everything that reaches generated code is matched to a grammar first
(`cgtool.runtime`). Grammar, in which texts, runs, guards and graphs are those of `cgtool.plan_tables`::

    plan     = {"schema": 2, "method": str, "qualname": "module:Class", "texts": texts, "metas": [tensor...],
                "inputs": {"sources": [source...], "metas": [meta...]}, "guards": guards,
                "symbols": [{piece symbol: variant expr}...], "graphs": graphs, "variants": [variant...]}
    variant  = {"name": str, "fixed": {dim name: int}, "dims": {dim name: [symbol...]}, "symbols": [symbol...],
                "relations": [expr...], "inputs": runs of inputs, "model_guards": runs of guards,
                "call_guards": [guard...], "steps": [step...], "output": template}
    guard    = [source, kind, expected]  see cgtool.guards.kinds
    source   = root accessor*            see cgtool.guards.sources; in a table, the number of a text
    step     = [piece, splitting, graph, symbols, runs of values in, runs of values out]
               graph and symbols are numbers of the tables. Values: inputs are 0..n-1, then every output of every step
               in order.
    template = ["v", value id] | ["const", literal] | ["expr", expr] | ["list"|"tuple", [template...]]
             | ["dict", [[key literal, template]...]] | ["call", "module:Qual", [template...], [[name, template]...]]
             | ["source", source]        the very object that was passed in, or an attribute of the model
    literal  = a value as data           see cgtool.guards.literals
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from cgtool.digests import canonical_json
from cgtool.errors import CacheCorruptError, CacheSchemaError
from cgtool.pieces import Json, PieceGraph, SymbolRange, TensorMeta
from cgtool.plan_tables import Graphs, Texts, TextTable, from_runs, to_runs, write_graphs
from cgtool.records import dataclass

SCHEMA = 2

#: More values than a plan can have, and not more than fit the memory: a run of them is a few bytes of a file.
_MAX_VALUES = 2**24


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
    model_guards: Sequence[Guard]
    call_guards: tuple[Guard, ...]
    steps: tuple[Step, ...]
    output: Json


@dataclass(frozen=True, kw_only=True)
class GuardGroup:
    """One fact about several objects.

    Args:
        kind: What is looked at, see `cgtool.guards.kinds`.
        expected: What was seen.
        sources: Which objects, as numbers of texts.
    """

    kind: str
    expected: Json
    sources: tuple[int, ...]


class GuardTable(Sequence[Guard]):
    """Guards in groups; each is made when it is asked for.

    Args:
        texts: The texts that the groups speak of.
        groups: The groups.
    """

    def __init__(self, texts: Texts, groups: Iterable[GuardGroup]) -> None:
        self.texts = texts
        self.groups = tuple(groups)

    def __len__(self) -> int:
        """Return how many guards there are."""
        return sum(len(group.sources) for group in self.groups)

    def __iter__(self) -> Iterator[Guard]:
        """Iterate over the guards, group by group."""
        whole = self.texts.whole
        for group in self.groups:
            for source in group.sources:
                yield Guard(source=whole[source], kind=group.kind, expected=group.expected)

    @overload
    def __getitem__(self, index: int) -> Guard: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Guard]: ...
    def __getitem__(self, index: Any) -> Any:
        """Return a guard, or several."""
        return tuple(self)[index]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All variants of one rank and prefix, and the graphs of their pieces by identity."""

    method: str
    qualname: str
    variants: tuple[Variant, ...]
    graphs: Mapping[str, PieceGraph]

    def to_json(self) -> Json:
        """Return the record as JSON; the grammar stands at the head of this module."""
        return _PlanWriter(self).document()

    @classmethod
    def from_json(cls, data: Json) -> Plan:
        """Return the Plan of `data`, as `to_json` wrote it.

        Raises:
            ValueError, KeyError, TypeError: It is outside of the grammar.
        """
        return _PlanReader(data).plan()


class _PlanWriter:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.texts = TextTable()
        self.tables: dict[str, dict[bytes, int]] = {"metas": {}, "inputs": {}, "symbols": {}}
        self.rows: dict[str, list[Json]] = {name: [] for name in self.tables}
        self.graphs: dict[str, int] = {}
        self.guards, self.of_variant = self._guards()

    def document(self) -> Json:
        plan = self.plan
        graphs = write_graphs(plan.graphs)
        self.graphs = {member[0]: number for number, member in enumerate(graphs["members"])}
        variants = [self._variant(variant, of) for variant, of in zip(plan.variants, self.of_variant, strict=True)]
        inputs = self.rows["inputs"]
        return {
            "schema": SCHEMA,
            "method": plan.method,
            "qualname": plan.qualname,
            "texts": self.texts.to_json(),
            "metas": self.rows["metas"],
            "inputs": {"sources": [row[0] for row in inputs], "metas": [row[1] for row in inputs]},
            "symbols": self.rows["symbols"],
            "guards": self.guards,
            "graphs": graphs,
            "variants": variants,
        }

    def _number(self, table: str, row: Json) -> int:
        known = self.tables[table]
        key = canonical_json(row)
        if key not in known:
            known[key] = len(self.rows[table])
            self.rows[table].append(row)
        return known[key]

    def _guards(self) -> tuple[list[Json], list[list[int]]]:
        """Return the groups of guards, each of which the same variants have, and which each variant has."""
        owners: dict[tuple[str, str, bytes], tuple[Guard, list[int]]] = {}
        for number, variant in enumerate(self.plan.variants):
            for guard in variant.model_guards:
                key = guard.source, guard.kind, canonical_json(guard.expected)
                held = owners.setdefault(key, (guard, []))[1]
                if number not in held:
                    held.append(number)
        groups: dict[Any, tuple[Guard, list[int], list[int]]] = {}
        for (source, kind, expected), (guard, held) in owners.items():
            group = groups.setdefault((kind, expected, tuple(held)), (guard, held, []))
            group[2].append(self.texts.number(source))
        rows = [[guard.kind, guard.expected, to_runs(sources)] for guard, _, sources in groups.values()]
        of_variant = [
            [number for number, (_, held, _) in enumerate(groups.values()) if variant in held]
            for variant in range(len(self.plan.variants))
        ]
        return rows, of_variant

    def _variant(self, variant: Variant, guards: list[int]) -> Json:
        inputs = [
            self._number("inputs", [self.texts.number(item.source), self._number("metas", item.meta.to_json())])
            for item in variant.inputs
        ]
        return {
            "name": variant.name,
            "fixed": variant.fixed,
            "dims": {name: list(symbols) for name, symbols in variant.dims.items()},
            "symbols": [s.to_json() for s in variant.symbols],
            "relations": list(variant.relations),
            "inputs": to_runs(inputs),
            "model_guards": to_runs(guards),
            "call_guards": [g.to_json() for g in variant.call_guards],
            "steps": [self._step(step) for step in variant.steps],
            "output": variant.output,
        }

    def _step(self, step: Step) -> Json:
        symbols = self._number("symbols", step.symbols)
        graph = self.graphs[step.graph]
        return [step.piece, step.splitting, graph, symbols, to_runs(step.inputs), to_runs(step.outputs)]


class _PlanReader:
    def __init__(self, data: Json) -> None:
        self.data = data
        self.texts = Texts(data["texts"])
        metas = [TensorMeta.from_json(meta) for meta in data["metas"]]
        whole = self.texts.whole
        sources, makes = data["inputs"]["sources"], data["inputs"]["metas"]
        self.inputs = [Input(source=whole[s], meta=metas[m]) for s, m in zip(sources, makes, strict=True)]
        self.guards = [
            GuardGroup(kind=_text(kind), expected=expected, sources=tuple(from_runs(sources, len(whole))))
            for kind, expected, sources in data["guards"]
        ]
        self.symbols = [dict(symbols) for symbols in data["symbols"]]
        self.graphs = Graphs(data["graphs"])
        self.identities = list(self.graphs)

    def plan(self) -> Plan:
        data = self.data
        return Plan(
            method=data["method"],
            qualname=data["qualname"],
            variants=tuple(self._variant(variant) for variant in data["variants"]),
            graphs=self.graphs,
        )

    def _variant(self, data: Json) -> Variant:
        groups = [self.guards[number] for number in from_runs(data["model_guards"], len(self.guards))]
        return Variant(
            name=data["name"],
            fixed=dict(data["fixed"]),
            dims={name: tuple(symbols) for name, symbols in data["dims"].items()},
            symbols=tuple(SymbolRange.from_json(s) for s in data["symbols"]),
            relations=tuple(data["relations"]),
            inputs=tuple([self.inputs[number] for number in from_runs(data["inputs"], len(self.inputs))]),
            model_guards=GuardTable(self.texts, groups),
            call_guards=tuple(Guard.from_json(g) for g in data["call_guards"]),
            steps=tuple(map(self._step, data["steps"])),
            output=data["output"],
        )

    def _step(self, data: Json) -> Step:
        piece, splitting, graph, symbols, inputs, outputs = data
        return Step(
            piece=piece,
            splitting=splitting,
            graph=self.identities[graph],
            symbols=self.symbols[symbols],
            inputs=tuple(from_runs(inputs, _MAX_VALUES)),
            outputs=tuple(from_runs(outputs, _MAX_VALUES)),
        )


def _text(value: Json) -> str:
    if type(value) is not str:
        msg = f"{str(value)[:40]!r} is no text"
        raise TypeError(msg)
    return value


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
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        message = f"{path} is no plan ({error}). Warm the model again."
        raise CacheCorruptError(message, path=path) from error
    if plan is None:
        message = f"{path} has schema {schema}; this cgtool reads schema {SCHEMA}. Warm the model again with it."
        raise CacheSchemaError(message, path=path, expected=SCHEMA, actual=schema)
    return plan
