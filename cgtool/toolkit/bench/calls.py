"""The timed calls: their arguments, the comparison of their outputs, and a digest of the weights. Imports torch.

Arguments are those of the example call, resized along a dynamic dimension by repeating or truncating values, so that
token ids stay in range and every way gets the same arguments. They are made outside of inference mode because guards
distinguish inference tensors from other tensors.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from cgtool.errors import UsageError
from cgtool.model import ModelSpec
from cgtool.toolkit.bench.ways import Difference

#: The largest difference from eager that rounding explains, relative to a tensor's largest absolute value. Fused
#: kernels round at other places than eager does, and a deep model accumulates the differences.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: The dynamic dimensions of a tensor, by index.
Dims = Mapping[int, Any]


def dimension_of(spec: ModelSpec, requested: str | None) -> str | None:
    """Return the dimension that is resized: the requested one or the last; None if no dimension is dynamic."""
    known = list(_bounds(spec))
    if requested is None:
        return known[-1] if known else None
    if requested not in known:
        names = ", ".join(known) or "none"
        message = f"The model has no dynamic dimension {requested!r}; it has: {names}. Name one with --size-dim."
        raise UsageError(message, path="--size-dim", expected=known, actual=requested)
    return requested


def resized(spec: ModelSpec, dimension: str, size: int) -> Arguments:
    """Return the first example call's arguments with `dimension` resized."""
    least, most = _bounds(spec)[dimension]
    if size < least or (most is not None and size > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        message = f"The size of {dimension} must be {bounds}, and {size} is not. Give another size."
        raise UsageError(message, path="--tokens", expected=[least, most], actual=size)

    def resize(value: Any, dims: Dims) -> Any:
        for index, dim in dims.items():
            if dimension == (dim if isinstance(dim, str) else dim[0]):
                positions = torch.arange(size, device=value.device) % value.shape[index]
                value = value.index_select(index, positions)
        return value

    call = spec.calls[0]
    return (
        tuple(resize(value, dims) for value, dims in zip(call.args, _dims_of_args(spec), strict=True)),
        {name: resize(value, spec.dynamic.get(name, {})) for name, value in call.kwargs.items()},
    )


def dynamic_tensors(spec: ModelSpec) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the example's tensors with dynamic dimensions, and the indices of those dimensions."""
    call = spec.calls[0]
    named = ((value, spec.dynamic.get(name, {})) for name, value in call.kwargs.items())
    for value, dims in (*zip(call.args, _dims_of_args(spec), strict=True), *named):
        if dims:
            yield value, tuple(dims)


def _bounds(spec: ModelSpec) -> dict[str, tuple[int, int | None]]:
    """Return the minimum and maximum size of each dynamic dimension."""
    named = (dim for dims in spec.dynamic.values() for dim in dims.values())
    return dict((dim, (1, None)) if isinstance(dim, str) else (dim[0], (dim[1], dim[2])) for dim in named)


def _dims_of_args(spec: ModelSpec) -> list[Dims]:
    names = list(inspect.signature(getattr(spec.module, spec.method)).parameters)
    dims: list[Dims] = [spec.dynamic.get(name, {}) for name in names[: len(spec.calls[0].args)]]
    return dims + [{}] * (len(spec.calls[0].args) - len(dims))  # *args have no names


def leaves_of(value: Any, path: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of a nested output: tensors, numbers and strings; other objects as the name of their type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves_of(getattr(value, field.name, None), f"{path}.{field.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_of(item, f"{path}[{key!r}]")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, item in enumerate(value):
            yield from leaves_of(item, f"{path}[{index}]")
    elif isinstance(value, torch.Tensor):
        yield path, value.detach().cpu().clone()
    else:
        yield path, value if value is None or type(value) in (bool, int, float, str) else type(value).__qualname__


def write_outputs(file: Path, outputs: Mapping[str, Any]) -> None:
    """Write the leaves of eager's outputs as MessagePack; a tensor is its dtype, shape and bytes."""
    leaves = {name: {path: _encode(leaf) for path, leaf in leaves_of(output)} for name, output in outputs.items()}
    file.write_bytes(msgspec.msgpack.encode(leaves))


def read_outputs(file: Path) -> dict[str, dict[str, Any]]:
    """Read the leaves of eager's outputs, by the output's name and the leaf's path."""
    outputs = msgspec.msgpack.decode(file.read_bytes(), type=dict[str, dict[str, Any]])
    return {name: {path: _decode(leaf) for path, leaf in leaves.items()} for name, leaves in outputs.items()}


def _encode(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    flat = leaf.contiguous()
    data = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""
    return str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), data


def _decode(leaf: Any) -> Any:
    if not isinstance(leaf, list):
        return leaf
    dtype, shape, data = getattr(torch, leaf[0]), leaf[1], bytearray(leaf[2])
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)


def compare(eager: Mapping[str, Any], output: Any) -> Difference:
    """Compare an output with the leaves of eager's output."""
    leaves = dict(leaves_of(output))
    if list(leaves) != list(eager):
        return _exact_difference("its structure differs from eager's")
    differences = [_leaf_difference(path, leaves[path], expected) for path, expected in eager.items()]
    return Difference(
        worst=max((difference.worst for difference in differences), default=0.0),
        tolerance=max((difference.tolerance for difference in differences), default=0.0),
        problem=next((difference.problem for difference in differences if difference.problem), None),
    )


def _exact_difference(problem: str | None) -> Difference:
    """Return the difference of values that must be equal."""
    return Difference(worst=0.0, tolerance=0.0, problem=problem)


def _leaf_difference(path: str, actual: Any, expected: Any) -> Difference:
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        same = not isinstance(expected, torch.Tensor) and not isinstance(actual, torch.Tensor) and actual == expected
        return _exact_difference(None if same else f"{path} differs from eager's")
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        eager_type = f"{expected.dtype} {list(expected.shape)}"
        return _exact_difference(f"{path} is {actual.dtype} {list(actual.shape)}, and eager's is {eager_type}")
    tolerance = TOLERANCE.get(actual.dtype)
    if tolerance is None or actual.numel() == 0:
        return _exact_difference(None if torch.equal(actual, expected) else f"{path} differs from eager's")
    actual, expected = actual.double(), expected.double()
    if not torch.equal(actual.isfinite(), expected.isfinite()):
        message = f"{path} is infinite or NaN at other positions than eager's"
        return Difference(worst=0.0, tolerance=tolerance, problem=message)
    scale = expected.abs().nan_to_num(posinf=0, neginf=0).max().item()
    error = (actual - expected).abs().nan_to_num(posinf=0, neginf=0).max().item()
    relative = error / scale if scale else error
    within = relative <= tolerance
    problem = None if within else f"{path} differs from eager's by {relative:.1e} of its largest value"
    return Difference(worst=relative, tolerance=tolerance, problem=problem)


def weights_digest(module: torch.nn.Module) -> str:
    """Return a digest of sums over all parameters and buffers; equal weights have equal digests.

    The bits of the weights are summed as integers, because a sum of floats depends on the number of threads.
    """
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            bits = values.contiguous().view(kinds[values.element_size()]).reshape(-1)
            sums = [part.sum(dtype=torch.int64).item() for part in (bits, bits[::2])]
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {sums}".encode())
    return digest.hexdigest()[:16]
