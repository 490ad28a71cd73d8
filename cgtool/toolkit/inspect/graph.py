"""`inspect graph`: the pieces of an entry, in order. Prints nothing; importable without torch."""

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
    """A piece of a variant: its step, its graph, and the rows of its artifacts."""

    step: Step
    graph: PieceGraph
    rows: tuple[Row, ...]

    @property
    def ops(self) -> Mapping[str, int]:
        """The ops that it calls and how often, in order of first use; reading a size does not count."""
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
            "variants": [
                {"name": variant.name, "fixed": variant.fixed, "dims": list(variant.dims)} for variant in self.variants
            ],
            "variant": self.variant,
            "pieces": [piece.to_json() for piece in self.pieces],
            "computation_graph": str(self.code_path),
        }


def variant_words(variant: Variant) -> str:
    """Describe a variant: "prefill, num_tokens any"."""
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
    """Report the pieces of one variant of an entry.

    Args:
        entry: An abbreviation of its hash; None if the cache has only one.
        variant: The number or name of a variant; None is the first.
        rank: The rank; None if the entry has only one.
        prefix: The compiled part of the model; None if the entry has only one.
        cache_dir: The cache's root; None means the default cache.

    Returns:
        The pieces, and the shapes that they are compiled for.

    Raises:
        UsageError: No entry or variant, or several, match; the message lists them.
        CacheError: The cache is empty or another system's, or the entry cannot be read or trusted.
    """
    layout = CacheLayout.at(cache_dir)
    if not layout.hashes():
        check_own(layout.root)
    name = resolve_rank(layout, entry, rank=rank, prefix=prefix)
    opened, plan = entry_with_plan(layout, name)
    number = _variant_number(plan, variant)
    rows: dict[int, list[Row]] = {}
    for row in opened.manifest.rows:
        if row.variant == number:
            rows.setdefault(row.piece_index, []).append(row)
    return GraphReport(
        root=layout.root,
        manifest=opened.manifest,
        variants=plan.variants,
        variant=number,
        pieces=tuple(
            Piece(step=step, graph=plan.graphs[step.graph], rows=tuple(rows.get(step.piece, ())))
            for step in plan.variants[number].steps
        ),
        code_path=layout.rank_dir(name) / GRAPH_FILE,
    )


def _variant_number(plan: Plan, variant: str | None) -> int:
    if variant is None:
        return 0
    if variant.isascii() and variant.isdecimal() and int(variant) < len(plan.variants):
        return int(variant)
    matching = [number for number, candidate in enumerate(plan.variants) if candidate.name == variant]
    if len(matching) == 1:
        return matching[0]
    listed = [f"{number}: {variant_words(candidate)}" for number, candidate in enumerate(plan.variants)]
    problem = f"Several variants are called {variant!r}." if matching else f"There is no variant {variant!r}."
    raise selection_error(f"{problem} Name one of them by its number", listed, more="graph", actual=variant)
