"""The records of a cache: artifact, manifest row, manifest, unit and key. Must not import torch.

The classes define the grammar on disk; `cgtool.store.files` describes how a file of records is sealed. A factor's hash
is the SHA-256 of its value's canonical JSON; the key's hash is that of `{name: factor hash}`.
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

#: The suffix of an artifact's file, which determines how the file is opened and whether it contains pickle.
Kind = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*\Z", max_length=40)]
RankFile = Annotated[str, Meta(pattern=rf"\A(?:{'|'.join(map(re.escape, RANK_FILES))})\Z")]
#: The fields that identify a row: (variant, shape as text, piece_index, adaptor, tuned).
RowPlace = tuple[int, str, int, str, bool]


def timestamp(seconds: float | None = None) -> str:
    """Return a time, by default now, as UTC text that sorts chronologically: "2026-01-31T12:00:00.123Z"."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


class Artifact(Record, frozen=True, kw_only=True):
    """A compiled piece, as recorded by units and manifest rows and shown in listings.

    Args:
        digest: The SHA-256 of its bytes.
        kind: Its file suffix.
        size_bytes: Its size in bytes.
        compile_secs: Compile time in seconds.
        kernels: The number of kernels that the compiler generated.
        guards: Conditions on the piece's symbols that the compiler relies on, beyond the graph's ranges and facts.
        proved: Whether it was run and compared with the piece before it was stored.
        proof_gap: Why a proof was tried but not possible, because the piece does not run on its own; else "".
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
        """Return the record of newly compiled bytes, which are not proved yet."""
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
        """Its file name."""
        return f"{self.digest}.{self.kind}"

    @property
    def needs_proof(self) -> bool:
        """True until a proof has been attempted."""
        return not self.proved and not self.proof_gap


class Unit(Sealed, frozen=True, kw_only=True, tag="unit-3"):
    """`unit.json`: the artifact of a unit.

    Args:
        key: The digest of everything that determines the artifact's bytes.
        artifact: The artifact.
        created: When it was stored, in UTC: "2026-01-31T12:00:00.123Z".
    """

    key: Digest
    artifact: Artifact
    created: str = msgspec.field(default_factory=timestamp)


class Row(Record, frozen=True, kw_only=True):
    """The artifact of one piece of a variant, for one shape.

    Args:
        variant: The index of the variant in the manifest.
        piece_index: The index of the piece.
        shape: The sizes that it serves, including the dimensions that the variant fixes.
        adaptor: The adaptor that compiled it.
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
        """The fields that identify the row in its manifest."""
        return self.variant, shape_text(self.shape), self.piece_index, self.adaptor, self.tuned


class Fallback(Record, frozen=True, kw_only=True):
    """A piece that is served by a different adaptor than the one in the configuration.

    Args:
        variant: The index of the variant in the manifest.
        piece_index: The index of the piece.
        shape: The sizes that the fallback serves.
        adaptor: The adaptor that serves it, which its row names too.
        reason: Why, as a sentence.
    """

    variant: Count
    piece_index: Count
    shape: Shape
    adaptor: Name
    reason: str

    @property
    def place(self) -> tuple[int, int, str]:
        """The fields that identify the fallback in its manifest: (variant, piece_index, shape as text)."""
        return self.variant, self.piece_index, shape_text(self.shape)


class VariantCounts(Record, frozen=True, kw_only=True):
    """A manifest's summary of one variant of the plan.

    Args:
        name: The example call's name.
        pieces: The total number of pieces.
        splitting_pieces: The number of pieces that contain a splitting op.
        unique_pieces: The number of distinct pieces among the compiled ones.
        fixed: Dimensions that the variant fixes, by name.
        proved_at: The sizes of the dynamic dimensions at which a whole call matched the model itself.
        proof_gap: Why comparing a whole call was tried but not possible; else "".
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
    """The digest and size of one of the files beside the manifest in a rank folder."""

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
        rank: The process in its model-parallel group.
        prefix: The compiled part of the model.
        model: The model's display name.
        level: The compilation level.
        adaptor: The adaptor in the configuration.
        created: When it was first published, in UTC.
        splitting_ops: The ops at which the graph was split.
        variants: The plan's variants, in order.
        rows: The compiled pieces, in order of variant, shape, piece and adaptor.
        fallbacks: Pieces served by an adaptor other than `adaptor`, and why.
        files: The other files of the folder, by name; filled in by `EntryWriter`.
        lookup: The lookup digests that lead to this manifest.

    Raises:
        ValueError: There is no variant, a row names a missing variant or piece, or two rows have the same place.
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
        """Check the constraints that the types do not express."""
        if not self.variants:
            raise ValueError("a manifest needs at least one variant")
        bases = [of_sizes(variant.fixed) for variant in self.variants]
        checked_shapes: set[tuple[int, str]] = set()
        seen: set[RowPlace] = set()
        for row in self.rows:
            place = row.place
            if row.variant >= len(bases) or row.piece_index >= self.variants[row.variant].pieces or place in seen:
                raise ValueError(f"the row {place} is duplicated, or its variant or piece does not exist")
            seen.add(place)
            if place[:2] not in checked_shapes:
                _check_shape(row.shape, bases[row.variant])
                checked_shapes.add(place[:2])

    @property
    def name(self) -> RankName:
        """The hash, rank and prefix."""
        return RankName(hash=self.hash, rank=self.rank, prefix=self.prefix)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The distinct shapes of its rows, in order."""
        distinct = {tuple(row.shape.items()): row.shape for row in self.rows}
        return distinct_shapes(distinct.values())

    def with_rows(self, rows: Iterable[Row], fallbacks: Iterable[Fallback] = ()) -> "Manifest":
        """Return the manifest with additional rows and fallbacks, in order; they replace those of the same place.

        Rows that a fallback supersedes are dropped: a later proof may have refuted them.
        """
        merged = {row.place: row for row in (*self.rows, *rows)}
        by_place = {fallback.place: fallback for fallback in (*self.fallbacks, *fallbacks)}
        kept = sorted(
            (row for row in merged.values() if not _is_superseded(row, by_place)),
            key=lambda row: (row.variant, shape_order(row.shape), row.piece_index, row.adaptor, row.tuned),
        )
        return replace(self, rows=tuple(kept), fallbacks=tuple(by_place[place] for place in sorted(by_place)))

    def row(self, *, variant: int, shape: Shape, piece_index: int, adaptor: str, tuned: bool) -> Row | None:
        """Return the row at a place, or None; an autotuned row also serves requests without autotuning."""
        wanted = variant, shape_text(shape), piece_index, adaptor
        by_tuned = {row.tuned: row for row in self.rows if row.place[:4] == wanted}
        return by_tuned.get(True) or (None if tuned else by_tuned.get(False))

    def to_bytes(self) -> bytes:
        """Return the contents of `manifest.json`."""
        return seal(self)


def read_manifest(layout: CacheLayout, name: RankName) -> Manifest | None:
    """Return the manifest of a rank and prefix, or None if there is none."""
    path = layout.manifest_file(name)
    data = read_bytes(path)
    return None if data is None else parse_manifest(data, path=path, name=name)


def parse_manifest(data: bytes, *, path: Path | str, name: RankName) -> Manifest:
    """Return the manifest in a file's bytes; it must belong to `name`."""
    manifest = unseal(data, Manifest, path=path)
    if manifest.name != name:
        raise corrupt_error(path, "it belongs to another folder", expected=name.flat, actual=manifest.name.flat)
    return manifest


def _check_shape(shape: Shape, base: Shape) -> None:
    check_shape(shape)
    if any(shape.get(dim) != sizes for dim, sizes in base.items()):
        raise ValueError(f"the shape {shape_text(shape)} is outside its variant, which is for {shape_text(base)}")


def _is_superseded(row: Row, fallbacks: Mapping[tuple[int, int, str], Fallback]) -> bool:
    """Return whether a fallback to another adaptor replaces a row; a fallback to eager covers all sizes of a piece."""
    if row.adaptor == EAGER:
        return False
    if any((f.variant, f.piece_index, f.adaptor) == (row.variant, row.piece_index, EAGER) for f in fallbacks.values()):
        return True
    fallback = fallbacks.get((row.variant, row.piece_index, shape_text(row.shape)))
    return fallback is not None and fallback.adaptor != row.adaptor


class Factor(msgspec.Struct, frozen=True, kw_only=True):
    """A named input of the key.

    Args:
        name: Its display name, usually one of `cgtool.store.key.FACTOR_ORDER`.
        value: JSON; tuples become lists.

    Raises:
        TypeError: The value contains something that JSON cannot represent.
        ValueError: The value contains a NaN or an infinity.
    """

    name: str
    value: Json

    def __post_init__(self) -> None:
        # Normalize, so that a factor compares equal after a round trip. Lone surrogates, which stand for the bytes of
        # a file name that is not UTF-8, cannot be encoded as UTF-8 and are escaped.
        text = json.dumps(self.value, ensure_ascii=False, allow_nan=False).encode("utf-8", "xmlcharrefreplace")
        msgspec.structs.force_setattr(self, "value", json.loads(text))

    @property
    def hash(self) -> str:
        """The SHA-256 of the value's canonical JSON."""
        return digest_of(self.value)


class Key(Sealed, frozen=True, kw_only=True, tag="key-3"):
    """`key.json`: all factors of one entry.

    Args:
        hash: The entry's hash, computed from the factors.
        factors: Factor values by name.
    """

    hash: Digest
    factors: dict[str, Any]

    @classmethod
    def of(cls, factors: Iterable[Factor]) -> "Key":
        """Return the key of some factors, in any order.

        Raises:
            ValueError: Two factors have the same name.
        """
        ordered = sorted(factors, key=lambda factor: factor.name)
        values = {factor.name: factor.value for factor in ordered}
        if len(values) != len(ordered):
            names = [factor.name for factor in ordered]
            raise ValueError(f"Two factors have the same name: {names}. Factor names must be unique.")
        return cls(hash=combine(values), factors=values)

    def value(self, name: str) -> Json:
        """Return the value of a factor, or None if there is no such factor."""
        return cast("Json", self.factors.get(name))

    def to_bytes(self) -> bytes:
        """Return the contents of `key.json`."""
        return seal(self)


def combine(factors: Mapping[str, Json]) -> str:
    """Return the hash of factors by name, regardless of their order."""
    return digest_of({name: digest_of(value) for name, value in factors.items()})


def parse_key(data: bytes, *, path: Path, hash_: str) -> Key:
    """Return the key in a file's bytes; it must belong to `hash_`."""
    key = unseal(data, Key, path=path)
    try:
        actual = combine(key.factors)
    except RecursionError as error:
        raise corrupt_error(path, "it is nested too deeply") from error
    if not actual == hash_ == key.hash:
        raise corrupt_error(path, "its factors do not match the hash of its folder", expected=hash_, actual=actual)
    return key
