"""The state of an entry: what its key records of the trace, what is missing from it, and the notes for its user."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from cgtool.compiler.request import NEEDS_RANKS
from cgtool.compiler.required import unserved
from cgtool.compiler.schedule import unique
from cgtool.compiler.wanted import Work
from cgtool.dims import Dims
from cgtool.errors import CacheCorruptError, CacheMissError
from cgtool.guards.kinds import NoRuleError, encode_literal
from cgtool.guards.signature import CallSignature
from cgtool.guards.sources import qualified_name
from cgtool.host import variables_now
from cgtool.model import ModelSpec
from cgtool.plan.grammar import canonical_json, digest_of
from cgtool.plan.pieces import EAGER, Json
from cgtool.plan.records import Variant
from cgtool.plan.shapes import shape_text
from cgtool.runtime.find import MatchedEntry
from cgtool.store.entry import read_entry
from cgtool.store.layout import CacheLayout
from cgtool.store.records import Manifest, VariantCounts

if TYPE_CHECKING:
    from cgtool.compiler.stitch import Stitched

#: The depth to which an example argument's attributes are recorded.
_MAX_DEPTH = 3
#: The lengths of an encoded process group and device mesh.
_GROUP_LENGTH, _MESH_LENGTH = 4, 5


def calls_of(spec: ModelSpec) -> Json:
    """Return the example calls without tensor data; positional and keyword arguments are not distinguished."""
    Dims.of(spec.dynamic)  # raises a UsageError if it is malformed
    dynamic = {
        parameter: {str(dim): name if isinstance(name, str) else list(name) for dim, name in dims.items()}
        for parameter, dims in spec.dynamic.items()
    }
    signature = CallSignature.of(getattr(spec.module, spec.method))
    calls = []
    for call in spec.calls:
        args, kwargs = call.args, call.kwargs
        with contextlib.suppress(TypeError):  # the trace reports arguments that do not fit
            args, kwargs = signature.arguments(signature.bind(args, kwargs))
        calls.append([call.name, [_encode(a) for a in args], {k: _encode(v) for k, v in kwargs.items()}])
    require = {name: list(bounds) for name, bounds in spec.require.items()}
    return {"method": spec.method, "dynamic": dynamic, "calls": calls} | ({"require": require} if require else {})


def traced_factors(spec: ModelSpec, stitched: Stitched) -> dict[str, Json]:
    """Return the factors of the key that only a trace determines."""
    # Sorted: Dynamo's order depends on what this process has traced before.
    guards = [
        sorted(map(_without_rank, msgspec.to_builtins(tuple(variant.model_guards))), key=canonical_json)
        for variant in stitched.plan.variants
    ]
    return {
        "sources": dict(stitched.code.sources),
        "distributions": dict(stitched.code.distributions),
        "variables": variables_now(stitched.code.variables),
        "ops": dict(stitched.ops),
        "guards": digest_of(guards),
        "calls": calls_of(spec),
    }


def _without_rank(fact: Json) -> Json:
    """Return a guard's expected value without this process's rank, so that all ranks of a model agree on it."""
    if isinstance(fact, dict):
        return {name: _without_rank(item) for name, item in fact.items() if name != "rank" or "world_size" not in fact}
    if not isinstance(fact, list | tuple):
        return fact
    if len(fact) == _GROUP_LENGTH and fact[0] == "group":
        return [fact[0], _from_first(fact[1]), fact[3]]
    if len(fact) == _MESH_LENGTH and fact[0] == "mesh":
        return [*fact[:2], _from_first(fact[2]), *map(_without_rank, fact[3:])]
    return [_without_rank(item) for item in fact]


def _from_first(ranks: Json) -> Json:
    return [rank - ranks[0] for rank in ranks] if isinstance(ranks, list | tuple) else ranks


def _encode(value: Any, depth: int = _MAX_DEPTH) -> Json:
    """Return an example argument as JSON: tensors by dtype, shape and strides, objects by their attributes.

    Never by address or `repr`, which differ between processes.
    """
    if isinstance(value, torch.Tensor):
        return {"tensor": str(value.dtype), "shape": list(value.shape), "stride": list(value.stride())}
    if isinstance(value, Mapping):
        return [[_encode(key), _encode(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    try:
        return encode_literal(value)
    except NoRuleError:
        held = getattr(value, "__dict__", {}) if depth else {}
        return {"object": qualified_name(type(value))} | {n: _encode(part, depth - 1) for n, part in held.items()}


def same_calls(one: Json, other: Json) -> bool:
    """Return whether one entry can serve two models' example calls.

    With dynamic dimensions, the sizes of an example do not matter beyond the guards. Required sizes do not matter
    either: they are checked against the entry's plan.
    """
    one, other = ({**calls, "require": None} if isinstance(calls, dict) else calls for calls in (one, other))
    if not isinstance(one, dict) or not one.get("dynamic"):
        return bool(one == other)
    return bool(_without_sizes(one) == _without_sizes(other))


def uncovered_calls(spec: ModelSpec, without: Collection[str], check: bool, found: MatchedEntry) -> tuple[str, ...]:
    """Return why an entry does not cover a model's example calls and required sizes, if it does not.

    Args:
        spec: The model.
        without: Hashes of entries that are known not to cover the calls.
        check: Whether sizes that an earlier warm could not cover count as well.
        found: The entry.
    """
    if found.entry.name.hash in without:
        return ("no variant serves the example",)
    then, now = found.key.value("calls"), calls_of(spec)
    if not same_calls(then, now):
        return ("the example calls or their dynamic dimensions are not those of the entry",)
    # Sizes that were left out under the same requirement would be left out again.
    if not spec.require or not (check or then.get("require") != now["require"]):
        return ()
    # Imports Dynamo, which a hit must not pay for.
    from cgtool.compiler.stitch import sizes_of_calls

    return unserved(found.plan.variants, spec.require, sizes_of_calls(spec))


def _without_sizes(calls: Json) -> Json:
    """Return `calls` with each tensor reduced to its dtype and rank."""
    if isinstance(calls, Mapping):
        if set(calls) == {"tensor", "shape", "stride"}:
            return [calls["tensor"], len(calls["shape"])]
        return {key: _without_sizes(value) for key, value in calls.items()}
    return [_without_sizes(item) for item in calls] if isinstance(calls, list) else calls


def counts_of(variant: Variant) -> VariantCounts:
    """Return a variant's number of pieces, of splitting pieces, and of unique compiled pieces."""
    steps = [step for step in variant.steps if step.piece >= 0]
    compiled = [step for step in steps if not step.splitting]
    return VariantCounts(
        name=variant.name,
        pieces=len(steps),
        splitting_pieces=len(steps) - len(compiled),
        unique_pieces=len({step.graph for step in compiled}),
        fixed=dict(variant.fixed),
    )


def damaged_texts(layout: CacheLayout, found: MatchedEntry) -> tuple[str, ...]:
    """Return a reason to trace again if one of an entry's files differs from its digest."""
    try:
        read_entry(layout, found.entry.name, files=found.entry.manifest.files)
    except CacheCorruptError as error:
        return (str(error),)
    return ()


def broken_work(found: MatchedEntry, work: Iterable[Work]) -> list[Work]:
    """Return the work whose stored artifacts are missing or differ from their digests."""
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
    """Return the miss of an incomplete entry, with a reason for each kind of gap; None if it is complete."""
    shapes = list(dict.fromkeys(shape_text(work.shape) for work in missing))
    count = len(list(unique(missing)))
    are_missing = "1 artifact is missing" if count == 1 else f"{count} artifacts are missing"
    reasons = []
    if shapes:
        reasons.append(f"{are_missing}, for the {'shape' if len(shapes) == 1 else 'shapes'} {', '.join(shapes)}")
    reasons += [f"the artifact of piece {work.piece_index} is damaged" for work in broken]
    if num_unproved:
        are = "artifact is" if num_unproved == 1 else "artifacts are"
        reasons.append(f"{num_unproved} {are} not proved yet")
    if num_uncalled:
        were = "variant has" if num_uncalled == 1 else "variants have"
        reasons.append(f"{num_uncalled} {were} not been compared with the model yet")
    if not reasons:
        return None
    msg = f"The entry is incomplete: {'; '.join(reasons)}. Warm the model again to add what is missing."
    return CacheMissError(msg, reasons=tuple(reasons), path=path, nearest=nearest)


def notes_of(manifest: Manifest, slow_ops: Iterable[str]) -> tuple[str, ...]:
    """Return notes on pieces that fell back and on ops that import Dynamo at their first call."""
    notes = []
    for fallback in manifest.fallbacks:
        variant = manifest.variants[fallback.variant].name
        shape = f" at {shape_text(fallback.shape)}" if fallback.shape else ""
        how = "runs eagerly" if fallback.adaptor == EAGER else f"is served by {fallback.adaptor}"
        notes.append(f"Piece {fallback.piece_index} of variant {variant}{shape} {how}: {fallback.reason}")
    notes += [
        f"The op {name} was registered with torch.library.custom_op and imports Dynamo at its first call, which adds "
        "seconds to each start. Register it with cgtool.direct_register_custom_op to avoid this."
        for name in slow_ops
    ]
    return tuple(dict.fromkeys(notes))


def unproved_notes(manifest: Manifest, unproved: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    """Return notes on artifacts that are not proved: permanently, as their rows record, or in this warm."""
    gaps: dict[str, set[int]] = {}
    for piece_index, reason in (*unproved, *((row.piece_index, row.artifact.proof_gap) for row in manifest.rows)):
        # pieces with collectives are proved by the whole calls, or a note on these says why not
        if reason and reason != NEEDS_RANKS:
            gaps.setdefault(reason, set()).add(piece_index)
    return tuple(
        f"The artifacts of {'piece' if len(pieces) == 1 else 'pieces'} {', '.join(map(str, sorted(pieces)))} are "
        f"{why if why.startswith('not proved') else f'not proved: {why}'}"
        for why, pieces in gaps.items()
    )


def uncalled_notes(manifest: Manifest, uncalled: Mapping[int, str]) -> tuple[str, ...]:
    """Return notes on variants that were not compared with the model: permanently, or in this warm."""
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
