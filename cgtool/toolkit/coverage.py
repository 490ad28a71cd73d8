"""Which pieces of an entry are compiled for which shapes, on which ranks, and where holes are. Must not import torch.

A hole is a shape that a compiled piece lacks although its variant has it for another piece, or on another rank of the
same prefix. Every variant has its base shape ("general", or the sizes that it fixes). A piece that runs eagerly as a
fallback from another adaptor serves every shape with its one artifact.

A manifest states how many pieces a variant has; only the plan states which of them are compiled. Without a plan, the
compiled pieces are those with rows, on this rank or on another rank with the same counts. Pieces without a row on any
rank are only counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cgtool.plan.pieces import EAGER
from cgtool.plan.records import Plan
from cgtool.plan.shapes import Shape, distinct_shapes, of_sizes, shape_order, shape_text
from cgtool.store.layout import RankName
from cgtool.store.records import Manifest, Row

#: The indices of the compiled pieces of each variant of a plan.
Planned = tuple[frozenset[int], ...]


@dataclass(frozen=True, kw_only=True)
class Hole:
    """A shape that a piece is not compiled for and should be."""

    rank: int
    prefix: str
    variant: int
    piece_index: int
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class UnknownPieces:
    """The number of pieces of a variant that have no row, and whose indices are unknown without a plan."""

    rank: int
    prefix: str
    variant: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """One compiled piece of one variant on one rank: its rows and the shapes that it lacks."""

    rank: int
    prefix: str
    variant: int
    piece_index: int
    rows: tuple[Row, ...]
    #: All shapes of its variant.
    shapes: tuple[Shape, ...]
    missing: tuple[Shape, ...]
    #: It runs eagerly, and its one artifact serves every shape.
    serves_all: bool = False

    @property
    def adaptor(self) -> str:
        """The adaptor of its first shape; "" if nothing is compiled yet."""
        return self.rows[0].adaptor if self.rows else ""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The shapes of an entry in order, its pieces, and the number of missing pieces whose indices are unknown."""

    shapes: tuple[Shape, ...]
    places: tuple[Place, ...]
    unknown: tuple[UnknownPieces, ...] = ()

    @property
    def holes(self) -> tuple[Hole, ...]:
        """The missing shapes, in the order of `places` and shapes."""
        return tuple(
            Hole(
                rank=place.rank,
                prefix=place.prefix,
                variant=place.variant,
                piece_index=place.piece_index,
                shape=shape,
            )
            for place in self.places
            for shape in place.missing
        )

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return not self.holes and not self.unknown


def planned(plan: Plan) -> Planned:
    """Return the indices of the compiled pieces of each variant."""
    return tuple(frozenset(step.piece for step in variant.steps if not step.splitting) for variant in plan.variants)


def entry_coverage(manifests: Sequence[Manifest], *, plans: Mapping[RankName, Planned] | None = None) -> Coverage:
    """Return the coverage of the ranks and prefixes of one entry.

    `plans` holds the result of `planned` by rank and prefix. A piece without a row is a hole if its plan is given;
    otherwise it is counted in `unknown`.
    """
    names = [manifest.name for manifest in manifests]
    if len({name.hash for name in names}) > 1 or len(set(names)) != len(names):
        raise ValueError(f"Give each manifest of one entry once, not {[name.flat for name in names]}.")
    groups: dict[tuple[str, int], list[_Part]] = defaultdict(list)
    for manifest in sorted(manifests, key=lambda manifest: (manifest.prefix, manifest.rank)):
        for number in range(len(manifest.variants)):
            groups[manifest.prefix, number].append(_Part(manifest, number, (plans or {}).get(manifest.name)))
    shapes: list[Shape] = []
    places: list[Place] = []
    unknown: list[UnknownPieces] = []
    for (prefix, number), parts in sorted(groups.items(), key=lambda item: item[0]):
        for part in parts:
            part_shapes = part.shapes_of(parts)
            shapes += part_shapes
            pieces, missing = part.pieces_of(parts)
            where: dict[str, Any] = {"rank": part.rank, "prefix": prefix, "variant": number}
            if missing:
                unknown.append(UnknownPieces(**where, count=missing))
            places += [Place(**where, **part.place_fields(piece, part_shapes)) for piece in pieces]
    return Coverage(shapes=distinct_shapes(shapes), places=tuple(places), unknown=tuple(unknown))


class _Part:
    """One variant of one manifest: the rows of its pieces."""

    def __init__(self, manifest: Manifest, number: int, plans: Planned | None) -> None:
        self.rank = manifest.rank
        self.counts = manifest.variants[number]
        self.plan = plans[number] if plans is not None and number < len(plans) else None
        self.rows: dict[int, list[Row]] = defaultdict(list)
        for row in sorted(manifest.rows, key=lambda row: (shape_order(row.shape), row.adaptor)):
            if row.variant == number:
                self.rows[row.piece_index].append(row)
        #: Pieces that run eagerly in an entry of another adaptor.
        self.eager = {
            fallback.piece_index
            for fallback in manifest.fallbacks
            if fallback.variant == number and fallback.adaptor == EAGER != manifest.adaptor
        }

    def shapes_of(self, siblings: Sequence[_Part]) -> tuple[Shape, ...]:
        """Return the shapes that the same variant has on any rank, in order; `siblings` include this part."""
        shapes = [of_sizes(self.counts.fixed)]
        for part in siblings:
            if (part.counts.name, part.counts.fixed) == (self.counts.name, self.counts.fixed):
                shapes += [row.shape for rows in part.rows.values() for row in rows]
        return distinct_shapes(shapes)

    def pieces_of(self, siblings: Sequence[_Part]) -> tuple[list[int], int]:
        """Return the known compiled pieces and the number of unknown ones."""
        if self.plan is not None:
            return sorted({*self.plan, *self.rows}), 0
        alike = [part for part in siblings if part.counts == self.counts]
        known = {piece for part in (self, *alike) for piece in (*part.rows, *part.eager)}
        return sorted(known), max(0, self.counts.pieces - self.counts.splitting_pieces - len(known))

    def place_fields(self, piece: int, shapes: tuple[Shape, ...]) -> dict[str, Any]:
        """Return the fields of a piece's `Place` that depend on its rows."""
        rows = tuple(self.rows.get(piece, ()))
        compiled = {shape_text(row.shape) for row in rows}
        is_eager = piece in self.eager
        serves_all = is_eager and any(row.adaptor == EAGER for row in rows)
        # An eager piece needs one artifact, that of the base shape, which comes first.
        needed = () if serves_all else shapes[: 1 if is_eager else None]
        missing = tuple(shape for shape in needed if shape_text(shape) not in compiled)
        return {"piece_index": piece, "rows": rows, "shapes": shapes, "missing": missing, "serves_all": serves_all}
