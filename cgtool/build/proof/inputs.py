"""Seeded inputs of a piece: exact shapes and strides, shared storages, floats of a sane scale, integers in range.

Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cgtool.build.proof.bounds import OutOfRangeError, Range, index_ranges, is_integer
from cgtool.graph.expressions import evaluate
from cgtool.graph.metas import device_of, dtype_of
from cgtool.pieces import PieceGraph, TensorMeta

#: More numbers than these are the same ones again; a prime, so that no two rows are equal.
_MOST_DRAWN = 1_000_003
#: Storages are rounded up to it, so that they can be looked at as any dtype.
_ALIGNED_BYTES = 16
#: How often a piece is watched until its integers are in range.
_NUM_LOOKS = 8
#: What an integer may be that nothing bounds.
_SAFE = 8


@dataclass(frozen=True, kw_only=True)
class Style:
    """A way to draw inputs.

    Args:
        name: For a record.
        positive: Whether floats are all positive.
        unit: Whether floats lie strictly between 0 and 1.
        most: The largest integer where nothing bounds it more; None is `_SAFE` and the whole range of bytes.
        least: The smallest integer.
    """

    name: str
    positive: bool = False
    unit: bool = False
    most: int | None = None
    least: int = 0


STYLES = (
    Style(name="normal"),
    Style(name="positive", positive=True),
    Style(name="between 0 and 1", unit=True),
    Style(name="integers 1 to 3", positive=True, least=1, most=3),
    Style(name="integers 0 and 1", positive=True, most=1),
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


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for every float, complex128 for every complex dtype, and others as they are."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def seed_of(graph: PieceGraph, sizes: Mapping[str, int]) -> int:
    """Return a seed that depends on the piece and its sizes alone."""
    number = int(graph.identity()[:15], 16)
    for name in sorted(sizes):
        number = (number * 1_000_003 + sizes[name]) % (1 << 62)
    return number


def draw(graph: PieceGraph, sizes: Mapping[str, int], *, device_index: int | None, style: Style) -> Drawn:
    """Return inputs for a piece.

    Args:
        graph: The piece.
        sizes: The sizes of its symbols.
        device_index: What a device without an index means; None is the current one.
        style: How to draw.

    Raises:
        Exception: Whatever an op raises as the bounds of integers are looked for.
    """
    generator = torch.Generator("cpu").manual_seed(seed_of(graph, sizes))
    layout = _layout(graph, sizes)
    ranges = _ranges(graph, layout, device_index)
    storages: list[torch.Tensor] = []
    owners = _owners(layout)
    for position, num_bytes in owners:
        meta, view = graph.inputs[position], layout[position]
        count = num_bytes // view.dtype.itemsize
        bound = ranges.get(position)
        flat = _values(meta, view, count, generator=generator, style=style, bound=bound)
        if bound is not None and bound.distinct_along is not None:
            _make_distinct(flat, view, bound, generator)
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


def _ranges(graph: PieceGraph, layout: Sequence[_View], device_index: int | None) -> dict[int, Range]:
    ranges = {n: Range() for n, view in enumerate(layout) if is_integer(view.dtype)}
    failure: Exception | None = None
    for _ in range(_NUM_LOOKS if ranges else 0):
        try:
            index_ranges(graph, _constant_inputs(graph, layout, ranges, device_index), ranges)
        except OutOfRangeError:
            continue
        except Exception as error:  # whatever an op says to values that it does not take
            if failure is not None:
                raise
            failure = error
            for found in ranges.values():  # not all ops take zeros
                found.low = max(found.low, 1)
        else:
            break
    return _of_groups(graph, ranges)


def _constant_inputs(
    graph: PieceGraph, layout: Sequence[_View], ranges: Mapping[int, Range], device_index: int | None
) -> list[torch.Tensor]:
    found = []
    for number, (meta, view) in enumerate(zip(graph.inputs, layout, strict=True)):
        device = device_of(meta.device, device_index)
        tensor = torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device=device)
        # a view that overlaps itself cannot be filled; its whole storage can
        flat = torch.as_strided(tensor, (_extent(view.shape, view.stride),), (1,))
        flat.fill_(ranges[number].low if number in ranges else 0)
        found.append(tensor)
    return found


def _of_groups(graph: PieceGraph, found: dict[int, Range]) -> dict[int, Range]:
    """Give inputs that share one storage the range that suits all of them."""
    for group in graph.aliases:
        members = [found[n] for n in group if n in found]
        if members:
            highs = [m.high for m in members if m.high is not None]
            joint = Range(
                low=max(m.low for m in members),
                high=min(highs) if highs else None,
                distinct_along=next((m.distinct_along for m in members if m.distinct_along is not None), None),
            )
            found.update(dict.fromkeys((n for n in group if n in found), joint))
    return found


def _values(
    meta: TensorMeta, view: _View, count: int, *, generator: torch.Generator, style: Style, bound: Range | None
) -> torch.Tensor:
    """Return `count` numbers of the input's dtype."""
    dtype = view.dtype
    drawn = min(count, _MOST_DRAWN)
    if dtype == torch.bool:
        # mostly true: a mask that hides a whole row tests little
        values = torch.rand(drawn, generator=generator, device="cpu") < 0.75  # noqa: PLR2004 - see above
        values[:1], values[1:2] = True, False
    elif dtype.is_complex:
        values = torch.randn(drawn, generator=generator, dtype=torch.complex64, device="cpu")
    elif dtype.is_floating_point:
        values = _floats(meta, drawn, generator, style)
    else:
        low, high = _integer_ends(dtype, bound, style)
        values = torch.randint(low, high + 1, (drawn,), generator=generator, dtype=torch.int64, device="cpu")
    values = _cast(values, dtype)
    if count > drawn:
        values = values.repeat(-(-count // drawn))[:count]
    return values


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


def _integer_ends(dtype: torch.dtype, bound: Range | None, style: Style) -> tuple[int, int]:
    limits = torch.iinfo(dtype)
    low, high = (bound.low, bound.high) if bound is not None else (0, None)
    if high is None:
        if dtype.itemsize == 1 and style.most is None:  # quantised weights
            low, high = limits.min, limits.max
        else:
            low, high = max(low, style.least), max(low, style.most if style.most is not None else _SAFE - 1)
    elif style.most is not None:
        low, high = max(low, min(style.least, high)), min(high, max(low, style.most))
    low, high = max(low, limits.min), min(high, limits.max)
    return low, max(low, high)


def _make_distinct(flat: torch.Tensor, view: _View, bound: Range, generator: torch.Generator) -> None:
    """Give places that are written to different numbers, for of two writes to one place any may win."""
    if bound.high is None or not view.shape:
        return
    span = bound.high - bound.low + 1
    target = flat.as_strided(view.shape, view.stride)
    if span >= target.numel():
        target.copy_(
            bound.low + torch.randperm(span, generator=generator, device="cpu")[: target.numel()].reshape(view.shape)
        )
        return
    dim = bound.distinct_along or 0
    if span >= view.shape[dim]:
        order = torch.rand((*view.shape[:dim], span, *view.shape[dim:][1:]), generator=generator, device="cpu").argsort(
            dim
        )
        target.copy_(bound.low + order.narrow(dim, 0, view.shape[dim]))
