"""Opening an entry: its artifacts become functions, and its plan a callable.

The bytes of all artifacts are read and matched to their digests at load, and what was matched is what is opened: when
a call first chooses it, so that a start pays for what it uses. Those of the first variant are opened at load where they
serve all of its sizes, so that a machine which cannot open any says so as it starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from cgtool.cache.manifest import ManifestRow
from cgtool.cache.shapes import GENERAL, Shape
from cgtool.errors import ArtifactError
from cgtool.graph.expressions import rename
from cgtool.pieces import AOT_INDUCTOR, EAGER, PieceGraph
from cgtool.plan import Plan, Step, Variant
from cgtool.records import replace
from cgtool.runtime.call import LoadedModel, first_index
from cgtool.runtime.dispatch import Boxed, PiecewiseBackend, Unopened
from cgtool.runtime.find import Found
from cgtool.runtime.packages import open_package
from cgtool.runtime.pieces import piece_function
from cgtool.runtime.shapes import ShapeSpec, base_shape, graph_at, spec_of

#: Makes a function from an artifact: (adaptor, bytes, the piece's graph at the artifact's shape).
Opener = Callable[[str, bytes, PieceGraph], Boxed]


def open_entry(found: Found, module: Any, opener: Opener) -> LoadedModel:
    """Return the callable that serves `module` from an entry that was found for it.

    Args:
        found: The entry.
        module: The live model.
        opener: Opens one artifact of an adaptor that needs more than torch; those of `aot_inductor` and `eager` are
            opened here.

    Raises:
        CacheCorruptError: An artifact's bytes differ from their digest.
        ArtifactError: An artifact cannot be opened here, or a piece has none. A call raises it too, where it is the
            first to choose an artifact.
        GuardError: A tensor of the model is of another make than when it was compiled.
    """
    opened: dict[tuple[str, str, str, str], Unopened] = {}
    read: dict[str, bytes] = {}  # graphs that differ in sizes alone may share an artifact
    pieces: dict[tuple[int, int], list[tuple[ManifestRow, ShapeSpec, Unopened]]] = {}
    plan, manifest = found.plan, found.entry.manifest
    size_dim = manifest.size_dim
    index = first_index(module, plan)
    steps = [{step.piece: step for step in variant.steps} for variant in plan.variants]
    for row in manifest.rows:
        variant = plan.variants[row.variant]
        spec = spec_of(variant, row.shape, size_dim)
        step = steps[row.variant].get(row.piece_index)
        if step is None:
            msg = f"The manifest names piece {row.piece_index}, which its plan has not. Warm the model again."
            raise ArtifactError(msg, path=found.entry.name.hash)
        # What the graph at this shape is made from: its own identity would have to be computed for each row.
        key = row.digest, step.graph, repr(row.shape), repr(step.symbols)
        if key not in opened:
            if row.digest not in read:
                read[row.digest] = found.entry.artifact(row)
            graph = functools.partial(_graph_at, plan, step, spec)
            opened[key] = Unopened(functools.partial(_open, row.adaptor, read[row.digest], graph, index, opener))
        pieces.setdefault((row.variant, row.piece_index), []).append((row, spec, opened[key]))
    backends = {name: _backend(rows, plan.variants[name[0]], steps[name[0]][name[1]]) for name, rows in pieces.items()}
    return LoadedModel(module, _with_added_guards(plan, pieces), backends)


def _graph_at(plan: Plan, step: Step, spec: ShapeSpec) -> PieceGraph:
    return graph_at(plan.graphs[step.graph], step, spec)


def _open(
    adaptor: str, data: bytes, make_graph: Callable[[], PieceGraph], device_index: int | None, opener: Opener
) -> Boxed:
    graph = make_graph()
    if adaptor == EAGER:
        return piece_function(graph, device_index=device_index)
    if adaptor == AOT_INDUCTOR:
        return open_package(data, graph, device_index=device_index)
    return opener(adaptor, data, graph)


def _backend(rows: list[tuple[ManifestRow, ShapeSpec, Unopened]], variant: Variant, step: Step) -> PiecewiseBackend:
    base: Shape = base_shape(variant)
    general = next((function for row, _, function in rows if row.shape in (GENERAL, base)), None)
    sizes = {tuple(sorted(spec.sizes.items())): function for _, spec, function in rows if spec.sizes}
    ranges = [(dict(spec.ranges), function) for _, spec, function in rows if spec.ranges]
    guards: dict[Boxed | Unopened, tuple[str, ...]] = {
        function: tuple(rename(text, step.symbols) for text in row.guards)
        for row, spec, function in rows
        if (spec.sizes or spec.ranges) and row.guards
    }
    return PiecewiseBackend(general=general, sizes=sizes, ranges=ranges, guards=guards)


def _with_added_guards(plan: Plan, pieces: Mapping[tuple[int, int], list[Any]]) -> Plan:
    """Return the plan with what the compiler relied on for the general shape among its variants' relations."""
    variants = []
    if not any(row.guards for rows in pieces.values() for row, _, _ in rows):
        return plan
    for index, variant in enumerate(plan.variants):
        added: dict[str, None] = dict.fromkeys(variant.relations)
        for step in variant.steps:
            for row, spec, _ in pieces.get((index, step.piece), ()):
                if not spec.sizes and not spec.ranges:
                    added.update(dict.fromkeys(rename(text, step.symbols) for text in row.guards))
        variants.append(replace(variant, relations=tuple(added)))
    return replace(plan, variants=tuple(variants))
