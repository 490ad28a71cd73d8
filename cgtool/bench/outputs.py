"""A model's outputs, kept as plain bytes and compared with eager's.

Imports torch. On disk, in one folder::

    <name>.json   {"schema": 1, "leaves": [{"path", "dtype", "shape", "offset", "num_bytes"} | {"path", "value"}, ...]}
    <name>.bin    the tensors' bytes one after the other, contiguous
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cgtool.bench.request import read_document, write_document

#: The greatest difference from eager that rounding explains, relative to a tensor's greatest value: fused kernels round
#: at other places, and a deep model carries that on.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How outputs differ from eager's.

    Args:
        worst: The greatest difference of a tensor, relative to its greatest value.
        tolerance: What rounding explains; the widest of the dtypes that are there.
        problem: What is wrong, in a sentence; None where nothing is.
    """

    worst: float
    tolerance: float
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as the answer holds it."""
        return dataclasses.asdict(self)


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
    elif value is None or isinstance(value, torch.Tensor | bool | int | float | str):
        yield path, value
    else:
        yield path, type(value).__qualname__


def save(folder: Path, name: str, output: Any) -> None:
    """Keep an output as the reference of that name."""
    rows: list[dict[str, Any]] = []
    data = bytearray()
    for path, leaf in leaves_of(output):
        if isinstance(leaf, torch.Tensor):
            raw = _bytes_of(leaf)
            rows.append(
                {
                    "path": path,
                    "dtype": str(leaf.dtype).removeprefix("torch."),
                    "shape": list(leaf.shape),
                    "offset": len(data),
                    "num_bytes": len(raw),
                }
            )
            data += raw
        else:
            rows.append({"path": path, "value": leaf})
    (folder / f"{name}.bin").write_bytes(data)
    write_document(folder / f"{name}.json", {"leaves": rows})


def compare(folder: Path, name: str, output: Any) -> Difference | None:
    """Return how an output differs from the reference of that name; None where there is no such reference."""
    if not (folder / f"{name}.json").is_file():
        return None
    rows = read_document(folder / f"{name}.json")["leaves"]
    data = bytearray((folder / f"{name}.bin").read_bytes())
    actual = dict(leaves_of(output))
    if list(actual) != [row["path"] for row in rows]:
        return Difference(worst=0.0, tolerance=0.0, problem="its parts are others than eager's")
    worst, tolerance, problem = 0.0, 0.0, None
    for row in rows:
        found = _leaf_difference(actual[row["path"]], row, data)
        worst, tolerance = max(worst, found.worst), max(tolerance, found.tolerance)
        problem = problem or found.problem
    return Difference(worst=worst, tolerance=tolerance, problem=problem)


def _leaf_difference(leaf: Any, row: Mapping[str, Any], data: bytearray) -> Difference:
    path = row["path"]
    if not isinstance(leaf, torch.Tensor) or "dtype" not in row:
        same = "value" in row and leaf == row["value"]
        return Difference(worst=0.0, tolerance=0.0, problem=None if same else f"{path} is not what eager gave")
    dtype = getattr(torch, row["dtype"])
    if leaf.dtype != dtype or list(leaf.shape) != row["shape"]:
        words = f"{path} is {leaf.dtype} {list(leaf.shape)} and eager's {dtype} {row['shape']}"
        return Difference(worst=0.0, tolerance=0.0, problem=words)
    if leaf.numel() == 0:
        return Difference(worst=0.0, tolerance=0.0)
    count = leaf.numel()
    expected = torch.frombuffer(data, dtype=dtype, count=count, offset=row["offset"]).reshape(leaf.shape)
    return _tensor_difference(path, leaf.detach().cpu(), expected)


def _tensor_difference(path: str, actual: torch.Tensor, expected: torch.Tensor) -> Difference:
    if expected.dtype not in TOLERANCE:
        same = torch.equal(actual, expected)
        return Difference(worst=0.0, tolerance=0.0, problem=None if same else f"{path} differs from eager's")
    tolerance = TOLERANCE[expected.dtype]
    wide, wanted = actual.double(), expected.double()
    if not torch.equal(wide.isfinite(), wanted.isfinite()):
        return Difference(worst=0.0, tolerance=tolerance, problem=f"{path} is finite elsewhere than eager's")
    scale = wanted.abs().nan_to_num(posinf=0, neginf=0).max().item()
    off = (wide - wanted).abs().nan_to_num(posinf=0, neginf=0).max().item()
    relative = off / scale if scale else off
    problem = None if relative <= tolerance else f"{path} differs from eager's by {relative:.1e} of its greatest value"
    return Difference(worst=relative, tolerance=tolerance, problem=problem)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""
