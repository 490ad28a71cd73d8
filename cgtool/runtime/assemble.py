"""Opening an entry: its artifacts become functions, and its plan a callable.

The bytes of all artifacts are read and matched to their digests at load, and what was matched is what is opened: when
a call first chooses it, so that a start pays for what it uses. Those of the first variant are opened at load where they
serve all of its sizes, so that a machine which cannot open any says so as it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from cgtool.errors import ArtifactError
from cgtool.graph.expressions import rename
from cgtool.plan.pieces import AOT_INDUCTOR, EAGER, PieceGraph
from cgtool.plan.records import Plan, Step
from cgtool.plan.shapes import dispatch_order
from cgtool.runtime.aoti_package import open_package
from cgtool.runtime.call import LoadedModel, first_index
from cgtool.runtime.dispatch import Bounds, Boxed, Choice, PiecewiseBackend, Unopened, graph_at, symbol_bounds
from cgtool.runtime.find import Found
from cgtool.runtime.program import piece_function
from cgtool.store.artifacts import code_of
from cgtool.store.records import Row

#: Makes a function from an artifact: (adaptor, bytes, the piece's graph at the artifact's shape).
Opener = Callable[[str, bytes, PieceGraph], Boxed]


def open_entry(found: Found, module: Any, opener: Opener, *, recheck_calls: bool = False) -> LoadedModel:
    """Return the callable that serves `module` from an entry that was found for it.

    Args:
        found: The entry.
        module: The live model.
        opener: Opens one artifact of an adaptor that needs more than torch; those of `aot_inductor` and `eager` are
            opened here.
        recheck_calls: Whether each call looks at all live objects, as `recheck` does.

    Raises:
        CacheCorruptError: An artifact's bytes differ from their digest.
        ArtifactError: An artifact cannot be opened here, or a piece has none. A call raises it too, where it is the
            first to choose an artifact.
        GuardError: A tensor of the model is of another make than when it was compiled.
    """
    opened: dict[tuple[str, str, str, str], Unopened] = {}
    read: dict[str, bytes] = {}  # graphs that differ in sizes alone may share an artifact
    pieces: dict[tuple[int, int], list[_Opened]] = {}
    plan, manifest = found.plan, found.entry.manifest
    index = first_index(module, plan)
    steps = [{step.piece: step for step in variant.steps} for variant in plan.variants]
    for row in sorted(manifest.rows, key=lambda row: (dispatch_order(row.shape), not row.tuned)):
        step = steps[row.variant].get(row.piece_index) if row.variant < len(steps) else None
        if step is None:
            msg = (
                f"The manifest names piece {row.piece_index} of variant {row.variant}, which its plan has not. "
                "Warm the model again."
            )
            raise ArtifactError(msg, path=found.entry.name.hash)
        bounds = symbol_bounds(plan.variants[row.variant], row.shape)
        digest = row.artifact.digest
        # What the graph at this shape is made from: its own identity would have to be computed for each row.
        key = digest, step.graph, repr(row.shape), repr(step.symbols)
        if key not in opened:
            if digest not in read:
                read[digest] = found.entry.artifact(row.artifact)
            code = code_of(read[digest], row, step.graph)
            opened[key] = Unopened(_opening(row.adaptor, code, plan, step, bounds=bounds, index=index, opener=opener))
        guards = tuple(rename(text, step.symbols) for text in row.artifact.guards)
        place = row.variant, row.piece_index
        pieces.setdefault(place, []).append(_Opened(row=row, bounds=bounds, guards=guards, function=opened[key]))
    backends = {place: _backend(rows) for place, rows in pieces.items()}
    return LoadedModel(
        module,
        _with_added_guards(plan, pieces),
        backends,
        variables=found.key.value("variables"),
        recheck_calls=recheck_calls,
    )


class _Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A row, what it means for its variant's symbols, and its function."""

    row: Row
    bounds: Bounds
    guards: tuple[str, ...]
    function: Unopened


def _opening(
    adaptor: str, code: bytes, plan: Plan, step: Step, *, bounds: Bounds, index: int | None, opener: Opener
) -> Callable[[], Boxed]:
    def open_now() -> Boxed:
        graph = graph_at(plan.graphs[step.graph], step, bounds)
        if adaptor == EAGER:
            return piece_function(graph, device_index=index)
        if adaptor == AOT_INDUCTOR:
            return open_package(code, graph, device_index=index)
        return opener(adaptor, code, graph)

    return open_now


def _backend(rows: list[_Opened]) -> PiecewiseBackend:
    return PiecewiseBackend(
        general=next((one.function for one in rows if not one.bounds), None),
        choices=[
            Choice(shape=one.row.shape, bounds=one.bounds, guards=one.guards, function=one.function)
            for one in rows
            if one.bounds
        ],
    )


def _with_added_guards(plan: Plan, pieces: Mapping[tuple[int, int], list[_Opened]]) -> Plan:
    """Return the plan with what the compiler relied on for the general shape among its variants' relations."""
    if not any(one.guards for rows in pieces.values() for one in rows):
        return plan
    variants = []
    for index, variant in enumerate(plan.variants):
        added: dict[str, None] = dict.fromkeys(variant.relations)
        for step in variant.steps:
            general = next((one for one in pieces.get((index, step.piece), ()) if not one.bounds), None)
            if general is not None:
                added.update(dict.fromkeys(general.guards))
        variants.append(replace(variant, relations=tuple(added)))
    return replace(plan, variants=tuple(variants))
