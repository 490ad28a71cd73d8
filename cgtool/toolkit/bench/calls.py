"""The calls that are timed and compared: their arguments, what they give, and the weights behind that. Imports torch.

Arguments are the example's own, at another size of a dynamic dimension: values are repeated or cut, so that token ids
stay in range, and every way gets the same ones. They are made outside of inference mode, since guards of every kind
tell inference tensors from others.
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

#: The greatest difference from eager that rounding explains, relative to a tensor's greatest value: fused kernels round
#: at other places, and a deep model carries that on.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: Of a tensor: its dynamic dimensions, by index.
Dims = Mapping[int, Any]


def dimension_of(spec: ModelSpec, asked: str | None) -> str | None:
    """Return the dimension that sizes speak of: the one asked for, else the last; None where none is dynamic."""
    known = list(_bounds(spec))
    if asked is None:
        return known[-1] if known else None
    if asked not in known:
        names = ", ".join(known) or "none"
        message = f"The model has no dynamic dimension {asked!r}; it has: {names}. Name one of them with --size-dim."
        raise UsageError(message, path="--size-dim", expected=known, actual=asked)
    return asked


def resized(spec: ModelSpec, dimension: str, size: int) -> Arguments:
    """Return the first example call's arguments with `dimension` at another size."""
    least, most = _bounds(spec)[dimension]
    if size < least or (most is not None and size > most):
        message = f"{dimension} lies from {least} to {most or 'no limit'}, and {size} does not. Give another size."
        raise UsageError(message, path="--tokens", expected=[least, most], actual=size)

    def change(value: Any, dims: Dims) -> Any:
        for index, dim in dims.items():
            if dimension == (dim if isinstance(dim, str) else dim[0]):
                places = torch.arange(size, device=value.device) % value.shape[index]
                value = value.index_select(index, places)
        return value

    call = spec.calls[0]
    return (
        tuple(change(value, dims) for value, dims in zip(call.args, _dims_of_args(spec), strict=True)),
        {name: change(value, spec.dynamic.get(name, {})) for name, value in call.kwargs.items()},
    )


def dynamic_tensors(spec: ModelSpec) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the example's tensors that have dynamic dimensions, with those dimensions."""
    call = spec.calls[0]
    named = ((value, spec.dynamic.get(name, {})) for name, value in call.kwargs.items())
    for value, dims in (*zip(call.args, _dims_of_args(spec), strict=True), *named):
        if dims:
            yield value, tuple(dims)


def _bounds(spec: ModelSpec) -> dict[str, tuple[int, int | None]]:
    """Each dynamic dimension's name with its smallest and its largest size."""
    named = (dim for dims in spec.dynamic.values() for dim in dims.values())
    return dict((dim, (1, None)) if isinstance(dim, str) else (dim[0], (dim[1], dim[2])) for dim in named)


def _dims_of_args(spec: ModelSpec) -> list[Dims]:
    names = list(inspect.signature(getattr(spec.module, spec.method)).parameters)
    found: list[Dims] = [spec.dynamic.get(name, {}) for name in names[: len(spec.calls[0].args)]]
    return found + [{}] * (len(spec.calls[0].args) - len(found))


def leaves_of(value: Any, path: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield the parts of a nested output by path: tensors, numbers, texts; of anything else its type's name."""
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
    """Write the leaves of eager's outputs by name, in MessagePack: a tensor as its dtype, its shape and its bytes."""
    leaves = {name: {path: _written(leaf) for path, leaf in leaves_of(output)} for name, output in outputs.items()}
    file.write_bytes(msgspec.msgpack.encode(leaves))


def read_outputs(file: Path) -> dict[str, dict[str, Any]]:
    """Return the leaves of eager's outputs, by name."""
    outputs = msgspec.msgpack.decode(file.read_bytes(), type=dict[str, dict[str, Any]])
    return {name: {path: _read(leaf) for path, leaf in leaves.items()} for name, leaves in outputs.items()}


def _written(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    flat = leaf.contiguous()
    data = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""
    return str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), data


def _read(leaf: Any) -> Any:
    if not isinstance(leaf, list):
        return leaf
    dtype, shape, data = getattr(torch, leaf[0]), leaf[1], bytearray(leaf[2])
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)


def compare(eager: Mapping[str, Any], output: Any) -> Difference:
    """Return how an output differs from eager's, of which the leaves are given."""
    leaves = dict(leaves_of(output))
    if list(leaves) != list(eager):
        return _exact("its parts are others than eager's")
    found = [_leaf_difference(path, leaves[path], wanted) for path, wanted in eager.items()]
    return Difference(
        worst=max((one.worst for one in found), default=0.0),
        tolerance=max((one.tolerance for one in found), default=0.0),
        problem=next((one.problem for one in found if one.problem), None),
    )


def _exact(problem: str | None) -> Difference:
    """How something differs for which there is no tolerance."""
    return Difference(worst=0.0, tolerance=0.0, problem=problem)


def _leaf_difference(path: str, actual: Any, wanted: Any) -> Difference:
    if not isinstance(actual, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        same = not isinstance(wanted, torch.Tensor) and not isinstance(actual, torch.Tensor) and actual == wanted
        return _exact(None if same else f"{path} is not what eager gave")
    if (actual.dtype, actual.shape) != (wanted.dtype, wanted.shape):
        sides = f"{actual.dtype} {list(actual.shape)} and eager's {wanted.dtype} {list(wanted.shape)}"
        return _exact(f"{path} is {sides}")
    tolerance = TOLERANCE.get(actual.dtype)
    if tolerance is None or actual.numel() == 0:
        return _exact(None if torch.equal(actual, wanted) else f"{path} differs from eager's")
    wide, eager = actual.double(), wanted.double()
    if not torch.equal(wide.isfinite(), eager.isfinite()):
        return Difference(worst=0.0, tolerance=tolerance, problem=f"{path} is finite elsewhere than eager's")
    scale = eager.abs().nan_to_num(posinf=0, neginf=0).max().item()
    off = (wide - eager).abs().nan_to_num(posinf=0, neginf=0).max().item()
    relative = off / scale if scale else off
    problem = None if relative <= tolerance else f"{path} differs from eager's by {relative:.1e} of its greatest value"
    return Difference(worst=relative, tolerance=tolerance, problem=problem)


def weights_digest(module: torch.nn.Module) -> str:
    """Return a digest of sums over all parameters and buffers: equal where the weights are.

    The sums are of whole numbers, the weights' bits: those of floats depend on how many threads took part.
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
