"""Which artifacts a plan needs under a configuration: unique pieces by shapes, as data. Must not import torch.

A variant that fixes dimensions is compiled once, for the sizes that it fixes; any other for the general shape, for each
concrete size that it can take, and for each range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cgtool.cache.shapes import Shape, shape_text
from cgtool.config import EAGER, CompilationConfig, resolve_compile_sizes
from cgtool.errors import UsageError
from cgtool.pieces import PieceGraph
from cgtool.plan import Plan, Variant
from cgtool.runtime.shapes import ShapeSpec, base_shape, graph_at, spec_of

_OUTSIDE = "it is outside of what `dynamic` and the model's code allow. Leave it out, or widen `dynamic`."


@dataclass(frozen=True, kw_only=True)
class Work:
    """One artifact that the plan needs.

    Args:
        variant: Which of the plan's variants.
        piece_index: Which piece.
        shape: For which sizes, as the manifest writes them.
        graph: The piece's graph at these sizes.
        adaptor: The adaptor to compile it with.
        max_autotune: Whether the compiler may take its time to find the fastest kernels.
        is_base: Whether it serves every size of its variant, and not a concrete size or a range.
    """

    variant: int
    piece_index: int
    shape: Shape
    graph: PieceGraph
    adaptor: str
    max_autotune: bool
    is_base: bool

    @property
    def place(self) -> tuple[int, int]:
        """The variant and the piece."""
        return self.variant, self.piece_index


def wanted(
    plan: Plan,
    config: CompilationConfig,
    *,
    eager_pieces: Mapping[int, frozenset[int]],
    fallbacks: Mapping[tuple[int, int, str], str] | None = None,
) -> tuple[Work, ...]:
    """Return every artifact that `plan` needs under `config`.

    Args:
        plan: The stitched programs.
        config: Sizes, ranges and the adaptor.
        eager_pieces: By variant, the pieces that must run as they stand.
        fallbacks: (variant, piece, shape as text) → the adaptor that is known to serve it instead.

    Raises:
        UsageError: A size or a range fits no variant, or it is not clear which dimension it speaks of.
    """
    work: list[Work] = []
    known = fallbacks or {}
    for index, variant in enumerate(plan.variants):
        as_it_stands = eager_pieces.get(index, frozenset())
        for spec in shapes_of(plan, variant, config):
            for step in variant.steps:
                if step.splitting or step.piece < 0:
                    continue
                eager = step.piece in as_it_stands
                if eager and spec.shape != base_shape(variant):
                    continue
                work.append(
                    Work(
                        variant=index,
                        piece_index=step.piece,
                        shape=spec.shape,
                        graph=graph_at(plan.graphs[step.graph], step, spec),
                        adaptor=EAGER
                        if eager
                        else known.get((index, step.piece, shape_text(spec.shape)), config.adaptor),
                        max_autotune=spec.max_autotune and not eager,
                        is_base=spec.shape == base_shape(variant),
                    )
                )
    return tuple(work)


def shapes_of(plan: Plan, variant: Variant, config: CompilationConfig) -> Iterator[ShapeSpec]:
    """Yield the shapes that one variant is compiled for.

    Raises:
        UsageError: A size or a range fits no variant, or it is not clear which dimension it speaks of.
    """
    names = dim_names(plan)
    asked = [_named_size(size, names, config) for size in resolve_compile_sizes(config)]
    for sizes in asked:
        _check_served(sizes, plan)
    tuned = any(sizes == dict(variant.fixed) for sizes in asked)
    yield ShapeSpec(shape=base_shape(variant), sizes={}, ranges={}, max_autotune=tuned)
    for sizes in asked:
        if _serves(variant, sizes) and sizes != dict(variant.fixed):
            shape: Shape = next(iter(sizes.values())) if len(names) == 1 else sizes
            yield spec_of(variant, shape, config.size_dim)
    if config.compile_ranges and not names:
        msg = "compile_ranges speaks of sizes, and this model has no dynamic dimension. Leave it out."
        raise UsageError(msg, path="compile_ranges")
    for start, end in config.compile_ranges:
        name = _the_dim(names, config, f"the range [{start}, {end}]")
        if not any(_overlaps(other, name, start, end) for other in plan.variants):
            msg = f"No variant of this model takes {name} from {start} to {end}: {_OUTSIDE}"
            raise UsageError(msg, path="compile_ranges", actual=[start, end])
        if _overlaps(variant, name, start, end):
            yield spec_of(variant, (start, end), name)


def dim_names(plan: Plan) -> tuple[str, ...]:
    """Return the names of all dynamic dimensions of the model, in order of first appearance."""
    names = [name for variant in plan.variants for name in (*variant.dims, *variant.fixed)]
    return tuple(dict.fromkeys(names))


def _named_size(size: int | Mapping[str, int], names: tuple[str, ...], config: CompilationConfig) -> dict[str, int]:
    if isinstance(size, int):
        return {_the_dim(names, config, f"the compile size {size}"): size}
    unknown = sorted(set(size) - set(names))
    if unknown:
        known = ", ".join(names) or "none"
        msg = f"compile_sizes names the dimension {unknown[0]!r}; this model's dynamic dimensions are: {known}."
        raise UsageError(msg, path="compile_sizes", expected=names, actual=dict(size))
    return dict(size)


def _the_dim(names: tuple[str, ...], config: CompilationConfig, what: str) -> str:
    if not names:
        msg = f"This model has no dynamic dimension, so {what} has no meaning. Leave it out, or name one in `dynamic`."
        raise UsageError(msg, path="compile_sizes")
    if len(names) == 1 and config.size_dim in (None, names[0]):
        return names[0]
    if config.size_dim in names:
        return str(config.size_dim)
    if config.size_dim is not None:
        msg = f"size_dim is {config.size_dim!r}; this model's dynamic dimensions are: {', '.join(names)}."
        raise UsageError(msg, path="size_dim", expected=names, actual=config.size_dim)
    example = ", ".join(f'"{name}": 8' for name in names)
    msg = (
        f"This model has {len(names)} dynamic dimensions ({', '.join(names)}), so {what} does not say which it means. "
        f"Name one with size_dim, or give a mapping: {{{example}}}."
    )
    raise UsageError(msg, path="size_dim", expected=names)


def _serves(variant: Variant, sizes: Mapping[str, int]) -> bool:
    """Return whether calls of these sizes belong to `variant`."""
    if any(sizes.get(name) != size for name, size in variant.fixed.items()):
        return False
    return all(name in variant.fixed or _allows(variant, name, size) for name, size in sizes.items())


def _allows(variant: Variant, name: str, size: int) -> bool:
    symbols = {symbol.name: symbol for symbol in variant.symbols}
    carried = [symbols[text] for text in variant.dims.get(name, ()) if text in symbols]
    return bool(carried) and all(s.min <= size and (s.max is None or size <= s.max) for s in carried)


def _overlaps(variant: Variant, name: str, start: int, end: int) -> bool:
    """Return whether `variant` takes some of the sizes from `start` to `end`."""
    symbols = [symbol for symbol in variant.symbols if symbol.name in variant.dims.get(name, ())]
    return bool(symbols) and all(s.min <= end and (s.max is None or start <= s.max) for s in symbols)


def _check_served(sizes: Mapping[str, int], plan: Plan) -> None:
    if not any(_serves(variant, sizes) for variant in plan.variants):
        spelled = ", ".join(f"{name}={size}" for name, size in sizes.items())
        msg = f"No variant of this model takes {spelled}: {_OUTSIDE}"
        raise UsageError(msg, path="compile_sizes", actual=dict(sizes))
