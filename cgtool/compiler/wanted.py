"""The artifacts that a plan needs under a configuration: pieces by shapes, as data. Must not import torch.

A variant that fixes dimensions is compiled once, for the sizes that it fixes; any other variant is compiled for the
general shape, for each concrete size that it accepts, and for each range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cgtool.config import CompilationConfig, resolve_compile_sizes
from cgtool.config_values import CompilationLevel
from cgtool.errors import UsageError
from cgtool.model import ModelSpec
from cgtool.plan.pieces import EAGER, PieceGraph
from cgtool.plan.records import Plan, Step, Variant
from cgtool.plan.shapes import Shape, is_size, of_sizes, shape_text
from cgtool.runtime.dispatch import graph_at, symbol_bounds
from cgtool.store.artifacts import Origin
from cgtool.store.records import Artifact, Fallback, Manifest, Row


@dataclass(frozen=True, kw_only=True)
class Work:
    """One artifact that a plan needs: a piece of a variant, for a shape, compiled by an adaptor."""

    variant: int
    piece_index: int
    shape: Shape
    #: The identity of the piece.
    piece: str
    #: The piece's graph at these sizes.
    graph: PieceGraph
    adaptor: str
    #: Whether the compiler autotunes kernels.
    tuned: bool
    #: Whether the artifact serves every size of its variant, not only a concrete size or a range.
    is_base: bool

    @property
    def origin(self) -> Origin:
        """The source that is recorded in the artifact."""
        return Origin(piece=self.piece, shape=self.shape)

    @property
    def place(self) -> tuple[int, int]:
        """The variant and the piece."""
        return self.variant, self.piece_index

    def row(self, adaptor: str, artifact: Artifact) -> Row:
        """Return the manifest's row for this work as compiled by `adaptor`."""
        return Row(
            variant=self.variant,
            piece_index=self.piece_index,
            shape=self.shape,
            adaptor=adaptor,
            tuned=self.tuned,
            artifact=artifact,
        )

    def fallback(self, adaptor: str, reason: str) -> Fallback:
        """Return the record that `adaptor` serves this work instead of the requested adaptor."""
        return Fallback(
            variant=self.variant, piece_index=self.piece_index, shape=self.shape, adaptor=adaptor, reason=reason
        )

    def row_in(self, manifest: Manifest) -> Row | None:
        """Return the manifest's row for this work, if there is one."""
        return manifest.row(
            variant=self.variant,
            shape=self.shape,
            piece_index=self.piece_index,
            adaptor=self.adaptor,
            tuned=self.tuned,
        )


def leveled(config: CompilationConfig, spec: ModelSpec) -> CompilationConfig:
    """Return the configuration with its level expanded, and the model's splitting ops if it sets none itself.

    Raises:
        UsageError: The level is 0, at which nothing is compiled.
    """
    if config.effective_level == CompilationLevel.NO_COMPILATION:
        msg = "Level 0 runs the model eagerly, so there is nothing to compile. Choose level 1, 2 or 3."
        raise UsageError(msg, path="level", actual=0)
    config = config.leveled()
    if config.splitting_ops is None and spec.splitting_ops is not None:
        return config.replace(splitting_ops=tuple(spec.splitting_ops))
    return config


def wanted(
    plan: Plan, config: CompilationConfig, fallbacks: Iterable[Fallback] = (), *, is_whole: bool = True
) -> tuple[Work, ...]:
    """Return every artifact that `plan` needs under `config`.

    A piece that `fallbacks` list as eager runs eagerly at every size, so one artifact serves all of them. If the plan
    is not whole yet (`is_whole`), a size may fit none of its variants.

    Raises:
        UsageError: A size or a range fits no variant, or its dimension is ambiguous.
    """
    known = {fallback.place: fallback.adaptor for fallback in fallbacks}
    eager_places = {place[:2] for place, adaptor in known.items() if adaptor == EAGER}
    requested = _requested_shapes(plan, config, is_whole=is_whole)
    work = []
    for index, variant in enumerate(plan.variants):
        for shape, tuned in _shapes_of(variant, requested):
            for step in variant.steps:
                eager = (index, step.piece) in eager_places
                if step.splitting or (eager and shape != of_sizes(variant.fixed)):
                    continue
                adaptor = EAGER if eager else known.get((index, step.piece, shape_text(shape)), config.adaptor)
                work.append(work_at(plan, index, step, shape, adaptor=adaptor, tuned=tuned and not eager))
    return tuple(work)


def work_at(plan: Plan, variant: int, step: Step, shape: Shape, *, adaptor: str, tuned: bool) -> Work:
    """Return the work for one piece at one shape."""
    program = plan.variants[variant]
    return Work(
        variant=variant,
        piece_index=step.piece,
        shape=shape,
        piece=step.graph,
        graph=graph_at(plan.graphs[step.graph], step, symbol_bounds(program, shape)),
        adaptor=adaptor,
        tuned=tuned,
        is_base=shape == of_sizes(program.fixed),
    )


def _requested_shapes(plan: Plan, config: CompilationConfig, *, is_whole: bool) -> tuple[Shape, ...]:
    """Return the configured sizes and ranges, by dimension name."""
    names = tuple(dict.fromkeys(name for variant in plan.variants for name in (*variant.dims, *variant.fixed)))
    requested: dict[str, Shape] = {}
    for size in resolve_compile_sizes(config):
        shape = of_sizes(_named_size(size, names, config))
        # capture sizes that the model does not accept are skipped
        if is_whole and size in (config.compile_sizes or ()):
            _check_served(shape, plan, "compile_sizes")
        requested[shape_text(shape)] = shape
    if config.compile_ranges and not names:
        msg = "compile_ranges needs a dynamic dimension, and this model has none. Leave it out."
        raise UsageError(msg, path="compile_ranges")
    for start, end in config.compile_ranges:
        shape = {_the_dim(names, config, f"the range [{start}, {end}]"): (start, end)}
        requested[shape_text(shape)] = shape
        if is_whole:
            _check_served(shape, plan, "compile_ranges")
    return tuple(requested.values())


def _shapes_of(variant: Variant, requested: Iterable[Shape]) -> Iterator[tuple[Shape, bool]]:
    """Yield the shapes that one variant is compiled for, each with whether it is autotuned."""
    base = of_sizes(variant.fixed)
    yield base, base in requested and bool(base)
    for shape in requested:
        if shape != base and _serves(variant, shape):
            yield {**base, **shape}, is_size(shape)


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
        msg = f"This model has no dynamic dimension, so {what} cannot apply. Leave it out, or name one in `dynamic`."
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
        f"This model has {len(names)} dynamic dimensions ({', '.join(names)}), so {what} is ambiguous. "
        f"Name a dimension with size_dim, or give a mapping: {{{example}}}."
    )
    raise UsageError(msg, path="size_dim", expected=names)


def _serves(variant: Variant, shape: Shape) -> bool:
    """Return whether `variant` serves calls of this shape; a size must name every dimension that the variant fixes."""
    for name, size in variant.fixed.items():
        if shape.get(name, None if is_size(shape) else (size, size)) != (size, size):
            return False
    for name in shape.keys() - variant.fixed.keys():
        low, high = shape[name]
        carried = [symbol for symbol in variant.symbols if symbol.name in variant.dims.get(name, ())]
        if not carried or any(s.min > high or (s.max is not None and low > s.max) for s in carried):
            return False
    return True


def _check_served(shape: Shape, plan: Plan, field: str) -> None:
    if not any(_serves(variant, shape) for variant in plan.variants):
        raise UsageError(
            f"No variant of this model accepts {shape_text(shape)}: `dynamic` or the model's code excludes it. Leave "
            "it out, or widen `dynamic`.",
            path=field,
            actual=shape_text(shape),
        )
