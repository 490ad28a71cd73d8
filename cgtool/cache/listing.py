"""What `inspect cache` says of an entry and of a cache: records, and how an entry is read from its manifest. No torch.

Listing reads a manifest's JSON and checks the types of what it shows, and leaves the digest over it to `load` and
`verify`: it opens nothing that a manifest names.

An entry's figures:

- `size_bytes`: what shipping it alone takes: each different artifact once, and the files of its rank;
- `unshared_bytes`: the same, with the artifact counted for every piece and shape that it serves;
- `artifact_secs`: how long its different artifacts took to compile, each once;
- `saved_secs`: `hits` times that: the seconds of compiling that the processes which loaded it did without.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from cgtool.cache.checks import count, expect, text, word
from cgtool.cache.fallbacks import Fallback
from cgtool.cache.files import corrupt, parse_sealed
from cgtool.cache.layout import RankName
from cgtool.cache.manifest import SCHEMA as MANIFEST_SCHEMA
from cgtool.cache.rows import (
    ArtifactListing,
    RowFigures,
    figures_of,
    file_bytes,
    listed_artifacts,
    quick_rows,
    without_rows,
)
from cgtool.cache.shapes import Shape, shape_to_json
from cgtool.cache.state import Usage
from cgtool.errors import CacheError
from cgtool.pieces import Json
from cgtool.records import dataclass

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class EntryListing:
    """One rank and prefix; the piece counts are those of the first variant, the figures are the module's.

    Args:
        artifacts: In order of shape and piece; () where the listing was asked for without them.
        num_artifacts: How many different ones there are.
        shapes: What it was compiled for, in order.
        created: When, in UTC.
        last_used: When it was loaded last, in UTC; None for never.
        hits: How often it was loaded.
        artifact_files: Artifact's file name → its size as the manifest says it.
    """

    hash: str
    rank: int
    prefix: str
    model: str
    level: int
    adaptor: str
    variants: int
    pieces: int
    splitting_pieces: int
    unique_pieces: int
    artifacts: tuple[ArtifactListing, ...]
    num_artifacts: int
    fallbacks: tuple[Fallback, ...]
    shapes: tuple[Shape, ...]
    size_bytes: int
    unshared_bytes: int
    artifact_secs: float
    saved_secs: float
    created: str
    last_used: str | None
    hits: int
    artifact_files: Mapping[str, int] = field(repr=False)

    @property
    def own_bytes(self) -> int:
        """The bytes of its own files: the manifest, and what that names beside artifacts."""
        return self.size_bytes - sum(self.artifact_files.values())

    def to_json(self) -> Json:
        """Return the entry as `inspect cache` prints it."""
        return {
            "hash": self.hash,
            "rank": self.rank,
            "prefix": self.prefix,
            "model": self.model,
            "level": self.level,
            "adaptor": self.adaptor,
            "variants": self.variants,
            "pieces": self.pieces,
            "splitting_pieces": self.splitting_pieces,
            "unique_pieces": self.unique_pieces,
            "artifacts": [artifact.to_json() for artifact in self.artifacts],
            "fallbacks": [fallback.to_json() for fallback in self.fallbacks],
            "size_bytes": self.size_bytes,
            "created": self.created,
            "last_used": self.last_used,
            "shapes": [shape_to_json(shape) for shape in self.shapes],
            "unshared_bytes": self.unshared_bytes,
            "artifact_secs": self.artifact_secs,
            "saved_secs": self.saved_secs,
            "hits": self.hits,
        }


def entry_listing(
    data: bytes, *, path: Path | str, name: RankName, usage: Usage, artifacts: bool = True
) -> EntryListing:
    """Return the listing of an entry.

    Args:
        data: Its manifest.
        path: Where that lies.
        name: Whose it must be.
        usage: How often and when it was used.
        artifacts: Whether to list each artifact.

    Raises:
        CacheCorruptError: The manifest is torn, breaks its grammar, or is another's.
        CacheSchemaError: Another version of cgtool wrote it.
    """
    rows = None if artifacts else quick_rows(data)
    try:
        record = json.loads(data if rows is None else without_rows(data))
        known = record["schema"] == MANIFEST_SCHEMA and type(record["schema"]) is int
    except (ValueError, RecursionError, KeyError, TypeError):
        known = False
    if not known:
        parse_sealed(data, path=path, schema=MANIFEST_SCHEMA)  # says what is wrong
        raise corrupt(path, "it is no manifest")
    try:
        parsed = record["rows"]
        listed = listed_artifacts(parsed) if artifacts else ()
        return _listing(record, len(data), name, usage, rows or figures_of(parsed), artifacts=listed)
    except (CacheError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise corrupt(path, f"a field is wrong: {error}") from error


def _listing(
    record: Mapping[str, Any],
    num_bytes: int,
    name: RankName,
    usage: Usage,
    rows: RowFigures,
    *,
    artifacts: tuple[ArtifactListing, ...],
) -> EntryListing:
    if (record["hash"], record["rank"], record["prefix"]) != (name.hash, name.rank, name.prefix):
        raise CacheError("it is the manifest of another folder", expected=name.flat)
    first = expect(record["variants"], lambda value: isinstance(value, list) and bool(value), "at least one variant")[0]
    own_bytes = num_bytes + sum(file_bytes(of["size_bytes"]) for of in record["files"].values())
    artifact_secs = round(sum(rows.secs.values()), 3)
    return EntryListing(
        hash=name.hash,
        rank=name.rank,
        prefix=name.prefix,
        model=text(record["model"]),
        level=count(record["level"]),
        adaptor=word(record["adaptor"]),
        variants=len(record["variants"]),
        pieces=count(first["pieces"]),
        splitting_pieces=count(first["splitting_pieces"]),
        unique_pieces=count(first["unique_pieces"]),
        artifacts=artifacts,
        num_artifacts=len(rows.sizes),
        fallbacks=tuple(Fallback.from_json(item) for item in record["fallbacks"]),
        shapes=rows.shapes,
        size_bytes=own_bytes + sum(rows.sizes.values()),
        unshared_bytes=own_bytes + rows.unshared_bytes,
        artifact_secs=artifact_secs,
        saved_secs=round(usage.hits * artifact_secs, 3),
        created=text(record["created"]),
        last_used=usage.last_used,
        hits=usage.hits,
        artifact_files=rows.sizes,
    )


@dataclass(frozen=True, kw_only=True)
class CacheListing:
    """All entries of a cache, and what was skipped.

    Args:
        root: The cache's root.
        entries: By hash, rank and prefix.
        size_bytes: What all of the cache takes on the disk, a file of several names once: its entries and what units
            hold beside them, without the units' own records.
        files: Entry's hash → artifact's file name → which file of the disk that is.
        warnings: What was skipped, and why.
    """

    root: Path
    entries: tuple[EntryListing, ...]
    size_bytes: int
    warnings: tuple[str, ...]
    files: Mapping[str, Mapping[str, int]] = field(default_factory=dict, repr=False)

    def bytes_of(self, entries: Iterable[EntryListing]) -> int:
        """Return what some of the entries take on the disk, files that they share once."""
        total = 0
        held: dict[int, int] = {}
        for entry in entries:
            total += entry.own_bytes
            here = self.files.get(entry.hash, {})
            held.update([(here[name], size) for name, size in entry.artifact_files.items() if name in here])
        return total + sum(held.values())

    def to_json(self) -> Json:
        """Return the listing as JSON; see `cgtool.cache.scan` for the grammar."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "entries": [entry.to_json() for entry in self.entries],
            "size_bytes": self.size_bytes,
            "warnings": list(self.warnings),
        }
