"""Checks an artifact's results against its piece: shape, dtype, strides, device and numbers.

Strides are compared with the trace, because the next pieces were compiled for these; eager may choose others. Numbers
are compared as in torch's own benchmarks: the artifact's error against float64 may be a small multiple of eager's own
error, plus a margin that depends on the least precise dtype in the piece. There are limits for a single element, which
detects a wrong row, and for the root mean square and a common factor, which detect errors below one rounding that occur
everywhere. Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from cgtool.compiler.proof.reference import eps_of
from cgtool.graph.expressions import evaluate
from cgtool.graph.values import device_of, dtype_of
from cgtool.plan.pieces import TensorMeta
from cgtool.runtime.generate import strides_matter


class WrongError(Exception):
    """The artifact is wrong; the message continues a sentence whose subject is the artifact or one of its tensors."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The error that an artifact may have beyond eager's own error.

    Args:
        element: The error of one element, relative to its magnitude and to the tensor's scale.
        rms: The root mean square of the error, relative to that of the tensor.
        steps: The share of elements that may differ because a rounding changed a discontinuous op; 0 without such ops.
        usual: The root mean square of rounding errors, if there is no float64 run to measure eager's own error.
        num_open: The number of undefined elements, which are not compared.
    """

    element: float
    rms: float
    steps: float
    usual: float = 0.0
    num_open: int = 0

    @classmethod
    def of(cls, dtype: torch.dtype, *, takes_steps: bool, has_reference: bool) -> Self:
        """Return the tolerance for a piece's least precise float; without a float64 run, eager is the reference."""
        eps = eps_of(dtype)
        if eps >= torch.finfo(torch.float16).eps:
            element, rms, steps = 4 * eps, 0.25 * eps, 0.02
        else:
            element, rms, steps = max(1e-9, 1000 * eps), max(1e-10, 150 * eps), 1e-5
        if not has_reference:
            element, rms = 2 * element, 4 * rms
        return cls(element=element, rms=rms, steps=steps if takes_steps else 0.0)

    def with_sums(self, count: int, dtype: torch.dtype) -> Self:
        """Return the tolerance if up to `count` numbers may be summed.

        Compiled code adds them one by one, in float32 or `dtype`, but eager adds them in a tree. If the numbers are
        alike, as in repeated rows, every step may be rounded in the same direction.
        """
        drift = count * min(eps_of(dtype), torch.finfo(torch.float32).eps) / 8
        return replace(self, element=max(self.element, 2 * drift), rms=max(self.rms, drift))

    def num_allowed(self, count: int, flips: int = 0) -> int:
        """Return how many of `count` elements may differ, given that eager itself differs in `flips` of them."""
        return int(self.steps * (count + self.num_open)) + 4 * flips if self.steps else 0


def check_metas(
    found: Sequence[object], metas: Sequence[TensorMeta], sizes: Mapping[str, int], device_index: int | None
) -> None:
    """Check the shape, dtype, device and strides of outputs against the trace.

    Raises:
        WrongError: An output differs.
    """
    if len(found) != len(metas):
        msg = f"returns {len(found)} outputs, and the piece {len(metas)}"
        raise WrongError(msg)
    for number, (tensor, meta) in enumerate(zip(found, metas, strict=True)):
        if not isinstance(tensor, torch.Tensor):
            msg = f"returns a {type(tensor).__name__} as output {number}, and the piece a tensor"
            raise WrongError(msg)
        shape = tuple(int(evaluate(dim, sizes)) for dim in meta.shape)
        stride = tuple(int(evaluate(step, sizes)) for step in meta.stride)
        device = device_of(meta.device, device_index)
        there = tensor.device if device.index is not None else torch.device(tensor.device.type)
        for what, ours, theirs in (
            ("of shape", tuple(tensor.shape), shape),
            ("of dtype", tensor.dtype, dtype_of(meta.dtype)),
            ("on", there, device),
        ):
            if ours != theirs:
                msg = f"returns output {number} {what} {ours}, and the piece {theirs}"
                raise WrongError(msg)
        if strides_matter(tensor, stride):
            msg = f"returns output {number} with strides {tensor.stride()}, and the trace {stride} (shape {shape})"
            raise WrongError(msg)


def left_open(one: torch.Tensor, other: torch.Tensor, *, sorts: bool = False) -> torch.Tensor | None:
    """Return a mask of the elements that depend on undefined results; None if they differ only by rounding.

    Args:
        one: Eager's result with one set of values for undefined results.
        other: Eager's result with the other set.
        sorts: Whether the order of equal elements may be undefined. Then the mask covers every row of the first
            dimension that differs at all: rows that nearly agree in these two orders may not agree in a third.
    """
    if one.is_floating_point() or one.is_complex():
        eps = 16 * torch.finfo(one.dtype).eps
        if one.itemsize == 1:  # torch does not compute in float8
            one, other = one.float(), other.float()
        flat = _flat(one)
        atol = eps * _rms(flat[flat.isfinite()])
        places = ~torch.isclose(one.detach(), other.detach(), rtol=eps, atol=atol, equal_nan=True)
    else:
        places = one != other
    if not bool(places.any()):
        return None
    if sorts:
        places = (one != other) & ~(one.isnan() & other.isnan())
        if places.dim() > 1:
            rows = places.flatten(1).any(1)
            places = rows.view(-1, *[1] * (places.dim() - 1)).expand_as(places)
    return places


def farther(one: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return, of two right results, the element further from the exact result at each place."""
    if other is one or not one.is_floating_point():
        return one
    is_farther = (other.to(exact.dtype) - exact).abs() > (one.to(exact.dtype) - exact).abs()
    return torch.where(is_farther, other, one)


def roundings(nearby: torch.Tensor, eager: torch.Tensor, tolerance: Tolerance) -> float:
    """Return the effect of rounding on a tensor, as a root mean square relative to the tensor's.

    Compares eager's result for inputs one rounding away with its result for the inputs themselves. Elements that differ
    by more than the tolerance come from discontinuous ops and do not count.
    """
    if not eager.is_floating_point():
        return 0.0
    near, exact = _flat(nearby), _flat(eager)
    finite = near.isfinite() & exact.isfinite()
    near, exact = near[finite], exact[finite]
    scale = max(_rms(exact), 1e-6)
    error = (near - exact).abs()
    return _rms(error[error <= tolerance.element * (exact.abs() + scale)]) / scale


def check_numbers(
    found: torch.Tensor,
    eager: torch.Tensor,
    reference: torch.Tensor,
    *,
    tolerance: Tolerance,
    but: torch.Tensor | None = None,
) -> float:
    """Check one tensor against eager's and the reference; return its relative error.

    Args:
        found: The tensor to check.
        eager: The result of eager.
        reference: The result in float64, or that of eager.
        tolerance: The error allowed.
        but: A mask of elements to skip.

    Raises:
        WrongError: The tensor differs by more than the tolerance.
    """
    if but is not None:
        tolerance = replace(tolerance, num_open=int(but.sum()))
        found, eager, reference = found[~but], eager[~but], reference[~but]
    if not (eager.is_floating_point() or eager.is_complex()):
        _check_exact(found, eager, reference.to(eager.dtype), tolerance)
        return 0.0
    ours, theirs, exact = (_flat(tensor) for tensor in (found, eager, reference))
    if not math.isfinite(float((ours + theirs + exact).sum())):  # a sum is the cheapest check
        kept = _where_finite(ours, theirs, exact, tolerance)
        ours, theirs, exact = ours[kept], theirs[kept], exact[kept]
    return _check_finite(ours, theirs, exact, tolerance) if len(ours) else 0.0


def _check_exact(found: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, tolerance: Tolerance) -> None:
    """Check integers and booleans: equal, except for the number of elements that rounding may have changed."""
    count = int(((found != eager) & (found != exact)).sum())
    if count > tolerance.num_allowed(found.numel(), int((eager != exact).sum())):
        msg = f"differs in {count} of {found.numel()} elements"
        raise WrongError(msg)


def _where_finite(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Return a mask of finite elements; check that the others are NaN or infinite in the same places."""
    finite = torch.isfinite(exact) & torch.isfinite(theirs)
    both = ~torch.isfinite(exact) & ~torch.isfinite(theirs)
    settled = both & ((exact == theirs) | (exact.isnan() & theirs.isnan()))
    wrong = (finite & ~torch.isfinite(ours)) | (settled & ~((ours == exact) | (ours.isnan() & exact.isnan())))
    count = int(wrong.sum())
    if count > tolerance.num_allowed(len(ours)):
        msg = f"has NaN or infinity in {count} places where it differs from eager"
        raise WrongError(msg)
    return finite & ~wrong


def _check_finite(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, tolerance: Tolerance) -> float:
    scale = max(_rms(exact), 1e-6)
    error, eager_error = (ours - exact).abs(), (theirs - exact).abs()
    limit = tolerance.element * (exact.abs() + scale)
    # with discontinuous ops, rounding may also have changed elements of eager's own result
    kept = eager_error <= 16 * limit if tolerance.steps else torch.ones_like(error, dtype=torch.bool)
    outside = error > limit + 4 * (float(eager_error[kept].max()) if bool(kept.any()) else 0.0)
    if tolerance.steps:  # an element that agrees with eager is right, even if both differ from float64
        outside &= (ours - theirs).abs() > limit
    num_outside = int(outside.sum())
    if num_outside > tolerance.num_allowed(len(ours), int((~kept).sum())):
        place = int(error.masked_fill(~outside, 0).argmax())
        msg = (
            f"is {float(ours[place]):.6g} where eager has {float(exact[place]):.6g} (and {num_outside} of "
            f"{len(ours)} elements differ by more than rounding)"
        )
        raise WrongError(msg)
    kept &= ~outside
    ours, theirs, exact = ours[kept], theirs[kept], exact[kept]
    relative, usual = _rms(ours - exact) / scale, max(_rms(theirs - exact) / scale, tolerance.usual)
    if relative > 3 * usual + tolerance.rms:
        msg = f"differs by {relative:.2e} of its magnitude, and eager itself by {usual:.2e}"
        raise WrongError(msg)
    _check_factor(ours, theirs, exact, tolerance, usual + tolerance.rms)
    return relative


def _check_factor(
    ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, tolerance: Tolerance, usual: float
) -> None:
    """Check for a common factor: roundings go both ways, so even a factor smaller than one rounding shows."""
    square = float(exact @ exact)
    if not square:
        return
    factor, eager_factor = (float(tensor @ exact) / square - 1 for tensor in (ours, theirs))
    beyond = abs(factor) - 3 * abs(eager_factor) - tolerance.rms / 2
    if beyond > 8 * tolerance.rms / math.sqrt(len(exact)) and beyond > 8 * usual / math.sqrt(_num_different(exact)):
        msg = f"is {1 + factor:.6f} times the result of eager"
        raise WrongError(msg)


def _num_different(numbers: torch.Tensor) -> int:
    """Return the number of distinct values in a tensor; equal elements are all rounded in the same way."""
    return 1 + int((numbers.sort().values.diff() != 0).sum())


def check_overlaps(
    found: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    eager_inputs: Sequence[torch.Tensor],
) -> None:
    """Check that outputs share memory only where the piece's do; else a later write to one would change the other.

    The reverse is harmless: the split keeps tensors together that share memory that is written to.

    Raises:
        WrongError: Two tensors share memory, and eager's do not.
    """
    ours, theirs = [*inputs, *found], [*eager_inputs, *eager]
    for one in range(len(inputs), len(ours)):
        for other in range(one):
            if not _share(ours[one], ours[other]) or _share(theirs[one], theirs[other]):
                continue
            if _overlap(ours[one], ours[other]):
                name = f"input {other}" if other < len(inputs) else f"output {other - len(inputs)}"
                msg = f"returns output {one - len(inputs)} in the memory of {name}, and the piece does not"
                raise WrongError(msg)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common."""
    touched = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    seen = [
        touched.as_strided(
            tensor.shape,
            [step * tensor.element_size() for step in tensor.stride()],
            tensor.storage_offset() * tensor.element_size(),
        )
        for tensor in (one, other)
        if tensor.numel()
    ]
    if len(seen) == 1:
        return False
    seen[0].fill_(True)
    return bool(seen[1].any())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().to(torch.float64).reshape(-1)


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.pow(2).mean().sqrt()) if len(tensor) else 0.0
