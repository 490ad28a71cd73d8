"""What `inspect cache` says of an entry and of a cache. No torch.

An entry's figures:

- `size_bytes`: what shipping it alone takes: each different artifact once, and the files of its rank;
- `unshared_bytes`: the same, with the artifact counted for every piece and shape that it serves;
- `artifact_secs`: how long its different artifacts took to compile, each once;
- `saved_secs`: `hits` times that: the seconds of compiling that the processes which loaded it did without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import asdict, replace

from cgtool.plan.pieces import Json
from cgtool.plan.shapes import Shape, shape_order, shape_text
from cgtool.store.lookup import Usage
from cgtool.store.records import Manifest, Row

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class EntryListing:
    """One rank and prefix; the figures are the module's.

    Args:
        manifest: Its manifest; without rows where the listing was asked for without artifacts.
        usage: How often it was loaded, and when last.
        shapes: What it was compiled for, in order.
        own_bytes: The bytes of its own files: the manifest, and what that names beside artifacts.
        unshared_bytes: See the module.
        artifact_secs: See the module.
        artifact_files: Which file of the disk an artifact is, or its name where it is missing → its size as the
            manifest says it.
    """

    manifest: Manifest
    usage: Usage
    shapes: tuple[Shape, ...]
    own_bytes: int
    unshared_bytes: int
    artifact_secs: float
    artifact_files: Mapping[int | str, int] = field(repr=False)

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        num_bytes: int,
        usage: Usage,
        *,
        artifacts: bool = True,
        inodes: Mapping[str, int] | None = None,
    ) -> EntryListing:
        """Return the listing of an entry; `inodes` has which file of the disk an artifact is, by its file's name."""
        here = inodes or {}
        own_bytes = num_bytes + sum(file.size_bytes for file in manifest.files.values())
        found = {row.artifact.file: row.artifact for row in manifest.rows}
        return cls(
            manifest=manifest if artifacts else replace(manifest, rows=()),
            usage=usage,
            shapes=manifest.shapes,
            own_bytes=own_bytes,
            unshared_bytes=own_bytes + sum(row.artifact.size_bytes for row in manifest.rows),
            artifact_secs=round(sum(artifact.compile_secs for artifact in found.values()), 3),
            artifact_files={here.get(name, name): artifact.size_bytes for name, artifact in found.items()},
        )

    @property
    def size_bytes(self) -> int:
        """What shipping it alone takes."""
        return self.own_bytes + sum(self.artifact_files.values())

    @property
    def saved_secs(self) -> float:
        """Seconds of compiling that its hits did without."""
        return round(self.usage.hits * self.artifact_secs, 3)

    def to_json(self) -> Json:
        """Return the entry as `inspect cache` prints it; the counts of pieces are those of the first variant."""
        manifest = self.manifest
        first = manifest.variants[0]
        return {
            "hash": manifest.hash,
            "rank": manifest.rank,
            "prefix": manifest.prefix,
            "model": manifest.model,
            "level": manifest.level,
            "adaptor": manifest.adaptor,
            "variants": len(manifest.variants),
            "pieces": first.pieces,
            "splitting_pieces": first.splitting_pieces,
            "unique_pieces": first.unique_pieces,
            "artifacts": [_artifact_json(rows) for rows in sharing(manifest.rows)],
            "fallbacks": [asdict(fallback) for fallback in manifest.fallbacks],
            "size_bytes": self.size_bytes,
            "created": manifest.created,
            "last_used": self.usage.last_used,
            "shapes": list(self.shapes),
            "unshared_bytes": self.unshared_bytes,
            "artifact_secs": self.artifact_secs,
            "saved_secs": self.saved_secs,
            "hits": self.usage.hits,
        }


def sharing(rows: Iterable[Row]) -> list[list[Row]]:
    """Return rows in groups of those that share an artifact for one shape, by shape and piece."""
    groups: dict[tuple[str, bool, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((shape_text(row.shape), row.tuned, row.adaptor, row.artifact.digest), []).append(row)
    return sorted(groups.values(), key=lambda group: (shape_order(group[0].shape), group[0].piece_index))


def _artifact_json(rows: list[Row]) -> Json:
    first = rows[0]
    return {
        "piece_index": sorted({row.piece_index for row in rows}),
        "shape": first.shape,
        "adaptor": first.adaptor,
        "tuned": first.tuned,
        **asdict(first.artifact),
    }


@dataclass(frozen=True, kw_only=True)
class CacheListing:
    """All entries of a cache, and what was skipped.

    Args:
        root: The cache's root.
        entries: By hash, rank and prefix.
        size_bytes: What all of the cache takes on the disk, a file of several names once: its entries and what units
            hold beside them, without the units' own records.
        warnings: What was skipped, and why.
    """

    root: Path
    entries: tuple[EntryListing, ...]
    size_bytes: int
    warnings: tuple[str, ...]

    def bytes_of(self, entries: Iterable[EntryListing]) -> int:
        """Return what some of the entries take on the disk, files that they share once."""
        total = 0
        held: dict[int, int] = {}
        for entry in entries:
            total += entry.own_bytes
            held.update([(file, size) for file, size in entry.artifact_files.items() if isinstance(file, int)])
        return total + sum(held.values())

    def to_json(self) -> Json:
        """Return the listing as JSON; see `cgtool.toolkit.scan` for the grammar."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "entries": [entry.to_json() for entry in self.entries],
            "size_bytes": self.size_bytes,
            "warnings": list(self.warnings),
        }
