"""The manifest: the index of one rank and prefix, and the only file that readers start from. Must not import torch.

`manifest.json` (sealed, see `cgtool.cache.files`: its own digest stands at its end)::

    manifest = {"schema": 2, "cgtool": version, "hash": hash, "rank": int, "prefix": str, "model": str, "level": int,
                "adaptor": str, "created": str, "splitting_ops": [str...], "variants": [variant...], "rows": [row...],
                "fallbacks": [fallback...], "size_dim": str|null, "lookup": [digest...], "extra": {...},
                "files": {name: {"sha256": digest, "size_bytes": int}}, "digest": digest}
    variant  = {"name": str, "fixed": {dim: int}, "pieces": int, "splitting_pieces": int, "unique_pieces": int}
    row      = {"variant": int, "shape": shape, "piece_index": int, "adaptor": str, "artifact": digest, "kind": str,
                "size_bytes": int, "compile_secs": float, "kernels": int, "guards": [expr...],
                "proved": bool, "proof_gap": str}
    fallback = {"variant": int, "piece_index": int, "shape": shape, "adaptor": str, "reason": str}
    shape    = "general" | size | [start, end] | {dim: size}        sizes are 1 or more; ranges are inclusive

Rows are in order of variant, shape, piece and adaptor, one each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path

from cgtool.cache.checks import count, expect, flag, seconds, text, texts, word, wrong
from cgtool.cache.fallbacks import Fallback
from cgtool.cache.files import corrupt, parse_sealed, read_bytes, sealed_json
from cgtool.cache.layout import RANK_FILES, CacheLayout, RankName, check_hash, check_kind
from cgtool.cache.shapes import Shape, shape_from_json, shape_order, shape_text, shape_to_json
from cgtool.cache.state import timestamp
from cgtool.errors import CacheError
from cgtool.pieces import EAGER, Json
from cgtool.records import dataclass

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class ManifestRow:
    """One compiled piece for one shape.

    Args:
        variant: Which of the manifest's variants.
        shape: "general", a size, (start, end) inclusive, or {dimension: size}.
        piece_index: Which piece.
        adaptor: Which adaptor compiled it.
        digest: The artifact's SHA-256.
        kind: The artifact's kind.
        size_bytes: The artifact's size.
        compile_secs: How long it took, in seconds; of a reused unit, how long it took then.
        kernels: How many kernels it holds.
        guards: Facts over the piece's symbols that the compiler added.
        proved: Whether the artifact was run and compared with the piece before it was stored.
        proof_gap: Why it could not be, where that was tried; else "".
    """

    variant: int
    shape: Shape
    piece_index: int
    adaptor: str
    digest: str
    kind: str
    size_bytes: int
    compile_secs: float
    kernels: int
    guards: tuple[str, ...] = ()
    proved: bool = False
    proof_gap: str = ""

    @property
    def needs_proof(self) -> bool:
        """Whether nobody has tried to prove the artifact yet."""
        return not self.proved and not self.proof_gap

    @property
    def identity(self) -> tuple[int, str, int, str]:
        """What there is one row of: (variant, shape as text, piece_index, adaptor)."""
        return self.variant, shape_text(self.shape), self.piece_index, self.adaptor

    def to_json(self) -> Json:
        """Return the row as JSON."""
        return {
            "variant": self.variant,
            "shape": shape_to_json(self.shape),
            "piece_index": self.piece_index,
            "adaptor": self.adaptor,
            "artifact": self.digest,
            "kind": self.kind,
            "size_bytes": self.size_bytes,
            "compile_secs": self.compile_secs,
            "kernels": self.kernels,
            "guards": list(self.guards),
            "proved": self.proved,
            "proof_gap": self.proof_gap,
        }

    @classmethod
    def from_json(cls, data: Json) -> ManifestRow:
        """Return the row of `data`.

        Raises:
            CacheError: A field is outside of the grammar.
            KeyError: A field is missing.
        """
        return cls(
            variant=count(data["variant"]),
            shape=shape_from_json(data["shape"]),
            piece_index=count(data["piece_index"]),
            adaptor=word(data["adaptor"]),
            digest=check_hash(text(data["artifact"])),
            kind=check_kind(text(data["kind"])),
            size_bytes=count(data["size_bytes"]),
            compile_secs=seconds(data["compile_secs"]),
            kernels=count(data["kernels"]),
            guards=texts(data["guards"]),
            proved=flag(data["proved"]),
            proof_gap=text(data["proof_gap"]),
        )


@dataclass(frozen=True, kw_only=True)
class VariantCounts:
    """What a manifest says of one variant of the plan.

    Args:
        name: The example call's name.
        pieces: How many pieces there are in all.
        splitting_pieces: How many of them hold a splitting op.
        unique_pieces: How many different ones there are among the compiled pieces.
        fixed: Dimensions that the variant fixes, by name.
    """

    name: str
    pieces: int
    splitting_pieces: int
    unique_pieces: int
    fixed: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> Json:
        """Return the counts as JSON."""
        return {
            "name": self.name,
            "fixed": dict(self.fixed),
            "pieces": self.pieces,
            "splitting_pieces": self.splitting_pieces,
            "unique_pieces": self.unique_pieces,
        }

    @classmethod
    def from_json(cls, data: Json) -> VariantCounts:
        """Return the counts of `data`.

        Raises:
            CacheError: A field is outside of the grammar.
            KeyError: A field is missing.
        """
        return cls(
            name=text(data["name"]),
            pieces=count(data["pieces"]),
            splitting_pieces=count(data["splitting_pieces"]),
            unique_pieces=count(data["unique_pieces"]),
            fixed={text(name): count(size) for name, size in data["fixed"].items()},
        )


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The digest and the size of one of the other files of a rank folder."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The index of one rank and prefix; see the module's grammar.

    Args:
        hash: The entry's hash.
        rank: Which process of a model-parallel group.
        prefix: Which compiled part of the model.
        model: What people call the model.
        level: The compilation level.
        adaptor: The adaptor that the configuration names.
        splitting_ops: The ops that were split at.
        variants: The plan's variants, in order.
        rows: The compiled pieces.
        fallbacks: Pieces that another adaptor serves than `adaptor`, and why.
        size_dim: The dimension that sizes and ranges of rows speak of; None where the model has but one.
        files: The other files of the folder, by name; `EntryWriter` fills it in.
        lookup: The digests of cheap facts that lead to this manifest.
        created: When it was first published, in UTC.
        extra: Other facts, JSON, for whoever wrote them.
        cgtool: The version that wrote it; filled in when read.
    """

    hash: str
    rank: int
    prefix: str
    model: str
    level: int
    adaptor: str
    splitting_ops: tuple[str, ...]
    variants: tuple[VariantCounts, ...]
    rows: tuple[ManifestRow, ...]
    fallbacks: tuple[Fallback, ...] = ()
    size_dim: str | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    lookup: tuple[str, ...] = ()
    created: str = field(default_factory=timestamp)
    extra: Mapping[str, Json] = field(default_factory=dict)
    cgtool: str | None = None

    @property
    def name(self) -> RankName:
        """The hash, rank and prefix."""
        return RankName(hash=self.hash, rank=self.rank, prefix=self.prefix)

    def with_rows(self, rows: Iterable[ManifestRow], fallbacks: Iterable[Fallback] = ()) -> Manifest:
        """Return a manifest with more rows and fallbacks; one of the same identity is replaced.

        Where an adaptor fell back, rows of the one that it fell from go: a later proof may have refuted them.
        """
        merged = {row.identity: row for row in self.rows}
        merged.update((row.identity, row) for row in rows)
        fallen = {fallback.place: fallback for fallback in (*self.fallbacks, *fallbacks)}
        kept = tuple(row for row in merged.values() if not _is_refuted(row, fallen))
        return replace(self, rows=kept, fallbacks=tuple(fallen.values()))

    def row(self, *, variant: int, shape: Shape, piece_index: int, adaptor: str) -> ManifestRow | None:
        """Return the row of this identity, or None."""
        wanted = variant, shape_text(shape), piece_index, adaptor
        return next((row for row in self.rows if row.identity == wanted), None)

    def to_json(self) -> Json:
        """Return the manifest's own fields as JSON, rows in order."""
        return {
            "hash": self.hash,
            "rank": self.rank,
            "prefix": self.prefix,
            "model": self.model,
            "level": self.level,
            "adaptor": self.adaptor,
            "created": self.created,
            "splitting_ops": list(self.splitting_ops),
            "variants": [variant.to_json() for variant in self.variants],
            "rows": [row.to_json() for row in sorted(self.rows, key=_row_order)],
            "fallbacks": [fallback.to_json() for fallback in sorted(self.fallbacks, key=lambda f: f.place)],
            "size_dim": self.size_dim,
            "files": {
                name: {"sha256": record.sha256, "size_bytes": record.size_bytes}
                for name, record in sorted(self.files.items())
            },
            "lookup": list(self.lookup),
            "extra": dict(self.extra),
        }

    def to_bytes(self) -> bytes:
        """Return the text of `manifest.json`."""
        return sealed_json(self.to_json(), schema=SCHEMA)

    @classmethod
    def from_json(cls, data: Json) -> Manifest:
        """Return the manifest of `data`.

        Raises:
            CacheError: A field is outside of the grammar.
            KeyError: A field is missing.
        """
        files = {
            _file_name(name): FileRecord(
                sha256=check_hash(text(record["sha256"])), size_bytes=count(record["size_bytes"])
            )
            for name, record in data["files"].items()
        }
        manifest = cls(
            hash=text(data["hash"]),
            rank=count(data["rank"]),
            prefix=text(data["prefix"]),
            model=text(data["model"]),
            level=count(data["level"]),
            adaptor=word(data["adaptor"]),
            splitting_ops=texts(data["splitting_ops"]),
            variants=tuple(VariantCounts.from_json(variant) for variant in data["variants"]),
            rows=tuple(ManifestRow.from_json(row) for row in data["rows"]),
            fallbacks=tuple(Fallback.from_json(item) for item in data["fallbacks"]),
            size_dim=None if data["size_dim"] is None else text(data["size_dim"]),
            files=files,
            lookup=tuple(check_hash(digest) for digest in texts(data["lookup"])),
            created=text(data["created"]),
            extra=dict(data["extra"]),
            cgtool=data.get("cgtool"),
        )
        manifest.verify()
        return manifest

    def verify(self) -> None:
        """Check what a manifest promises of itself, touching no file.

        Raises:
            CacheError: A name is outside of the grammar, a row names a variant or a piece that is not there, or two
                rows have one identity.
        """
        _ = self.name  # a name outside of the grammar is refused as it is made
        if not self.variants:
            raise CacheError("A manifest needs at least one variant. Warm the model again.")
        seen = set()
        for row in self.rows:
            identity = row.identity
            if row.variant >= len(self.variants) or row.piece_index >= self.variants[row.variant].pieces:
                raise wrong("a piece of a variant that is there", identity)
            if identity in seen:
                raise wrong("one row of each identity", identity)
            seen.add(identity)


def read_manifest(layout: CacheLayout, name: RankName) -> Manifest | None:
    """Return the manifest of a rank and prefix, or None when there is none.

    Raises:
        CacheCorruptError: It is torn, breaks its grammar, or is another's.
        CacheSchemaError: Another version of cgtool wrote it.
        CacheError: It cannot be read.
    """
    path = layout.manifest_file(name)
    data = read_bytes(path)
    if data is None:
        return None
    return parse_manifest(data, path=path, name=name)


def parse_manifest(data: bytes, *, path: Path, name: RankName) -> Manifest:
    """Return the manifest in the bytes of a file.

    Raises:
        CacheCorruptError: They are torn, break the grammar, or are another rank's.
        CacheSchemaError: Another version of cgtool wrote them.
    """
    record = parse_sealed(data, path=path, schema=SCHEMA)
    try:
        manifest = Manifest.from_json(record)
    except (CacheError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise corrupt(path, f"a field is wrong: {error}") from error
    if manifest.name != name:
        raise corrupt(path, "it is the manifest of another folder", expected=name.flat, actual=manifest.name.flat)
    return manifest


def _is_refuted(row: ManifestRow, fallen: Mapping[tuple[int, int, str], Fallback]) -> bool:
    """Return whether another adaptor serves a row's place now; a piece that runs as it stands does so for all sizes."""
    if row.adaptor == EAGER:
        return False
    if any((f.variant, f.piece_index, f.adaptor) == (row.variant, row.piece_index, EAGER) for f in fallen.values()):
        return True
    fallback = fallen.get((row.variant, row.piece_index, shape_text(row.shape)))
    return fallback is not None and fallback.adaptor != row.adaptor


def _row_order(row: ManifestRow) -> tuple[int, tuple[int, tuple[int, ...], str], int, str]:
    return row.variant, shape_order(row.shape), row.piece_index, row.adaptor


def _file_name(name: str) -> str:
    return str(expect(name, lambda value: value in RANK_FILES, f"one of {', '.join(RANK_FILES)}"))
