"""How an entry stands: which example calls it was made of, what it lacks, and what its user is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from cgtool.compiler.request import NEEDS_RANKS
from cgtool.compiler.schedule import unique
from cgtool.compiler.wanted import Work
from cgtool.dims import Dims
from cgtool.errors import CacheCorruptError, CacheMissError
from cgtool.guards.kinds import NoRuleError, encode_literal
from cgtool.guards.signature import CallSignature
from cgtool.guards.sources import qualified_name
from cgtool.model import ModelSpec
from cgtool.plan.pieces import EAGER, Json
from cgtool.plan.records import Variant
from cgtool.plan.shapes import shape_text
from cgtool.runtime.find import Found
from cgtool.store.entry import read_entry
from cgtool.store.layout import CacheLayout
from cgtool.store.records import Manifest, VariantCounts

#: How far an example argument is looked into.
_MAX_DEPTH = 3


def calls_of(spec: ModelSpec) -> Json:
    """Return what the example calls are, without their tensors' values; by position or by name is one call."""
    Dims.of(spec.dynamic)  # a UsageError where it is of another form
    dynamic = {
        parameter: {str(dim): name if isinstance(name, str) else list(name) for dim, name in dims.items()}
        for parameter, dims in spec.dynamic.items()
    }
    signature = CallSignature.of(getattr(spec.module, spec.method))
    calls = []
    for call in spec.calls:
        args, kwargs = call.args, call.kwargs
        with contextlib.suppress(TypeError):  # where they do not fit, the trace says so in its own words
            args, kwargs = signature.arguments(signature.bind(args, kwargs))
        calls.append([call.name, [_shown(a) for a in args], {k: _shown(v) for k, v in kwargs.items()}])
    require = {name: list(bounds) for name, bounds in spec.require.items()}
    return {"method": spec.method, "dynamic": dynamic, "calls": calls} | ({"require": require} if require else {})


def _shown(value: Any, depth: int = _MAX_DEPTH) -> Json:
    """Return an example argument as what it is: tensors by dtype, shape and strides, objects by their parts.

    An address, or a `repr` that may hold one, is another one in each process.
    """
    if isinstance(value, torch.Tensor):
        return {"tensor": str(value.dtype), "shape": list(value.shape), "stride": list(value.stride())}
    if isinstance(value, Mapping):
        return [[_shown(key), _shown(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_shown(item) for item in value]
    try:
        return encode_literal(value)
    except NoRuleError:
        held = getattr(value, "__dict__", {}) if depth else {}
        return {"object": qualified_name(type(value))} | {n: _shown(part, depth - 1) for n, part in held.items()}


def same_calls(one: Json, other: Json) -> bool:
    """Return whether two models' example calls may be served by one entry.

    Where dimensions are dynamic, an example's own sizes decide nothing that guards do not. Nor does what was required:
    what an entry serves of it is asked of its plan.
    """
    one, other = ({**calls, "require": None} if isinstance(calls, dict) else calls for calls in (one, other))
    if not isinstance(one, dict) or not one.get("dynamic"):
        return bool(one == other)
    return bool(_without_sizes(one) == _without_sizes(other))


def _without_sizes(calls: Json) -> Json:
    """Return `calls` with tensors by dtype and rank alone."""
    if isinstance(calls, Mapping):
        if set(calls) == {"tensor", "shape", "stride"}:
            return [calls["tensor"], len(calls["shape"])]
        return {key: _without_sizes(value) for key, value in calls.items()}
    return [_without_sizes(item) for item in calls] if isinstance(calls, list) else calls


def counts_of(variant: Variant) -> VariantCounts:
    """Return how many pieces a variant has, how many hold a splitting op, and how many compiled ones differ."""
    steps = [step for step in variant.steps if step.piece >= 0]
    compiled = [step for step in steps if not step.splitting]
    return VariantCounts(
        name=variant.name,
        pieces=len(steps),
        splitting_pieces=len(steps) - len(compiled),
        unique_pieces=len({step.graph for step in compiled}),
        fixed=dict(variant.fixed),
    )


def damaged_texts(layout: CacheLayout, found: Found) -> tuple[str, ...]:
    """Say which of an entry's files for people differ from their digests: nothing but a trace writes them."""
    try:
        read_entry(layout, found.entry.name, files=found.entry.manifest.files)
    except CacheCorruptError as error:
        return (str(error),)
    return ()


def broken_work(found: Found, work: Iterable[Work]) -> list[Work]:
    """Return the work whose artifacts are gone or differ from their digests."""
    broken, intact = [], dict[str, bool]()
    for item in work:
        row = item.row_in(found.entry.manifest)
        if row is None:
            continue
        digest = row.artifact.digest
        if digest not in intact:
            try:
                found.entry.artifact(row.artifact)
                intact[digest] = True
            except CacheCorruptError:
                intact[digest] = False
        if not intact[digest]:
            broken.append(item)
    return broken


def incomplete(
    missing: Iterable[Work],
    broken: Iterable[Work],
    num_unproved: int,
    num_uncalled: int,
    *,
    path: Path,
    nearest: str,
) -> CacheMissError | None:
    """Return the miss of an entry that lacks something, with a sentence for each kind of lack; else None."""
    shapes = list(dict.fromkeys(shape_text(work.shape) for work in missing))
    count = len(list(unique(missing)))
    said = "1 artifact is missing" if count == 1 else f"{count} artifacts are missing"
    reasons = [f"{said}, for the {'shape' if len(shapes) == 1 else 'shapes'} {', '.join(shapes)}"] if shapes else []
    reasons += [f"the artifact of piece {work.piece_index} is damaged" for work in broken]
    if num_unproved:
        reasons.append(f"{num_unproved} {'artifact was' if num_unproved == 1 else 'artifacts were'} not proved yet")
    if num_uncalled:
        were = "variant was" if num_uncalled == 1 else "variants were"
        reasons.append(f"{num_uncalled} {were} not called beside the model itself yet")
    if not reasons:
        return None
    msg = f"The entry is incomplete: {'; '.join(reasons)}. Warm the model again to add what is missing."
    return CacheMissError(msg, reasons=tuple(reasons), path=path, nearest=nearest)


def notes_of(manifest: Manifest, slow_ops: Iterable[str]) -> tuple[str, ...]:
    """Return advice for the user on the pieces that fell back and on ops that are slow to start."""
    notes = []
    for fallback in manifest.fallbacks:
        variant = manifest.variants[fallback.variant].name
        shape = f" at {shape_text(fallback.shape)}" if fallback.shape else ""
        how = "runs as it stands" if fallback.adaptor == EAGER else f"is served by {fallback.adaptor}"
        notes.append(f"Piece {fallback.piece_index} of variant {variant}{shape} {how}: {fallback.reason}")
    notes += [
        f"The op {name} was made with torch.library.custom_op, whose first call imports Dynamo (seconds at start). "
        "cgtool.direct_register_custom_op registers an op without that."
        for name in slow_ops
    ]
    return tuple(dict.fromkeys(notes))


def unproved_notes(manifest: Manifest, unproved: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    """Return which pieces' artifacts are not proved, and why: for good, as rows say, or this time."""
    gaps: dict[str, set[int]] = {}
    for piece_index, reason in (*unproved, *((row.piece_index, row.artifact.proof_gap) for row in manifest.rows)):
        # What the whole calls prove, or a note of theirs says why not.
        if reason and reason != NEEDS_RANKS:
            gaps.setdefault(reason, set()).add(piece_index)
    return tuple(
        f"The artifacts of {'piece' if len(pieces) == 1 else 'pieces'} {', '.join(map(str, sorted(pieces)))} are "
        f"{why if why.startswith('not proved') else f'not proved: {why}'}"
        for why, pieces in gaps.items()
    )


def uncalled_notes(manifest: Manifest, uncalled: Mapping[int, str]) -> tuple[str, ...]:
    """Return which variants were not called beside the model itself, and why: for good, or this time."""
    gaps: dict[str, list[str]] = {}
    for index, variant in enumerate(manifest.variants):
        reason = uncalled.get(index) or variant.proof_gap
        if reason:
            fixed = ", ".join(f"{name}={size}" for name, size in variant.fixed.items())
            gaps.setdefault(reason, []).append(f"{variant.name} ({fixed})" if fixed else variant.name)
    return tuple(
        f"The whole call of {'variant' if len(names) == 1 else 'variants'} {', '.join(names)} was {why}"
        for why, names in gaps.items()
    )
