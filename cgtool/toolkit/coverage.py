"""Which pieces of an entry are compiled for which shapes, on which ranks, and where holes are. Must not import torch.

A hole is a shape that a compiled piece lacks though its variant has it: for another piece, or on another rank of the
same prefix. Every variant has its base shape ("general", or the sizes that it fixes). A piece that runs as it stands
(`eager`, though another adaptor was asked for) serves every shape with its one artifact.

A manifest says how many pieces a variant has and not which of them are compiled: the plan does. Without it, pieces are
known by their rows, here or on another rank of the same counts; those that no rank has a row of are only counted.
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

#: Of each variant of a plan, the indices of its compiled pieces.
Planned = tuple[frozenset[int], ...]


@dataclass(frozen=True, kw_only=True)
class Hole:
    """A shape that a piece should be compiled for and is not."""

    rank: int
    prefix: str
    variant: int
    piece_index: int
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class UnknownPieces:
    """How many compiled pieces of a variant no row names, where no plan says which they are."""

    rank: int
    prefix: str
    variant: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """One compiled piece of one variant on one rank: its rows, and which of its variant's shapes it lacks.

    One that runs as it stands serves every shape with its one artifact.
    """

    rank: int
    prefix: str
    variant: int
    piece_index: int
    rows: tuple[Row, ...]
    shapes: tuple[Shape, ...]
    missing: tuple[Shape, ...]
    serves_all: bool = False

    @property
    def adaptor(self) -> str:
        """What compiled it, for its first shape; "" where nothing is compiled yet."""
        return self.rows[0].adaptor if self.rows else ""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What an entry is compiled for: all shapes in order, its pieces, and those missing that cannot be named."""

    shapes: tuple[Shape, ...]
    places: tuple[Place, ...]
    unknown: tuple[UnknownPieces, ...] = ()

    @property
    def holes(self) -> tuple[Hole, ...]:
        """What is missing, in the order of `places` and shapes."""
        return tuple(
            Hole(rank=one.rank, prefix=one.prefix, variant=one.variant, piece_index=one.piece_index, shape=shape)
            for one in self.places
            for shape in one.missing
        )

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return not self.holes and not self.unknown


def planned(plan: Plan) -> Planned:
    """Return which pieces of each variant of a plan are compiled."""
    return tuple(frozenset(step.piece for step in variant.steps if not step.splitting) for variant in plan.variants)


def entry_coverage(manifests: Sequence[Manifest], *, plans: Mapping[RankName, Planned] | None = None) -> Coverage:
    """Return what the ranks and prefixes of one entry are compiled for.

    Where `plans` holds what `planned` says of a manifest's plan, pieces without any row are holes, and else `unknown`.
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
            wanted = part.shapes_of(parts)
            shapes += wanted
            pieces, missing = part.pieces_of(parts)
            where: dict[str, Any] = {"rank": part.rank, "prefix": prefix, "variant": number}
            if missing:
                unknown.append(UnknownPieces(**where, count=missing))
            places += [Place(**where, **part.filled(piece, wanted)) for piece in pieces]
    return Coverage(shapes=distinct_shapes(shapes), places=tuple(places), unknown=tuple(unknown))


class _Part:
    """One variant of one manifest: which of its pieces have which shapes."""

    def __init__(self, manifest: Manifest, number: int, plans: Planned | None) -> None:
        self.rank = manifest.rank
        self.counts = manifest.variants[number]
        self.plan = plans[number] if plans is not None and number < len(plans) else None
        self.rows: dict[int, list[Row]] = defaultdict(list)
        for row in sorted(manifest.rows, key=lambda row: (shape_order(row.shape), row.adaptor)):
            if row.variant == number:
                self.rows[row.piece_index].append(row)
        #: pieces that run as they stand, though the entry's adaptor is another
        self.eager = {
            fallback.piece_index
            for fallback in manifest.fallbacks
            if fallback.variant == number and fallback.adaptor == EAGER != manifest.adaptor
        }

    def shapes_of(self, siblings: Sequence[_Part]) -> tuple[Shape, ...]:
        """Return the shapes that the same variant has on any rank, itself among the siblings, in order."""
        found = [of_sizes(self.counts.fixed)]
        for part in siblings:
            if (part.counts.name, part.counts.fixed) == (self.counts.name, self.counts.fixed):
                found += [row.shape for rows in part.rows.values() for row in rows]
        return distinct_shapes(found)

    def pieces_of(self, siblings: Sequence[_Part]) -> tuple[list[int], int]:
        """Return the compiled pieces, and how many more there are that cannot be named."""
        if self.plan is not None:
            return sorted({*self.plan, *self.rows}), 0
        alike = [part for part in siblings if part.counts == self.counts]
        known = {piece for part in (self, *alike) for piece in (*part.rows, *part.eager)}
        return sorted(known), max(0, self.counts.pieces - self.counts.splitting_pieces - len(known))

    def filled(self, piece: int, shapes: tuple[Shape, ...]) -> dict[str, Any]:
        """Return the fields of a piece's place that say what there is of it."""
        rows = tuple(self.rows.get(piece, ()))
        there = {shape_text(row.shape) for row in rows}
        as_it_stands = piece in self.eager
        serves_all = as_it_stands and any(row.adaptor == EAGER for row in rows)
        # One artifact is all that a piece needs which runs as it stands: that of the base shape, the first.
        needed = () if serves_all else shapes[: 1 if as_it_stands else None]
        missing = tuple(shape for shape in needed if shape_text(shape) not in there)
        return {"piece_index": piece, "rows": rows, "shapes": shapes, "missing": missing, "serves_all": serves_all}
