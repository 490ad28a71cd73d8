"""Whether what an artifact gave is what its piece gives: shape, dtype, strides, device and numbers.

Numbers are judged as torch's own benchmarks do: the artifact's error against float64 may be a small multiple of eager's
own, and a little more. What is added depends on the least precise dtype in the piece, and a single element, the root of
mean squares and a common factor each have a limit: the first sees a wrong row, the others what is wrong everywhere by
less than one rounding. Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cgtool.compiler.proof.reference import eps_of
from cgtool.errors import ProofMismatchError
from cgtool.graph.expressions import evaluate
from cgtool.graph.metas import device_of, dtype_of
from cgtool.plan.pieces import TensorMeta

_ADVICE = "the piece can be compiled by another adaptor, or run eagerly (adaptor 'eager')"


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What an artifact may be wrong by beyond eager's own error.

    Args:
        element: One element, relative to its size and to the tensor's scale.
        rms: The root of mean squares, relative to the tensor's.
        steps: The share of elements that a rounding may have decided otherwise; 0 where floats decide nothing.
    """

    element: float
    rms: float
    steps: float


def tolerance_of(dtype: torch.dtype, *, takes_steps: bool, has_reference: bool) -> Tolerance:
    """Return the tolerance of a piece.

    Args:
        dtype: Its least precise float.
        takes_steps: Whether floats decide something in it.
        has_reference: Whether it ran in float64; else the artifact is compared with eager's own numbers.
    """
    eps = eps_of(dtype)
    if eps >= torch.finfo(torch.float16).eps:
        element, rms, steps = 4 * eps, 0.25 * eps, 0.02
    else:
        element, rms, steps = max(1e-9, 1000 * eps), max(1e-10, 150 * eps), 1e-5
    if not has_reference:
        element, rms = 2 * element, 4 * rms
    return Tolerance(element=element, rms=rms, steps=steps if takes_steps else 0.0)


def check_metas(
    found: Sequence[object], metas: Sequence[TensorMeta], sizes: Mapping[str, int], device_index: int | None
) -> None:
    """Check that outputs are of the make that the graph promises.

    Raises:
        ProofMismatchError: One is not.
    """
    if len(found) != len(metas):
        raise mismatch(f"gives {len(found)} outputs and the piece {len(metas)}", sizes)
    for number, (tensor, meta) in enumerate(zip(found, metas, strict=True)):
        if not isinstance(tensor, torch.Tensor):
            raise mismatch(f"gives a {type(tensor).__name__} as output {number}, and the piece a tensor", sizes)
        shape = tuple(int(evaluate(dim, sizes)) for dim in meta.shape)
        stride = tuple(int(evaluate(step, sizes)) for step in meta.stride)
        device = device_of(meta.device, device_index)
        _same(f"output {number} of shape", tuple(tensor.shape), shape, sizes)
        _same(f"output {number} of dtype", tensor.dtype, dtype_of(meta.dtype), sizes)
        if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
            _same(f"output {number} on", tensor.device, device, sizes)
        if any(
            size > 1 and ours != theirs
            for size, ours, theirs in zip(shape, tensor.stride(), stride, strict=True)
            if tensor.numel()
        ):
            raise mismatch(
                f"gives output {number} with strides {tuple(tensor.stride())} and the piece with {stride} "
                f"(shape {shape})",
                sizes,
            )


@dataclass(frozen=True, kw_only=True)
class _Case:
    """What is compared: its name, what it may be wrong by, and the sizes at which it was run."""

    label: str
    tolerance: Tolerance
    sizes: Mapping[str, int]


def check_numbers(
    label: str,
    found: torch.Tensor,
    eager: torch.Tensor,
    reference: torch.Tensor,
    *,
    tolerance: Tolerance,
    sizes: Mapping[str, int],
) -> float:
    """Check one tensor against eager's and against the reference; return its relative error.

    Raises:
        ProofMismatchError: It is another tensor.
    """
    if not found.numel():
        return 0.0
    case = _Case(label=label, tolerance=tolerance, sizes=sizes)
    if not (eager.is_floating_point() or eager.is_complex()):
        _check_exact(case, found, eager, reference)
        return 0.0
    ours, theirs, exact = (_flat(tensor) for tensor in (found, eager, reference))
    if not math.isfinite(float((ours + theirs + exact).sum())):  # a sum of many numbers is the cheapest look
        kept = _where_finite(case, ours, theirs, exact)
        ours, theirs, exact = ours[kept], theirs[kept], exact[kept]
    return _check_finite(case, ours, theirs, exact)


def _where_finite(case: _Case, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return where all three are numbers; check that the others are NaN or infinite alike."""
    finite = torch.isfinite(exact) & torch.isfinite(theirs)
    both = ~torch.isfinite(exact) & ~torch.isfinite(theirs)
    settled = both & ((exact == theirs) | (exact.isnan() & theirs.isnan()))
    wrong = (finite & ~torch.isfinite(ours)) | (settled & ~((ours == exact) | (ours.isnan() & exact.isnan())))
    count = int(wrong.sum())
    if count > _allowed(case.tolerance, len(ours), 0):
        raise mismatch(f"{case.label} has NaN or infinity in {count} places other than the piece's", case.sizes)
    return finite & ~wrong


def _check_finite(case: _Case, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> float:
    tolerance = case.tolerance
    if not len(ours):
        return 0.0
    scale = max(_rms(exact), 1e-6)
    error, eager_error = (ours - exact).abs(), (theirs - exact).abs()
    limit = tolerance.element * (exact.abs() + scale)
    kept = torch.ones_like(error, dtype=torch.bool)
    flips = 0
    if tolerance.steps:
        kept = eager_error <= 16 * limit
        flips = int((~kept).sum())
    worst_of_eager = float(eager_error[kept].max()) if bool(kept.any()) else 0.0
    outside = error > limit + 4 * worst_of_eager
    if tolerance.steps:
        # a rounding that eager's took the other way in both is right too
        outside &= (ours - theirs).abs() > limit
    num_outside = int(outside.sum())
    if num_outside > _allowed(tolerance, len(ours), flips):
        place = int(error.masked_fill(~outside, 0).argmax())
        raise mismatch(
            f"{case.label} is {float(ours[place]):.6g} where the piece has {float(exact[place]):.6g} (and "
            f"{num_outside} of {len(ours)} elements differ by more than rounding)",
            case.sizes,
        )
    kept &= ~outside
    ours, theirs, exact = ours[kept], theirs[kept], exact[kept]
    relative, usual = _rms(ours - exact) / scale, _rms(theirs - exact) / scale
    if relative > 3 * usual + tolerance.rms:
        raise mismatch(
            f"{case.label} differs by {relative:.2e} of its size, and the piece itself by {usual:.2e}",
            case.sizes,
        )
    _check_factor(case, ours, theirs, exact)
    return relative


def _check_factor(case: _Case, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Roundings go both ways: a common factor shows long before it is larger than one."""
    square = float(exact @ exact)
    if not square:
        return
    factor, eager_factor = (float(tensor @ exact) / square - 1 for tensor in (ours, theirs))
    noise = 8 * case.tolerance.rms / math.sqrt(len(exact))
    if abs(factor) > 3 * abs(eager_factor) + case.tolerance.rms / 2 + noise:
        raise mismatch(f"{case.label} is {1 + factor:.6f} times what the piece gives", case.sizes)


def _check_exact(case: _Case, found: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor) -> None:
    """Integers and booleans: equal, save for as many as floats may have decided otherwise."""
    differ = (found != eager) & (found != reference.to(eager.dtype))
    count = int(differ.sum())
    flips = int((eager != reference.to(eager.dtype)).sum()) if case.tolerance.steps else 0
    if count > _allowed(case.tolerance, found.numel(), flips):
        raise mismatch(f"{case.label} differs in {count} of {found.numel()} elements", case.sizes)


def check_overlaps(
    found: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    eager_inputs: Sequence[torch.Tensor],
    sizes: Mapping[str, int],
) -> None:
    """Check that outputs share memory only where the piece's do: a later write to one would change the other.

    The reverse is harmless: the split keeps together what shares memory that is written to.

    Raises:
        ProofMismatchError: Two share memory, and eager's do not.
    """
    ours, theirs = [*inputs, *found], [*eager_inputs, *eager]
    for one in range(len(inputs), len(ours)):
        for other in range(one):
            if ours[one].untyped_storage().data_ptr() != ours[other].untyped_storage().data_ptr():
                continue
            shared = theirs[one].untyped_storage().data_ptr() == theirs[other].untyped_storage().data_ptr()
            if not shared and _overlap(ours[one], ours[other]):
                name = f"input {other}" if other < len(inputs) else f"output {other - len(inputs)}"
                raise mismatch(f"gives output {one - len(inputs)} in the memory of {name}, and the piece not", sizes)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common."""
    if not one.numel() or not other.numel():
        return False
    touched = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    for tensor, mark in ((one, True), (other, False)):
        item = tensor.element_size()
        first = tensor.storage_offset() * item
        places = touched.as_strided(tensor.shape, [step * item for step in tensor.stride()], first)
        if not mark:
            return bool(places.any())
        places.fill_(True)
    return False


def _allowed(tolerance: Tolerance, count: int, flips: int) -> int:
    return int(tolerance.steps * count) + 4 * flips if tolerance.steps else 0


def _same(what: str, ours: object, theirs: object, sizes: Mapping[str, int]) -> None:
    if ours != theirs:
        raise mismatch(f"gives {what} {ours} and the piece {theirs}", sizes)


def mismatch(what: str, sizes: Mapping[str, int]) -> ProofMismatchError:
    """Return the error that says how an artifact differs from its piece."""
    at = ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "the piece's sizes"
    return ProofMismatchError(f"the artifact is wrong at {at}: it {what}; {_ADVICE}", actual=what)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().to(torch.float64).reshape(-1)


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.pow(2).mean().sqrt()) if len(tensor) else 0.0
