"""Seeded inputs for a piece: exact shapes and strides, shared storages, floats of a reasonable scale, valid integers.

An integer input may be an index into any dimension, so its values lie below the smallest static size of any matrix
among the inputs. If a piece writes by index, its integers are distinct, because the order of two writes to the same
place is undefined. Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cgtool.compiler.proof.reference import eps_of, short_name, wide_dtype
from cgtool.graph.expressions import evaluate
from cgtool.graph.values import device_of, dtype_of
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json, PieceGraph, TensorMeta

#: At most this many numbers are drawn, and then repeated; a prime, so that no two rows are equal.
_MAX_DRAWN = 1_000_003
#: Storage sizes are rounded up to a multiple of this, so that they can be viewed as any dtype.
_ALIGNED_BYTES = 16
#: The bound of integers if no input is a matrix of a static size.
_USUAL_BOUND = 8
_WRITE_BY_INDEX = frozenset({"setitem", "index_put", "index_put_impl", "scatter", "index_copy"})


@dataclass(frozen=True, kw_only=True)
class Style:
    """A way to draw inputs.

    Args:
        positive: Whether all floats are positive.
        unit: Whether floats lie strictly between 0 and 1.
        any_byte: Whether integers of one byte take their whole range, as quantized weights do.
        upper_half: Whether integers lie in the upper half of their range, for ops that do not accept zero.
        most: The exclusive upper bound of integers.
    """

    positive: bool = False
    unit: bool = False
    any_byte: bool = False
    upper_half: bool = False
    most: int = 1 << 31


#: Tried in this order, until a piece runs and returns no NaN.
STYLES = (
    Style(any_byte=True),
    Style(positive=True),
    Style(unit=True),
    Style(positive=True, upper_half=True),
    Style(positive=True, most=2),
)


class _View(NamedTuple):
    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The number of bytes of its storage that it spans."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (1 + last) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Inputs as storages and views of them, so that copies alias as the inputs do.

    Args:
        storages: One-dimensional tensors, one for each group of aliases.
        views: One for each input.
    """

    storages: tuple[torch.Tensor, ...]
    views: tuple[_View, ...]

    def tensors(self) -> list[torch.Tensor]:
        """Return the inputs as views of the storages themselves."""
        return [self.storages[v.storage].view(v.dtype).as_strided(v.shape, v.stride) for v in self.views]

    def copy(self) -> Drawn:
        """Return the same inputs in new storages."""
        return Drawn(storages=tuple(flat.clone() for flat in self.storages), views=self.views)

    def widened(self) -> Drawn | None:
        """Return a copy with floats in float64; None if a storage is viewed as several dtypes."""
        if any(view.dtype != self.storages[view.storage].dtype for view in self.views):
            return None
        return Drawn(
            storages=tuple(flat.to(wide_dtype(flat.dtype), copy=True) for flat in self.storages),
            views=tuple(view._replace(dtype=wide_dtype(view.dtype)) for view in self.views),
        )


def index_bound(graph: PieceGraph) -> int:
    """Return the exclusive upper bound of the integers in a piece's inputs."""
    matrix = 2
    sizes = [dim for meta in graph.inputs if len(meta.shape) >= matrix for dim in meta.shape if isinstance(dim, int)]
    return min((size for size in sizes if size > 1), default=_USUAL_BOUND)


def writes_by_index(graph: PieceGraph) -> bool:
    """Return whether a piece writes at indices, which may come from its inputs."""
    return any(short_name(node) in _WRITE_BY_INDEX for node in graph.every_node())


def draw(graph: PieceGraph, sizes: Mapping[str, int], *, device_index: int | None, style: Style) -> Drawn:
    """Return inputs for a piece; the same piece and sizes always get the same inputs."""
    generator = torch.Generator("cpu").manual_seed(int(digest_of([graph.identity(), dict(sizes)])[:15], 16))
    views = _views(graph, sizes)
    bound, distinct = index_bound(graph), writes_by_index(graph)
    owners: dict[int, int] = {}  # storage → the first input in it, in order
    for position, view in enumerate(views):
        owners.setdefault(view.storage, position)
    storages = []
    for number, position in owners.items():
        meta, view = graph.inputs[position], views[position]
        needed = max(other.num_bytes for other in views if other.storage == number)
        device = device_of(meta.device, device_index)
        storages.append(_storage(meta, view, needed, device, generator, style=style, bound=bound, distinct=distinct))
    return Drawn(storages=tuple(storages), views=views)


def draw_storage(
    meta: TensorMeta, num_bytes: int, device: torch.device, *, seed: Json, style: Style, bound: int
) -> torch.Tensor:
    """Return a flat tensor of at least `num_bytes` as storage for a static tensor; its integers lie below `bound`."""
    generator = torch.Generator("cpu").manual_seed(int(digest_of(seed)[:15], 16))
    shape, stride = tuple(map(int, meta.shape)), tuple(map(int, meta.stride))
    view = _View(storage=0, shape=shape, stride=stride, dtype=dtype_of(meta.dtype))
    return _storage(meta, view, num_bytes, device, generator, style=style, bound=bound, distinct=False)


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the same layout whose elements are one rounding of `dtype` larger or smaller."""
    factors = _repeated(_factors(dtype, tensor.device)[: tensor.numel()], tensor.numel())
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return out.copy_(tensor.double() * factors.reshape(tensor.shape))


@functools.lru_cache(maxsize=4)
def _factors(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return factors that move a number one rounding up or down; cached, since large models have many tensors."""
    generator = torch.Generator("cpu").manual_seed(_MAX_DRAWN)
    signs = torch.randint(0, 2, (_MAX_DRAWN,), generator=generator, device="cpu", dtype=torch.float32) * 2 - 1
    return (1 + eps_of(dtype) * signs.double()).to(device)


def _storage(
    meta: TensorMeta,
    view: _View,
    num_bytes: int,
    device: torch.device,
    generator: torch.Generator,
    *,
    style: Style,
    bound: int,
    distinct: bool,
) -> torch.Tensor:
    """Return a storage of at least `num_bytes`, filled with numbers for `view`, its first tensor."""
    count = -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES // view.dtype.itemsize
    if view.dtype == torch.bool or view.dtype.is_floating_point or view.dtype.is_complex:
        values = _values(meta, view.dtype, min(count, _MAX_DRAWN), generator, style)
    else:
        values = _integers(view, count, generator, style, bound=min(bound, style.most), distinct=distinct)
    return _repeated(_cast(values, view.dtype).to(device), count)


def _repeated(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` numbers, repeating `values` if there are fewer."""
    return values.repeat(-(-count // len(values)))[:count] if 0 < len(values) < count else values


def _views(graph: PieceGraph, sizes: Mapping[str, int]) -> tuple[_View, ...]:
    first_of = {position: group[0] for group in graph.aliases for position in group}
    numbers: dict[int, int] = {}
    return tuple(
        _View(
            storage=numbers.setdefault(first_of.get(position, position), len(numbers)),
            shape=tuple(int(evaluate(dim, sizes)) for dim in meta.shape),
            stride=tuple(int(evaluate(step, sizes)) for step in meta.stride),
            dtype=dtype_of(meta.dtype),
        )
        for position, meta in enumerate(graph.inputs)
    )


def _values(meta: TensorMeta, dtype: torch.dtype, count: int, generator: torch.Generator, style: Style) -> torch.Tensor:
    """Return `count` numbers for a dtype that is not an integer type."""
    if dtype == torch.bool:
        # mostly true, since a mask that hides a whole row tests little
        flags = torch.rand(count, generator=generator, device="cpu") < 0.75  # noqa: PLR2004 - see above
        flags[:1], flags[1:2] = True, False
        return flags
    if dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=torch.complex64, device="cpu")
    if style.unit:
        return torch.rand(count, generator=generator, dtype=torch.float32, device="cpu") * 0.9 + 0.05
    values = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
    if style.positive:
        values = values.abs() + 0.1
    if any(not isinstance(dim, int) for dim in meta.shape):
        return values
    if len(meta.shape) < 2:  # noqa: PLR2004 - a weight of a norm, a bias or a scale: near one
        return 1 + 0.25 * torch.tanh(values)
    # a matrix: scaled so that values keep their magnitude through it
    return values / math.sqrt(max(1, math.prod(int(dim) for dim in meta.shape[1:])))


def _integers(
    view: _View, count: int, generator: torch.Generator, style: Style, *, bound: int, distinct: bool
) -> torch.Tensor:
    """Return integers; with `distinct`, all elements of the view differ, or those of each row if it is too long."""
    limits = torch.iinfo(view.dtype)
    if style.any_byte and view.dtype.itemsize == 1:
        low, high = limits.min, limits.max
    else:
        high = min(bound - 1, limits.max)
        low = (high + 1) // 2 if style.upper_half else 0
    span, numel = high + 1 - low, math.prod(view.shape)
    if not (distinct and numel):
        return torch.randint(low, high + 1, (min(count, _MAX_DRAWN),), generator=generator, device="cpu")
    row = numel if numel <= span else view.shape[-1]
    order = torch.rand(-(-count // row), max(span, row), generator=generator, device="cpu").argsort(dim=1)
    return low + order[:, :row].reshape(-1)[:count]


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    try:
        return values.to(dtype)
    except (RuntimeError, NotImplementedError):  # nothing converts to this dtype: fill its bytes
        raw = torch.arange(values.numel() * dtype.itemsize, dtype=torch.int64, device="cpu") % 113
        return raw.to(torch.uint8).view(dtype)
