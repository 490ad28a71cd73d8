"""Seeded inputs of a piece: exact shapes and strides, shared storages, floats of a sane scale, integers in range.

An integer input is taken for an index into whatever dimension: it lies below the smallest static size of a matrix among
the inputs. Where a piece writes by index, its integers differ, for of two writes to one place any may win. Must not
import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cgtool.compiler.proof.reference import short_name, wide_dtype
from cgtool.graph.expressions import evaluate
from cgtool.graph.metas import device_of, dtype_of
from cgtool.plan.pieces import PieceGraph, TensorMeta

#: More numbers than these are the same ones again; a prime, so that no two rows are equal.
_MOST_DRAWN = 1_000_003
#: Storages are rounded up to it, so that they can be looked at as any dtype.
_ALIGNED_BYTES = 16
#: What an integer lies below where no input is a matrix of a static size.
_USUAL_BOUND = 8
_WRITE_BY_INDEX = frozenset({"setitem", "index_put", "index_put_impl", "scatter", "index_copy"})


@dataclass(frozen=True, kw_only=True)
class Style:
    """A way to draw inputs.

    Args:
        positive: Whether floats are all positive.
        unit: Whether floats lie strictly between 0 and 1.
        any_byte: Whether integers of one byte take their whole range, as quantised weights do.
        upper_half: Whether integers lie in the upper half of their range: not every op takes a zero.
        most: What integers lie below.
    """

    positive: bool = False
    unit: bool = False
    any_byte: bool = False
    upper_half: bool = False
    most: int = 1 << 31


#: In the order in which they are tried, until a piece runs and gives no NaN.
STYLES = (
    Style(any_byte=True),
    Style(positive=True),
    Style(unit=True),
    Style(positive=True, upper_half=True),
    Style(positive=True, most=2),
)


@dataclass(frozen=True, kw_only=True)
class _View:
    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Inputs as storages and views of them, so that copies share what the inputs share.

    Args:
        storages: One-dimensional, one for each group of aliases.
        views: One for each input.
    """

    storages: tuple[torch.Tensor, ...]
    views: tuple[_View, ...]

    def tensors(self) -> list[torch.Tensor]:
        """Return the inputs as views of the storages themselves."""
        return [self._view(view) for view in self.views]

    def copy(self) -> Drawn:
        """Return the same inputs in storages of their own."""
        return Drawn(storages=tuple(flat.clone() for flat in self.storages), views=self.views)

    def widened(self) -> Drawn | None:
        """Return a copy with floats in float64; None where one storage holds several dtypes."""
        storages, dtypes = [], []
        for number, flat in enumerate(self.storages):
            kinds = {view.dtype for view in self.views if view.storage == number}
            if len(kinds) > 1:
                return None
            wide = wide_dtype(next(iter(kinds)))
            dtypes.append(wide)
            storages.append(flat.to(wide, copy=True))
        views = tuple(
            _View(storage=v.storage, shape=v.shape, stride=v.stride, dtype=dtypes[v.storage]) for v in self.views
        )
        return Drawn(storages=tuple(storages), views=views)

    def _view(self, view: _View) -> torch.Tensor:
        flat = self.storages[view.storage]
        flat = flat if flat.dtype == view.dtype else flat.view(view.dtype)
        return flat.as_strided(view.shape, view.stride)


def seed_of(graph: PieceGraph, sizes: Mapping[str, int]) -> int:
    """Return a seed that depends on the piece and its sizes alone."""
    number = int(graph.identity()[:15], 16)
    for name in sorted(sizes):
        number = (number * 1_000_003 + sizes[name]) % (1 << 62)
    return number


def index_bound(graph: PieceGraph) -> int:
    """Return what the integers of a piece's inputs lie below."""
    matrix = 2
    sizes = [dim for meta in graph.inputs if len(meta.shape) >= matrix for dim in meta.shape if isinstance(dim, int)]
    return min((size for size in sizes if size > 1), default=_USUAL_BOUND)


def writes_by_index(graph: PieceGraph) -> bool:
    """Return whether integers of a piece's inputs may say where it writes."""
    return any(short_name(node) in _WRITE_BY_INDEX for node in graph.nodes)


def draw(graph: PieceGraph, sizes: Mapping[str, int], *, device_index: int | None, style: Style) -> Drawn:
    """Return inputs for a piece.

    Args:
        graph: The piece.
        sizes: The sizes of its symbols.
        device_index: What a device without an index means; None is the current one.
        style: How to draw.
    """
    generator = torch.Generator("cpu").manual_seed(seed_of(graph, sizes))
    layout = _layout(graph, sizes)
    bound, distinct = min(index_bound(graph), style.most), writes_by_index(graph)
    storages: list[torch.Tensor] = []
    for position, num_bytes in _owners(layout):
        meta, view = graph.inputs[position], layout[position]
        count = num_bytes // view.dtype.itemsize
        if view.dtype == torch.bool or view.dtype.is_floating_point or view.dtype.is_complex:
            flat = _values(meta, view.dtype, count, generator, style)
        else:
            flat = _integers(view, count, generator, style, bound=bound, distinct=distinct)
        storages.append(flat.to(device_of(meta.device, device_index)))
    return Drawn(storages=tuple(storages), views=tuple(layout))


def _layout(graph: PieceGraph, sizes: Mapping[str, int]) -> list[_View]:
    storage_of: dict[int, int] = {}
    for group in graph.aliases:
        storage_of.update(dict.fromkeys(group, group[0]))
    numbers: dict[int, int] = {}
    found = []
    for position, meta in enumerate(graph.inputs):
        first = storage_of.get(position, position)
        found.append(
            _View(
                storage=numbers.setdefault(first, len(numbers)),
                shape=tuple(int(evaluate(dim, sizes)) for dim in meta.shape),
                stride=tuple(int(evaluate(step, sizes)) for step in meta.stride),
                dtype=dtype_of(meta.dtype),
            )
        )
    return found


def _owners(layout: Sequence[_View]) -> list[tuple[int, int]]:
    """Return for each storage the first input in it, and how many bytes it needs."""
    found: dict[int, tuple[int, int]] = {}
    for position, view in enumerate(layout):
        needed = _extent(view.shape, view.stride) * view.dtype.itemsize
        first, most = found.get(view.storage, (position, 0))
        rounded = -(-needed // _ALIGNED_BYTES) * _ALIGNED_BYTES
        found[view.storage] = (first, max(most, rounded))
    return [found[number] for number in sorted(found)]


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _values(meta: TensorMeta, dtype: torch.dtype, count: int, generator: torch.Generator, style: Style) -> torch.Tensor:
    """Return `count` numbers of a dtype that holds no integers."""
    drawn = min(count, _MOST_DRAWN)
    if dtype == torch.bool:
        # mostly true: a mask that hides a whole row tests little
        values = torch.rand(drawn, generator=generator, device="cpu") < 0.75  # noqa: PLR2004 - see above
        values[:1], values[1:2] = True, False
    elif dtype.is_complex:
        values = torch.randn(drawn, generator=generator, dtype=torch.complex64, device="cpu")
    else:
        values = _floats(meta, drawn, generator, style)
    return _repeated(_cast(values, dtype), count)


def _integers(
    view: _View, count: int, generator: torch.Generator, style: Style, *, bound: int, distinct: bool
) -> torch.Tensor:
    """Return `count` integers; distinct ones differ in all of the view, or where it is too long for that, in a row."""
    limits = torch.iinfo(view.dtype)
    if style.any_byte and view.dtype.itemsize == 1:
        low, high = limits.min, limits.max
    else:
        high = min(bound - 1, limits.max)
        low = (high + 1) // 2 if style.upper_half else 0
    span, numel = high + 1 - low, math.prod(view.shape)
    if distinct and numel:
        row = numel if numel <= span else view.shape[-1]
        order = torch.rand(-(-count // row), max(span, row), generator=generator, device="cpu").argsort(dim=1)
        values = low + order[:, :row].reshape(-1)[:count]
    else:
        values = torch.randint(low, high + 1, (min(count, _MOST_DRAWN),), generator=generator, device="cpu")
    return _repeated(_cast(values, view.dtype), count)


def _repeated(values: torch.Tensor, count: int) -> torch.Tensor:
    return values if len(values) == count else values.repeat(-(-count // len(values)))[:count]


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    try:
        return values.to(dtype)
    except (RuntimeError, NotImplementedError):  # a dtype that nothing converts to: its bytes are what counts
        raw = torch.arange(values.numel() * dtype.itemsize, dtype=torch.int64, device="cpu") % 113
        return raw.to(torch.uint8).view(dtype)


def _floats(meta: TensorMeta, count: int, generator: torch.Generator, style: Style) -> torch.Tensor:
    if style.unit:
        return torch.rand(count, generator=generator, dtype=torch.float32, device="cpu") * 0.9 + 0.05
    values = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
    if style.positive:
        values = values.abs() + 0.1
    if any(not isinstance(dim, int) for dim in meta.shape):
        return values
    if len(meta.shape) < 2:  # noqa: PLR2004 - a weight of a norm, a bias or a scale: near one
        return 1 + 0.25 * torch.tanh(values)
    # a matrix: what goes through it keeps its scale
    return values / math.sqrt(max(1, math.prod(int(dim) for dim in meta.shape[1:])))
