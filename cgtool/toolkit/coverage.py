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

from cgtool.config import EAGER
from cgtool.plan.records import Plan
from cgtool.plan.shapes import Shape, of_sizes, shape_order, shape_text
from cgtool.store.layout import RankName
from cgtool.store.records import Manifest

#: Of each variant of a plan, the indices of its compiled pieces.
Planned = tuple[frozenset[int], ...]


@dataclass(frozen=True, kw_only=True)
class Place:
    """One compiled piece of one variant on one rank.

    Args:
        rank: Which process of a model-parallel group.
        prefix: Which compiled part of the model.
        variant: Which of the manifest's variants.
        piece_index: Which piece.
        adaptor: What compiled it, for its first shape; "" where nothing is compiled yet.
        serves_all: Whether its one artifact serves every shape, because it runs as it stands.
    """

    rank: int
    prefix: str
    variant: int
    piece_index: int
    adaptor: str
    serves_all: bool = False


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
    """Compiled pieces of a variant that no row names, where no plan says which they are.

    Args:
        count: How many.
    """

    rank: int
    prefix: str
    variant: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What an entry is compiled for.

    Args:
        shapes: Every shape of any variant, in order.
        places: Every compiled piece, by prefix, variant, rank and piece.
        covered: (index into `places`, shape as text) of everything that is served; a place that serves all has every
            shape of its variant here.
        holes: What is missing, in the order of `places` and `shapes`.
        unknown: Pieces that are missing and cannot be named.
    """

    shapes: tuple[Shape, ...]
    places: tuple[Place, ...]
    covered: frozenset[tuple[int, str]]
    holes: tuple[Hole, ...]
    unknown: tuple[UnknownPieces, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return not self.holes and not self.unknown


def planned(plan: Plan) -> Planned:
    """Return which pieces of each variant of a plan are compiled."""
    return tuple(
        frozenset(step.piece for step in variant.steps if step.piece >= 0 and not step.splitting)
        for variant in plan.variants
    )


def entry_coverage(manifests: Sequence[Manifest], *, plans: Mapping[RankName, Planned] | None = None) -> Coverage:
    """Return what the ranks and prefixes of one entry are compiled for.

    Args:
        manifests: Those of one entry, in any order.
        plans: What `planned` says of a manifest's plan, where it was read. With it, pieces without any row are holes,
            and without it they are `unknown`.

    Raises:
        ValueError: The manifests are of several entries, or one is given twice.
    """
    names = [manifest.name for manifest in manifests]
    if len({name.hash for name in names}) > 1 or len(set(names)) != len(names):
        raise ValueError(f"Give each manifest of one entry once, not {[name.flat for name in names]}.")
    groups: dict[tuple[str, int], list[_Part]] = defaultdict(list)
    for manifest in sorted(manifests, key=lambda manifest: (manifest.prefix, manifest.rank)):
        for number in range(len(manifest.variants)):
            groups[manifest.prefix, number].append(_Part(manifest, number, (plans or {}).get(manifest.name)))
    shapes: dict[str, Shape] = {}
    places: list[Place] = []
    covered: set[tuple[int, str]] = set()
    holes: list[Hole] = []
    unknown: list[UnknownPieces] = []
    for (prefix, number), parts in sorted(groups.items(), key=lambda item: item[0]):
        for part in parts:
            wanted = part.shapes_of(parts)
            shapes |= wanted
            pieces, missing = part.pieces_of(parts)
            if missing:
                unknown.append(UnknownPieces(rank=part.rank, prefix=prefix, variant=number, count=missing))
            for piece in pieces:
                place = part.place(piece, wanted)
                there = set(wanted) if place.serves_all else set(part.rows.get(piece, {}))
                # One artifact is all that a piece needs which runs as it stands: that of the base shape, the first.
                needed = list(wanted)[: 1 if piece in part.eager else None]
                holes += [
                    Hole(rank=part.rank, prefix=prefix, variant=number, piece_index=piece, shape=wanted[text])
                    for text in needed
                    if text not in there
                ]
                covered |= {(len(places), text) for text in there}
                places.append(place)
    return Coverage(
        shapes=tuple(_in_order(shapes).values()),
        places=tuple(places),
        covered=frozenset(covered),
        holes=tuple(holes),
        unknown=tuple(unknown),
    )


class _Part:
    """One variant of one manifest: which of its pieces have which shapes."""

    def __init__(self, manifest: Manifest, number: int, plans: Planned | None) -> None:
        self.rank, self.prefix, self.number = manifest.rank, manifest.prefix, number
        self.counts = manifest.variants[number]
        self.plan = plans[number] if plans is not None and number < len(plans) else None
        #: piece → shape as text → adaptor
        self.rows: dict[int, dict[str, str]] = defaultdict(dict)
        base = of_sizes(self.counts.fixed)
        self.shapes = {shape_text(base): base}
        for row in manifest.rows:
            if row.variant == number:
                text = shape_text(row.shape)
                self.shapes[text] = row.shape
                self.rows[row.piece_index].setdefault(text, row.adaptor)
        #: pieces that run as they stand, though the entry's adaptor is another
        self.eager = {
            fallback.piece_index
            for fallback in manifest.fallbacks
            if fallback.variant == number and fallback.adaptor == EAGER != manifest.adaptor
        }

    def shapes_of(self, siblings: Sequence[_Part]) -> dict[str, Shape]:
        """Return the shapes that the same variant has on any rank, itself among the siblings."""
        key = (self.counts.name, self.counts.fixed)
        alike = [part for part in siblings if (part.counts.name, part.counts.fixed) == key]
        return _in_order({text: shape for part in alike for text, shape in part.shapes.items()})

    def pieces_of(self, siblings: Sequence[_Part]) -> tuple[list[int], int]:
        """Return the compiled pieces, and how many more there are that cannot be named."""
        if self.plan is not None:
            return sorted({*self.plan, *self.rows}), 0
        alike = [part for part in siblings if part.counts == self.counts]
        known = {piece for part in (self, *alike) for piece in (*part.rows, *part.eager)}
        return sorted(known), max(0, self.counts.pieces - self.counts.splitting_pieces - len(known))

    def place(self, piece: int, shapes: Mapping[str, Shape]) -> Place:
        own = self.rows.get(piece, {})
        return Place(
            rank=self.rank,
            prefix=self.prefix,
            variant=self.number,
            piece_index=piece,
            adaptor=next((own[text] for text in shapes if text in own), ""),
            serves_all=piece in self.eager and EAGER in own.values(),
        )


def _in_order(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return dict(sorted(shapes.items(), key=lambda item: shape_order(item[1])))
