"""What an entry records of the model that it was made of: its example calls, counts, notes. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cgtool.config import EAGER
from cgtool.guards.signature import CallSignature
from cgtool.model import ExampleCall, ModelSpec
from cgtool.plan.pieces import Json
from cgtool.plan.records import Plan
from cgtool.plan.shapes import of_sizes, shape_text
from cgtool.store.records import Fallback, VariantCounts

if TYPE_CHECKING:
    from cgtool.compiler.stitch import Stitched


def calls_of(spec: ModelSpec) -> Json:
    """Return what the example calls are, without their tensors' values; by position or by name is one call."""
    dynamic = {
        parameter: {str(dim): name if isinstance(name, str) else list(name) for dim, name in dims.items()}
        for parameter, dims in spec.dynamic.items()
    }
    calls = []
    for call in spec.calls:
        args, kwargs = _canonical(spec, call)
        calls.append([call.name, [_shown(a) for a in args], {k: _shown(v) for k, v in kwargs.items()}])
    return {"method": spec.method, "dynamic": dynamic, "calls": calls}


def _canonical(spec: ModelSpec, call: ExampleCall) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a call's arguments in the one form in which it is traced; as they came where they do not fit."""
    signature = CallSignature.of(getattr(spec.module, spec.method))
    try:
        return signature.arguments(signature.bind(call.args, call.kwargs))
    except TypeError:  # the trace says so in its own words
        return call.args, call.kwargs


def _shown(value: Any) -> Json:
    """Return an example argument as what it is: tensors by dtype, shape and strides, containers by their parts."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return {"tensor": str(value.dtype), "shape": list(value.shape), "stride": list(value.stride())}
    if isinstance(value, Mapping):
        return {str(key): _shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(item) for item in value]
    return (
        value if value is None or isinstance(value, (bool, int, str)) else f"{type(value).__qualname__} {value!r:.80}"
    )


def same_calls(one: Json, other: Json) -> bool:
    """Return whether two models' example calls may be served by one entry.

    Where dimensions are dynamic, an example's own sizes decide nothing that guards do not.
    """
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


def counts_of(plan: Plan, index: int) -> VariantCounts:
    """Return how many pieces one variant has, how many hold a splitting op, and how many compiled ones differ."""
    variant = plan.variants[index]
    steps = [step for step in variant.steps if step.piece >= 0]
    compiled = [step for step in steps if not step.splitting]
    return VariantCounts(
        name=variant.name,
        pieces=len(steps),
        splitting_pieces=len(steps) - len(compiled),
        unique_pieces=len({step.graph for step in compiled}),
        fixed=dict(variant.fixed),
    )


def fallbacks_of(stitched: Stitched) -> tuple[Fallback, ...]:
    """Return the pieces that no compiler may be given, as a manifest lists them."""
    return tuple(
        Fallback(
            variant=index,
            piece_index=piece,
            shape=of_sizes(stitched.plan.variants[index].fixed),
            adaptor=EAGER,
            reason=why,
        )
        for index, pieces in stitched.eager_pieces.items()
        for piece, why in pieces.items()
    )


def notes_of(stitched: Stitched, fallbacks: Iterable[Fallback]) -> tuple[str, ...]:
    """Return advice for the user that the traces and the compilers gave."""
    notes = [_fallback_note(fallback, stitched.plan.variants[fallback.variant].name) for fallback in fallbacks]
    notes += [
        f"The op {name} was made with torch.library.custom_op, whose first call imports Dynamo (seconds at start). "
        "cgtool.direct_register_custom_op registers an op without that."
        for name in stitched.slow_ops
    ]
    return tuple(dict.fromkeys(notes))


def unproved_notes(unproved: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    """Return which pieces' artifacts were not proved, and why.

    Args:
        unproved: Piece indices, each with its reason; "" for none.
    """
    gaps: dict[str, set[int]] = {}
    for piece_index, reason in unproved:
        if reason:
            gaps.setdefault(reason, set()).add(piece_index)
    return tuple(
        f"The artifacts of {'piece' if len(pieces) == 1 else 'pieces'} {', '.join(map(str, sorted(pieces)))} are "
        f"{why if why.startswith('not proved') else f'not proved: {why}'}"
        for why, pieces in gaps.items()
    )


def _fallback_note(fallback: Fallback, variant: str) -> str:
    shape = f" at {shape_text(fallback.shape)}" if fallback.shape else ""
    how = "runs as it stands" if fallback.adaptor == EAGER else f"is served by {fallback.adaptor}"
    return f"Piece {fallback.piece_index} of variant {variant}{shape} {how}: {fallback.reason}"
