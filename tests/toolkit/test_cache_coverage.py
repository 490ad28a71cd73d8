from __future__ import annotations

import pytest
from cache_maker import manifest_of
from cache_samples import sample_key
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgtool.plan.shapes import parse_shape, shape_text
from cgtool.store.layout import RankName
from cgtool.store.records import Artifact, Fallback, Manifest, Row, VariantCounts
from cgtool.toolkit.coverage import Coverage, Hole, UnknownPieces, entry_coverage

COUNTS = VariantCounts(name="default", pieces=5, splitting_pieces=2, unique_pieces=3)
DECODE = VariantCounts(name="default", pieces=5, splitting_pieces=2, unique_pieces=3, fixed={"num_tokens": 1})


PIECES = (0, 2, 4)


def row(piece: int, shape: str = "general", *, variant: int = 0, adaptor: str = "aot_inductor") -> Row:
    return Row(
        variant=variant,
        shape=parse_shape(shape),
        piece_index=piece,
        adaptor=adaptor,
        artifact=Artifact(digest="ab" * 32, kind="pt2", size_bytes=1, compile_secs=1.0, kernels=1),
    )


def fallback(piece: int, shape: str = "general", *, adaptor: str = "eager") -> Fallback:
    return Fallback(
        variant=0, piece_index=piece, shape=parse_shape(shape), adaptor=adaptor, reason="no compiler takes it"
    )


def manifest(
    *rows: Row,
    rank: int = 0,
    prefix: str = "backbone",
    variants: tuple[VariantCounts, ...] = (COUNTS,),
    fallbacks: tuple[Fallback, ...] = (),
    adaptor: str = "aot_inductor",
) -> Manifest:
    return manifest_of(
        RankName(hash=sample_key().hash, rank=rank, prefix=prefix),
        model="Toy",
        adaptor=adaptor,
        splitting_ops=(),
        variants=variants,
        rows=rows,
        fallbacks=fallbacks,
    )


def full(*shapes: str, rank: int = 0, but: tuple[tuple[int, str], ...] = ()) -> Manifest:
    rows = [row(piece, shape) for shape in shapes for piece in PIECES if (piece, shape) not in but]
    return manifest(*rows, rank=rank)


def hole(piece: int, shape: str, *, rank: int = 0, prefix: str = "backbone", variant: int = 0) -> Hole:
    return Hole(rank=rank, prefix=prefix, variant=variant, piece_index=piece, shape=parse_shape(shape))


def covered(coverage: Coverage) -> set[tuple[int, str]]:
    """Return (index of the place, shape) of everything that is served."""
    return {
        (number, shape_text(shape))
        for number, place in enumerate(coverage.places)
        for shape in (place.shapes if place.serves_all else [row.shape for row in place.rows])
    }


def test_a_complete_entry_has_every_piece_for_every_shape():
    coverage = entry_coverage(
        [full("num_tokens=8", "general", "num_tokens=2-4", rank=1), full("general", "num_tokens=2-4", "num_tokens=8")]
    )
    assert coverage.is_whole
    assert [shape_text(shape) for shape in coverage.shapes] == ["general", "num_tokens=2-4", "num_tokens=8"]
    assert [(place.rank, place.piece_index, place.adaptor) for place in coverage.places] == [
        (rank, piece, "aot_inductor") for rank in (0, 1) for piece in PIECES
    ]
    assert covered(coverage) == {
        (place, text) for place in range(6) for text in ("general", "num_tokens=2-4", "num_tokens=8")
    }


def test_a_piece_without_rows_is_known_from_another_rank_with_the_same_counts():
    coverage = entry_coverage([full("general"), full("general", rank=1, but=((4, "general"),))])
    assert coverage.holes == (hole(4, "general", rank=1),)
    assert coverage.places[5].adaptor == ""
    assert coverage.unknown == ()


def test_ranks_with_different_counts_share_shapes_but_not_pieces():
    longer = replace(COUNTS, pieces=7, splitting_pieces=3)
    last = manifest(*[row(piece) for piece in (0, 2, 4, 6)], rank=1, variants=(longer,))
    coverage = entry_coverage([full("general", "num_tokens=8"), last])
    assert coverage.holes == tuple(hole(piece, "num_tokens=8", rank=1) for piece in (0, 2, 4, 6))


def test_pieces_without_rows_are_counted_and_named_if_there_is_a_plan():
    one = full("general", but=((2, "general"),))
    assert entry_coverage([one]).unknown == (UnknownPieces(rank=0, prefix="backbone", variant=0, count=1),)
    assert not entry_coverage([one]).is_whole
    plans = {one.name: (frozenset(PIECES),)}
    coverage = entry_coverage([one], plans=plans)
    assert (coverage.holes, coverage.unknown) == ((hole(2, "general"),), ())


def test_a_variant_does_not_need_the_shapes_of_another():
    rows = [row(piece, shape) for piece in PIECES for shape in ("general", "num_tokens=8")]
    rows += [row(piece, "num_tokens=1", variant=1) for piece in PIECES]
    coverage = entry_coverage([manifest(*rows, variants=(COUNTS, DECODE))])
    assert coverage.is_whole
    assert [shape_text(shape) for shape in coverage.shapes] == ["general", "num_tokens=1", "num_tokens=8"]
    assert len(covered(coverage)) == 9


def test_a_variant_without_rows_is_a_hole_if_there_is_a_plan():
    rows = [row(piece) for piece in PIECES]
    one = manifest(*rows, variants=(COUNTS, DECODE))
    assert entry_coverage([one]).unknown == (UnknownPieces(rank=0, prefix="backbone", variant=1, count=3),)
    plans = {one.name: (frozenset(PIECES), frozenset(PIECES))}
    assert entry_coverage([one], plans=plans).holes == tuple(hole(piece, "num_tokens=1", variant=1) for piece in PIECES)


def test_an_eager_fallback_serves_every_shape():
    rows = [row(piece, shape) for piece in (0, 4) for shape in ("general", "num_tokens=8")] + [row(2, adaptor="eager")]
    coverage = entry_coverage([manifest(*rows, fallbacks=(fallback(2),))])
    assert coverage.is_whole
    assert coverage.places[1].serves_all
    assert coverage.places[1].adaptor == "eager"
    assert (1, "num_tokens=8") in covered(coverage)


def test_an_eager_fallback_needs_its_one_artifact():
    rows = [row(piece, shape) for piece in (0, 4) for shape in ("general", "num_tokens=8")]
    coverage = entry_coverage([manifest(*rows, fallbacks=(fallback(2),))])
    assert coverage.holes == (hole(2, "general"),)
    assert not coverage.places[1].serves_all


def test_an_entry_of_the_eager_adaptor_needs_an_artifact_per_shape():
    rows = [row(piece, adaptor="eager") for piece in PIECES] + [row(0, "num_tokens=8", adaptor="eager")]
    coverage = entry_coverage([manifest(*rows, adaptor="eager", fallbacks=(fallback(2),))])
    assert coverage.holes == (hole(2, "num_tokens=8"), hole(4, "num_tokens=8"))


def test_a_size_served_by_another_adaptor_is_not_a_hole():
    rows = [row(piece) for piece in PIECES] + [
        row(0, "num_tokens=8"),
        row(2, "num_tokens=8", adaptor="inductor_standalone"),
        row(4, "num_tokens=8"),
    ]
    coverage = entry_coverage(
        [manifest(*rows, fallbacks=(fallback(2, "num_tokens=8", adaptor="inductor_standalone"),))]
    )
    assert coverage.is_whole
    assert coverage.places[1].adaptor == "aot_inductor"


def test_a_prefix_does_not_need_the_shapes_of_another():
    head = manifest(row(0), prefix="eagle_head", variants=(replace(COUNTS, pieces=1, splitting_pieces=0),))
    coverage = entry_coverage([full("general", "num_tokens=8"), head])
    assert coverage.is_whole
    assert coverage.places[3].prefix == "eagle_head"


def test_shapes_with_several_dimensions_are_distinguished():
    shapes = ("general", "batch=1:seq=8", "batch=8:seq=1")
    coverage = entry_coverage([full(*shapes, but=((4, shapes[2]),))])
    assert coverage.holes == (hole(4, shapes[2]),)


def test_duplicate_manifests_and_manifests_of_two_entries_are_refused():
    with pytest.raises(ValueError, match="Give each manifest of one entry once"):
        entry_coverage([full("general"), full("general")])
    with pytest.raises(ValueError, match="Give each manifest of one entry once"):
        entry_coverage([full("general"), replace(full("general", rank=1), hash="cd" * 32)])


CELLS = [
    (rank, piece, shape)
    for rank in (0, 1)
    for piece in PIECES
    for shape in ("general", "num_tokens=8", "num_tokens=2-4")
]


@given(st.sets(st.sampled_from(CELLS)))
def test_with_a_plan_the_holes_are_exactly_the_removed_rows(gone: set[tuple[int, int, str]]):
    ranks = [
        manifest(
            *[row(piece, shape) for at, piece, shape in CELLS if at == rank and (at, piece, shape) not in gone],
            rank=rank,
        )
        for rank in (0, 1)
    ]
    plans = {one.name: (frozenset(PIECES),) for one in ranks}
    coverage = entry_coverage(ranks, plans=plans)
    left = {shape for rank, piece, shape in CELLS if (rank, piece, shape) not in gone} | {"general"}
    holes = {(hole.rank, hole.piece_index, shape_text(hole.shape)) for hole in coverage.holes}
    assert holes == {(rank, piece, shape) for rank, piece, shape in gone if shape in left}
    assert len(covered(coverage)) + len(coverage.holes) == 6 * len(left)
