"""`inspect graph`: the pieces of one entry, in order. Prints nothing; importable without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from cgtool.plan.pieces import PieceGraph
from cgtool.plan.records import Plan, Step, Variant
from cgtool.store.entry import entry_with_plan
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.layout import GRAPH_FILE, CacheLayout
from cgtool.store.records import Manifest, Row
from cgtool.toolkit.foreign.detect import check_own
from cgtool.toolkit.selection import resolve_rank, selection_error

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One piece of a variant: its place, its graph, and the rows of what was compiled of it."""

    step: Step
    graph: PieceGraph
    rows: tuple[Row, ...]

    @property
    def ops(self) -> Mapping[str, int]:
        """What it calls, with how often, in order of first use; reading a size is no call."""
        return Counter(node.target for node in self.graph.every_node() if node.target is not None)

    def to_json(self) -> dict[str, Any]:
        """Return its JSON form."""
        return {
            "piece_index": self.step.piece,
            "splitting": self.step.splitting,
            "identity": self.step.graph,
            "ops": dict(self.ops),
            "inputs": [asdict(tensor) for tensor in self.graph.inputs],
            "outputs": [asdict(tensor) for tensor in self.graph.results],
            "shapes": [row.shape for row in self.rows],
            "artifacts": [row.artifact.digest for row in self.rows],
        }


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """The pieces of one variant of an entry, in order of execution."""

    root: Path
    manifest: Manifest
    variants: tuple[Variant, ...]
    variant: int
    pieces: tuple[Piece, ...]
    code_path: Path

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect graph --json` prints."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            **asdict(self.manifest.name),
            "model": self.manifest.model,
            "splitting_ops": list(self.manifest.splitting_ops),
            "variants": [{"name": one.name, "fixed": one.fixed, "dims": list(one.dims)} for one in self.variants],
            "variant": self.variant,
            "pieces": [piece.to_json() for piece in self.pieces],
            "computation_graph": str(self.code_path),
        }


def variant_words(variant: Variant) -> str:
    """Return how a variant is told from its siblings: "prefill, num_tokens any"."""
    parts = [variant.name, *(f"{name}={size}" for name, size in variant.fixed.items())]
    return ", ".join([*parts, *(f"{name} any" for name in variant.dims if name not in variant.fixed)])


@os_errors_as_cache_errors()
def inspect_graph(
    entry: str | None = None,
    *,
    variant: str | None = None,
    rank: int | None = None,
    prefix: str | None = None,
    cache_dir: Path | None = None,
) -> GraphReport:
    """Show the pieces of one variant of an entry.

    Args:
        entry: The beginning of its hash; None where the cache has one.
        variant: A variant's number or its name; None is the first.
        rank: Which rank; None where the entry has one.
        prefix: Which compiled part of the model; None where the entry has one.
        cache_dir: The cache's root; None means the cache that `warm` fills.

    Returns:
        The pieces, and what they were compiled for.

    Raises:
        UsageError: No entry or variant fits, or several do; the message lists them.
        CacheError: The cache is empty or another system's, or the entry cannot be read or trusted.
    """
    layout = CacheLayout.at(cache_dir)
    if not layout.hashes():
        check_own(layout.root)
    name = resolve_rank(layout, entry, rank=rank, prefix=prefix)
    found, plan = entry_with_plan(layout, name)
    number = _one_variant(plan, variant)
    rows: dict[int, list[Row]] = {}
    for row in found.manifest.rows:
        if row.variant == number:
            rows.setdefault(row.piece_index, []).append(row)
    return GraphReport(
        root=layout.root,
        manifest=found.manifest,
        variants=plan.variants,
        variant=number,
        pieces=tuple(
            Piece(step=step, graph=plan.graphs[step.graph], rows=tuple(rows.get(step.piece, ())))
            for step in plan.variants[number].steps
        ),
        code_path=layout.rank_dir(name) / GRAPH_FILE,
    )


def _one_variant(plan: Plan, wanted: str | None) -> int:
    if wanted is None:
        return 0
    if wanted.isascii() and wanted.isdecimal() and int(wanted) < len(plan.variants):
        return int(wanted)
    named = [number for number, variant in enumerate(plan.variants) if variant.name == wanted]
    if len(named) == 1:
        return named[0]
    listed = [f"{number}: {variant_words(variant)}" for number, variant in enumerate(plan.variants)]
    what = f"Several variants are called {wanted!r}." if named else f"There is no variant {wanted!r}."
    raise selection_error(f"{what} Name one of them by its number", listed, more="graph", actual=wanted)
