"""The records of a cache: the artifact, a manifest's row, the manifest, the unit, the key. Must not import torch.

Their classes are their grammar on disk; `cgtool.store.files` says how a file of them ends. A factor's hash is the
SHA-256 of its value's canonical JSON; the key's hash is that of `{name: factor hash}`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from cgtool.plan.grammar import Count, Digest, DimName, Name, Record, Seconds, digest_of, sha256_hex
from cgtool.plan.pieces import EAGER, Json
from cgtool.plan.shapes import Shape, Size, check_shape, distinct_shapes, of_sizes, shape_order, shape_text
from cgtool.store.files import Sealed, corrupt_error, read_bytes, seal, unseal
from cgtool.store.layout import RANK_FILES, CacheLayout, RankName

#: The suffix of an artifact's file: it says how the file is opened, and whether it holds pickle.
Kind = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*\Z", max_length=40)]
RankFile = Annotated[str, Meta(pattern=rf"\A(?:{'|'.join(map(re.escape, RANK_FILES))})\Z")]
#: What there is one row of: (variant, shape as text, piece_index, adaptor, tuned).
RowPlace = tuple[int, str, int, str, bool]


def timestamp(seconds: float | None = None) -> str:
    """Return a moment, or now, as UTC text, "2026-01-31T12:00:00.123Z": later moments sort later as text, too."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


class Artifact(Record, frozen=True, kw_only=True):
    """A compiled piece: what a unit stores, what a row of a manifest leads to, and what a listing shows.

    Args:
        digest: The SHA-256 of its bytes.
        kind: Its file suffix.
        size_bytes: Its size.
        compile_secs: How long the compiler took, in seconds.
        kernels: How many kernels the compiler generated.
        guards: Facts over the piece's symbols that the compiler relies on, beyond the graph's ranges and facts.
        proved: Whether it was run and compared with the piece before it was stored.
        proof_gap: Why it could not be, where that was tried and the piece does not run alone; else "".
    """

    digest: Digest
    kind: Kind
    size_bytes: Count
    compile_secs: Seconds
    kernels: Count = 0
    guards: tuple[str, ...] = ()
    proved: bool = False
    proof_gap: str = ""

    @classmethod
    def of(
        cls, data: bytes, *, kind: str, compile_secs: float, kernels: int = 0, guards: tuple[str, ...] = ()
    ) -> "Artifact":
        """Return the record of bytes that were compiled just now, which nobody has proved yet."""
        return cls(
            digest=sha256_hex(data),
            kind=kind,
            size_bytes=len(data),
            compile_secs=round(compile_secs, 3),
            kernels=kernels,
            guards=guards,
        )

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.digest}.{self.kind}"

    @property
    def needs_proof(self) -> bool:
        """True until a proof has been attempted."""
        return not self.proved and not self.proof_gap


class Unit(Sealed, frozen=True, kw_only=True, tag="unit-3"):
    """`unit.json`: what a unit's key compiled to.

    Args:
        key: The digest of everything that decides the artifact's bytes.
        artifact: Its artifact.
        created: When it was stored, in UTC: "2026-01-31T12:00:00.123Z".
    """

    key: Digest
    artifact: Artifact
    created: str = msgspec.field(default_factory=timestamp)


class Row(Record, frozen=True, kw_only=True):
    """An artifact in its place: a piece of a variant, for one shape.

    Args:
        variant: Which of the manifest's variants.
        piece_index: Which piece.
        shape: For which sizes; the dimensions that the variant fixes are among them.
        adaptor: Which adaptor compiled it.
        tuned: Whether it was compiled with autotuning.
        artifact: The artifact; rows may share one.
    """

    variant: Count
    piece_index: Count
    shape: Shape
    adaptor: Name
    tuned: bool = False
    artifact: Artifact

    @property
    def place(self) -> RowPlace:
        """What there is one row of."""
        return self.variant, shape_text(self.shape), self.piece_index, self.adaptor, self.tuned


class Fallback(Record, frozen=True, kw_only=True):
    """A piece that another adaptor serves than the one that the configuration names.

    Args:
        variant: Which of the manifest's variants.
        piece_index: Which piece.
        shape: For which sizes.
        adaptor: What serves it: its row names that adaptor.
        reason: Why, as a sentence.
    """

    variant: Count
    piece_index: Count
    shape: Shape
    adaptor: Name
    reason: str

    @property
    def place(self) -> tuple[int, int, str]:
        """What there is one fallback of: (variant, piece_index, shape as text)."""
        return self.variant, self.piece_index, shape_text(self.shape)


class VariantCounts(Record, frozen=True, kw_only=True):
    """What a manifest says of one variant of the plan.

    Args:
        name: The example call's name.
        pieces: How many pieces there are in all.
        splitting_pieces: How many of them hold a splitting op.
        unique_pieces: How many different ones there are among the compiled pieces.
        fixed: Dimensions that the variant fixes, by name.
        proved_at: The sizes of the dynamic dimensions at which a whole call gave what the model itself gives.
        proof_gap: Why no whole call could be compared, where that was tried; else "".
    """

    name: str
    pieces: Count
    splitting_pieces: Count
    unique_pieces: Count
    fixed: dict[DimName, Size] = msgspec.field(default_factory=dict)
    proved_at: tuple[dict[DimName, Count], ...] = ()
    proof_gap: str = ""

    @property
    def needs_proof(self) -> bool:
        """True until a proof of whole calls has been attempted."""
        return not self.proved_at and not self.proof_gap


class FileRecord(Record, frozen=True, kw_only=True):
    """The digest and the size of one of the other files of a rank folder."""

    sha256: Digest
    size_bytes: Count

    @classmethod
    def of(cls, data: bytes) -> "FileRecord":
        """Return the record of a file's bytes."""
        return cls(sha256=sha256_hex(data), size_bytes=len(data))


class Manifest(Sealed, frozen=True, kw_only=True, tag="manifest-3"):
    """`manifest.json`: the index of one rank and prefix, and the only file that readers start from.

    Args:
        hash: The entry's hash.
        rank: Which process of a model-parallel group.
        prefix: Which compiled part of the model.
        model: What people call the model.
        level: The compilation level.
        adaptor: The adaptor that the configuration names.
        created: When it was first published, in UTC.
        splitting_ops: The ops that were split at.
        variants: The plan's variants, in order.
        rows: The compiled pieces, in order of variant, shape, piece and adaptor.
        fallbacks: Pieces that another adaptor serves than `adaptor`, and why.
        files: The other files of the folder, by name; `EntryWriter` fills it in.
        lookup: The digests of cheap facts that lead to this manifest.

    Raises:
        ValueError: There is no variant, a row names what is not there, or two rows have one place.
    """

    hash: Digest
    rank: Annotated[int, Meta(ge=0, lt=10**7)]
    prefix: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")]
    model: str
    level: Count
    adaptor: Name
    created: str = msgspec.field(default_factory=timestamp)
    splitting_ops: tuple[str, ...]
    variants: tuple[VariantCounts, ...]
    rows: tuple[Row, ...]
    fallbacks: tuple[Fallback, ...] = ()
    files: dict[RankFile, FileRecord] = msgspec.field(default_factory=dict)
    lookup: tuple[Digest, ...] = ()

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        if not self.variants:
            raise ValueError("a manifest needs at least one variant")
        bases = [of_sizes(variant.fixed) for variant in self.variants]
        sound: set[tuple[int, str]] = set()
        seen: set[RowPlace] = set()
        for row in self.rows:
            place = row.place
            if row.variant >= len(bases) or row.piece_index >= self.variants[row.variant].pieces or place in seen:
                raise ValueError(f"the row {place} is given twice, or its variant or piece is not there")
            seen.add(place)
            if place[:2] not in sound:
                _check_shape(row.shape, bases[row.variant])
                sound.add(place[:2])

    @property
    def name(self) -> RankName:
        """The hash, rank and prefix."""
        return RankName(hash=self.hash, rank=self.rank, prefix=self.prefix)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """What it is compiled for, in order."""
        distinct = {tuple(row.shape.items()): row.shape for row in self.rows}
        return distinct_shapes(distinct.values())

    def with_rows(self, rows: Iterable[Row], fallbacks: Iterable[Fallback] = ()) -> "Manifest":
        """Return a manifest with more rows and fallbacks, in order; one of the same place is replaced.

        Where an adaptor fell back, rows of the one that it fell from go: a later proof may have refuted them.
        """
        merged = {row.place: row for row in (*self.rows, *rows)}
        fallen = {fallback.place: fallback for fallback in (*self.fallbacks, *fallbacks)}
        kept = sorted((row for row in merged.values() if not _is_refuted(row, fallen)), key=_row_order)
        return replace(self, rows=tuple(kept), fallbacks=tuple(fallen[place] for place in sorted(fallen)))

    def row(self, *, variant: int, shape: Shape, piece_index: int, adaptor: str, tuned: bool) -> Row | None:
        """Return the row of a place, or None; an autotuned one serves where none was asked for, too."""
        wanted = variant, shape_text(shape), piece_index, adaptor
        found = {row.tuned: row for row in self.rows if row.place[:4] == wanted}
        return found.get(True) or (None if tuned else found.get(False))

    def to_bytes(self) -> bytes:
        """Return the text of `manifest.json`."""
        return seal(self)


def read_manifest(layout: CacheLayout, name: RankName) -> Manifest | None:
    """Return the manifest of a rank and prefix, or None when there is none."""
    path = layout.manifest_file(name)
    data = read_bytes(path)
    return None if data is None else parse_manifest(data, path=path, name=name)


def parse_manifest(data: bytes, *, path: Path | str, name: RankName) -> Manifest:
    """Return the manifest in the bytes of a file, which must be that of `name`."""
    manifest = unseal(data, Manifest, path=path)
    if manifest.name != name:
        raise corrupt_error(path, "it is the manifest of another folder", expected=name.flat, actual=manifest.name.flat)
    return manifest


def _check_shape(shape: Shape, base: Shape) -> None:
    check_shape(shape)
    if any(shape.get(dim) != sizes for dim, sizes in base.items()):
        raise ValueError(f"the shape {shape_text(shape)} is outside of its variant, which is for {shape_text(base)}")


def _is_refuted(row: Row, fallen: Mapping[tuple[int, int, str], Fallback]) -> bool:
    """Return whether another adaptor serves a row's place now; a piece that runs as it stands does so for all sizes."""
    if row.adaptor == EAGER:
        return False
    if any((f.variant, f.piece_index, f.adaptor) == (row.variant, row.piece_index, EAGER) for f in fallen.values()):
        return True
    fallback = fallen.get((row.variant, row.piece_index, shape_text(row.shape)))
    return fallback is not None and fallback.adaptor != row.adaptor


def _row_order(row: Row) -> tuple[Any, ...]:
    return row.variant, shape_order(row.shape), row.piece_index, row.adaptor, row.tuned


class Factor(msgspec.Struct, frozen=True, kw_only=True):
    """A named input of the key.

    Args:
        name: What people call it, one of `cgtool.store.key.FACTOR_ORDER` where that fits.
        value: JSON; tuples become lists.

    Raises:
        TypeError: The value holds something that JSON has no word for.
        ValueError: The value holds a NaN or an infinity.
    """

    name: str
    value: Json

    def __post_init__(self) -> None:
        # So that a factor equals itself once it was written and read; half a character, as of a file's name that is
        # no UTF-8, has no place in a file of UTF-8.
        text = json.dumps(self.value, ensure_ascii=False, allow_nan=False).encode("utf-8", "xmlcharrefreplace")
        msgspec.structs.force_setattr(self, "value", json.loads(text))

    @property
    def hash(self) -> str:
        """The SHA-256 of the value's canonical JSON."""
        return digest_of(self.value)


class Key(Sealed, frozen=True, kw_only=True, tag="key-3"):
    """`key.json`: all factors of one entry.

    Args:
        hash: The entry's, which the factors give.
        factors: Each factor's value, by the factor's name.
    """

    hash: Digest
    factors: dict[str, Any]

    @classmethod
    def of(cls, factors: Iterable[Factor]) -> "Key":
        """Return the key of factors in any order.

        Raises:
            ValueError: Two of them have one name.
        """
        ordered = sorted(factors, key=lambda factor: factor.name)
        values = {factor.name: factor.value for factor in ordered}
        if len(values) != len(ordered):
            names = [factor.name for factor in ordered]
            raise ValueError(f"Two factors have one name: {names}. Give each factor a name of its own.")
        return cls(hash=combine(values), factors=values)

    def value(self, name: str) -> Json:
        """Return the value of a factor, or None when there is no such factor."""
        return cast("Json", self.factors.get(name))

    def to_bytes(self) -> bytes:
        """Return the text of `key.json`."""
        return seal(self)


def combine(factors: Mapping[str, Json]) -> str:
    """Return the hash of factors by name, whatever their order."""
    return digest_of({name: digest_of(value) for name, value in factors.items()})


def parse_key(data: bytes, *, path: Path, hash_: str) -> Key:
    """Return the key in the bytes of a file, which must be that of `hash_`."""
    key = unseal(data, Key, path=path)
    try:
        found = combine(key.factors)
    except RecursionError as error:
        raise corrupt_error(path, "it is nested without end") from error
    if not found == hash_ == key.hash:
        raise corrupt_error(path, "its factors do not give the hash of its folder", expected=hash_, actual=found)
    return key
