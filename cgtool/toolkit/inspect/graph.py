"""`inspect graph`: the pieces of one entry, in order. Prints nothing; importable without torch.

Of other systems, vLLM and ATOM write the whole graph of a part as a text, whose JSON is the fields of
`ForeignGraphReport`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from cgtool.errors import CacheError, UsageError
from cgtool.plan.pieces import PieceGraph, TensorMeta
from cgtool.plan.records import Plan, Step, parse_plan
from cgtool.store.entry import read_entry
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.layout import GRAPH_FILE, PLAN_FILE, CacheLayout, RankName, resolve_root, short
from cgtool.store.records import Row
from cgtool.toolkit.foreign.detect import read_foreign
from cgtool.toolkit.foreign.records import ForeignCache, foreign_json, one_entry
from cgtool.toolkit.foreign.tree import Tree, shown
from cgtool.toolkit.selection import one_name

SCHEMA = 2
_MOST_GRAPH_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """What the user asked of `inspect graph`.

    Args:
        entry: The beginning of an entry's hash; None where the cache has one.
        variant: A variant's number or its name; None is the first.
        rank: Which rank; None where the entry has one.
        prefix: Which compiled part of the model; None where the entry has one.
        cache_dir: The cache's root; None means the cache that `warm` fills.
    """

    entry: str | None = None
    variant: str | None = None
    rank: int | None = None
    prefix: str | None = None
    cache_dir: Path | None = None


@dataclass(frozen=True, kw_only=True)
class VariantName:
    """How a variant is told from its siblings.

    Args:
        name: The example call's name.
        fixed: Dimensions that it fixes.
        dims: Dimensions that it leaves open.
    """

    name: str
    fixed: Mapping[str, int]
    dims: tuple[str, ...]

    def describe(self) -> str:
        """Return it for people: "prefill, num_tokens any"."""
        parts = [self.name, *(f"{name}={size}" for name, size in self.fixed.items())]
        return ", ".join([*parts, *(f"{name} any" for name in self.dims if name not in self.fixed)])


@dataclass(frozen=True, kw_only=True)
class PieceRow:
    """One piece of a variant.

    Args:
        index: Its `piece_index`; -1 for a step that only computes sizes.
        splitting: Whether it holds a splitting op, and so runs as it stands.
        identity: The digest of its canonical graph.
        ops: What it calls, with how often, in order of first use.
        inputs: Its tensors, in order.
        outputs: What it returns.
        shapes: What it was compiled for: "general", sizes, ranges.
        artifacts: The digests of what was compiled, one for each of `shapes`.
    """

    index: int
    splitting: bool
    identity: str
    ops: Mapping[str, int]
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    shapes: tuple[Any, ...]
    artifacts: tuple[str, ...]

    @property
    def num_ops(self) -> int:
        """How many operations it runs; reading a size is none."""
        return sum(self.ops.values())

    def to_json(self) -> dict[str, Any]:
        """Return its JSON form."""
        return {
            "piece_index": self.index,
            "splitting": self.splitting,
            "identity": self.identity,
            "ops": dict(self.ops),
            "inputs": [msgspec.structs.asdict(tensor) for tensor in self.inputs],
            "outputs": [msgspec.structs.asdict(tensor) for tensor in self.outputs],
            "shapes": list(self.shapes),
            "artifacts": list(self.artifacts),
        }


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """The pieces of one variant of an entry.

    Args:
        root: The cache's root.
        name: The entry's hash, rank and prefix.
        model: What the model is called.
        splitting_ops: The ops that the model was split at.
        variants: All variants of the entry.
        variant: Which of them `pieces` is of.
        pieces: In order of execution.
        code_path: Where the whole graph stands as Python, for people.
    """

    root: Path
    name: RankName
    model: str
    splitting_ops: tuple[str, ...]
    variants: tuple[VariantName, ...]
    variant: int
    pieces: tuple[PieceRow, ...]
    code_path: Path

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect graph --json` prints."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "hash": self.name.hash,
            "rank": self.name.rank,
            "prefix": self.name.prefix,
            "model": self.model,
            "splitting_ops": list(self.splitting_ops),
            "variants": [asdict(variant) for variant in self.variants],
            "variant": self.variant,
            "pieces": [piece.to_json() for piece in self.pieces],
            "computation_graph": str(self.code_path),
        }


class ForeignGraphReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole graph of one part of an entry, as its system wrote it for people."""

    schema: int = SCHEMA
    system: str
    root: Path
    entry: str
    path: Path
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect graph --json` prints."""
        return foreign_json(self)


@os_errors_as_cache_errors()
def inspect_graph(options: GraphOptions) -> GraphReport | ForeignGraphReport:
    """Show the pieces of one variant of an entry, or the graph that vLLM or ATOM wrote beside its artifacts.

    Args:
        options: What the user asked.

    Returns:
        The pieces, and what they were compiled for; or the graph.

    Raises:
        UsageError: No entry or variant fits, or several do; the message lists them.
        CacheError: The cache is empty, the entry cannot be read or trusted, or another system wrote no graph of it.
    """
    cache = read_foreign(options.cache_dir)
    if cache is not None:
        return _inspect_foreign(cache, options)
    root = resolve_root(options.cache_dir)
    layout = CacheLayout(root=root)
    name = one_name(layout, options.entry, rank=options.rank, prefix=options.prefix)
    entry = read_entry(layout, name)
    if entry is None:
        message = f"Entry {short(name.hash)} is gone. Look again with: cgtool inspect cache"
        raise CacheError(message, path=layout.rank_dir(name))
    plan = parse_plan(entry.files[PLAN_FILE], path=layout.rank_dir(name) / PLAN_FILE)
    number = _one_variant(plan, options.variant)
    rows = [row for row in entry.manifest.rows if row.variant == number]
    return GraphReport(
        root=root,
        name=name,
        model=entry.manifest.model,
        splitting_ops=entry.manifest.splitting_ops,
        variants=tuple(
            VariantName(name=variant.name, fixed=variant.fixed, dims=tuple(variant.dims)) for variant in plan.variants
        ),
        variant=number,
        pieces=tuple(_piece(step, plan.graphs[step.graph], rows) for step in plan.variants[number].steps),
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
    listed = "\n".join(
        f"  {number}: {VariantName(name=variant.name, fixed=variant.fixed, dims=tuple(variant.dims)).describe()}"
        for number, variant in enumerate(plan.variants)
    )
    what = f"Several variants are called {wanted!r}." if named else f"There is no variant {wanted!r}."
    raise UsageError(f"{what} Name one of them by its number:\n{listed}", actual=wanted)


def _piece(step: Step, graph: PieceGraph, rows: Sequence[Row]) -> PieceRow:
    own = [row for row in rows if row.piece_index == step.piece]
    return PieceRow(
        index=step.piece,
        splitting=step.splitting,
        identity=step.graph,
        ops=dict(Counter(node.target for node in graph.nodes if node.target is not None)),
        inputs=graph.inputs,
        outputs=graph.results,
        shapes=tuple(row.shape for row in own),
        artifacts=tuple(row.artifact.digest for row in own),
    )


def _inspect_foreign(cache: ForeignCache, options: GraphOptions) -> ForeignGraphReport:
    entry = one_entry(cache, options.entry)
    tree = Tree(entry.path, [])
    paths = [
        path
        for path in sorted(tree.files)
        if path.rpartition("/")[2] == GRAPH_FILE
        and (options.rank is None or re.search(rf"(?:\A|/)rank_{options.rank}[_/]", path))
        and (options.prefix is None or path.split("/")[-2:-1] == [options.prefix])
    ]
    if not paths:
        message = (
            f"The entry {shown(entry.name)} holds no graph: of other systems only vLLM and ATOM write one, and that "
            "not cut into pieces. Look at what it holds with: cgtool inspect entry"
        )
        raise CacheError(message, path=entry.path)
    text = tree.read(paths[0], _MOST_GRAPH_BYTES).decode("utf-8", "backslashreplace")
    path = entry.path / paths[0]
    return ForeignGraphReport(system=cache.system, root=cache.root, entry=entry.name, path=path, text=text)
