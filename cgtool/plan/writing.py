"""Encoding of `plan.json`: values that variants share are stored once and numbered. Must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cgtool.plan.grammar import canonical_json
from cgtool.plan.pieces import GraphRows, Member, PieceGraph, split_constants
from cgtool.plan.records import (
    SCHEMA,
    GroupRow,
    Guard,
    Plan,
    PlanRows,
    StepRow,
    TextRows,
    Variant,
    VariantRows,
    head_of,
)

_WITH_INDEX = ("|keys", "|values", "|list")


def encode_plan(plan: Plan) -> bytes:
    """Return the bytes of `plan.json`, which are equal for equal plans."""
    return msgspec.json.encode(_PlanWriter(plan).rows(), order="sorted")


class _PlanWriter:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.texts = TextTable()
        self.metas = _Interner()
        self.inputs = _Interner()
        self.symbols = _Interner()
        self.kinds = _Interner()
        self.graphs = graph_rows(plan.graphs)
        self.graph_numbers = {member.identity: number for number, member in enumerate(self.graphs.members)}
        self.guards, self.groups_by_variant = self._guards()

    def rows(self) -> PlanRows:
        variants = [
            self._variant(variant, groups)
            for variant, groups in zip(self.plan.variants, self.groups_by_variant, strict=True)
        ]
        return PlanRows(
            schema=SCHEMA,
            method=self.plan.method,
            qualname=self.plan.qualname,
            texts=self.texts.rows(),
            metas=tuple(self.metas.rows),
            inputs=tuple(self.inputs.rows),
            symbols=tuple(self.symbols.rows),
            kinds=tuple(self.kinds.rows),
            guards=self.guards,
            graphs=self.graphs,
            variants=tuple(variants),
        )

    def _guards(self) -> tuple[tuple[GroupRow, ...], list[list[int]]]:
        """Return the groups of guards that belong to the same variants, and the groups of each variant."""
        owners: dict[tuple[str, str, bytes], tuple[Guard, list[int]]] = {}
        for number, variant in enumerate(self.plan.variants):
            for guard in variant.model_guards:
                key = guard.source, guard.kind, canonical_json(guard.expected)
                variants = owners.setdefault(key, (guard, []))[1]
                if number not in variants:
                    variants.append(number)
        groups: dict[Any, tuple[Guard, list[int], list[int]]] = {}
        for (source, kind, expected), (guard, variants) in owners.items():
            group = groups.setdefault((kind, expected, tuple(variants)), (guard, variants, []))
            group[2].append(self.texts.number(source))
        rows = [
            GroupRow(kind=self.kinds.of(guard.kind), expected=guard.expected, sources=tuple(sources))
            for guard, _, sources in groups.values()
        ]
        by_variant = [
            [number for number, (_, variants, _) in enumerate(groups.values()) if variant in variants]
            for variant in range(len(self.plan.variants))
        ]
        return tuple(rows), by_variant

    def _variant(self, variant: Variant, guards: list[int]) -> VariantRows:
        number = self.texts.number
        inputs = [self.inputs.of((number(item.source), self.metas.of(item.meta))) for item in variant.inputs]
        steps = [
            StepRow(
                piece=step.piece,
                splitting=step.splitting,
                graph=self.graph_numbers[step.graph],
                symbols=self.symbols.of(step.symbols),
                inputs=step.inputs,
                outputs=step.outputs,
            )
            for step in variant.steps
        ]
        return VariantRows(**head_of(variant), inputs=tuple(inputs), steps=tuple(steps), model_guards=tuple(guards))


class _Interner:
    """Assigns numbers to values; equal values have equal numbers."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._known: dict[bytes, int] = {}

    def of(self, value: Any) -> int:
        """Return the number of `value`, and add it if it is new."""
        number = self._known.setdefault(msgspec.json.encode(value, order="sorted"), len(self.rows))
        if number == len(self.rows):
            self.rows.append(value)
        return number


class TextTable:
    """Assigns numbers to texts; a text shares its prefix with an earlier one."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._parents: list[int] = []
        self._ends: list[str] = []

    def rows(self) -> TextRows:
        """Return the table as it is stored."""
        return TextRows(parents=tuple(self._parents), ends=tuple(self._ends))

    def number(self, text: str) -> int:
        """Return the number of `text`, and add it if it is new."""
        if text not in self._numbers:
            cut = max(text.rfind("."), text.rfind("["), text.rfind("|"))
            if text[:cut].endswith(_WITH_INDEX):  # `|keys[0]` is one step
                cut = text.rfind("|")
            parent = self.number(text[:cut]) if cut > 0 else -1
            self._parents.append(parent)
            self._ends.append(text[max(cut, 0) :])
            self._numbers[text] = len(self._ends) - 1
        return self._numbers[text]


def graph_rows(graphs: Mapping[str, PieceGraph]) -> GraphRows:
    """Return graphs as they are stored, each frame once."""
    numbers: dict[bytes, int] = {}
    frames: list[PieceGraph] = []
    members: list[Member] = []
    for identity, graph in graphs.items():
        frame, constants = split_constants(graph)
        number = numbers.setdefault(frame.canonical(), len(frames))
        if number == len(frames):
            frames.append(frame)
        members.append(Member(identity=identity, frame=number, constants=constants))
    return GraphRows(frames=tuple(frames), members=tuple(members))
