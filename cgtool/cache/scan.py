"""What is in a cache: the listing of `cgtool inspect cache`. Must not import torch.

Reads manifests, stamps and sizes, and digests no artifact: that is for `verify`. What is foreign, torn or of a newer
schema is skipped with a warning, so that one bad file never hides the rest. JSON::

    {"schema": 1, "root": str, "entries": [entry...], "size_bytes": int, "warnings": [str...]}

An entry's `size_bytes` is what shipping it alone would take; the listing's is what all of it, units too, takes on the
disk, where each file that several names share (hard links) counts once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cgtool.cache.fallbacks import Fallback
from cgtool.cache.files import is_temporary
from cgtool.cache.layout import KEY_FILE, CacheLayout, RankName, is_hash, parse_rank_folder, short
from cgtool.cache.manifest import Manifest, ManifestRow, Shape, read_manifest, shape_order, shape_text, shape_to_json
from cgtool.cache.objects import ObjectStore
from cgtool.cache.state import StateStore
from cgtool.errors import CacheError
from cgtool.pieces import Json

SCHEMA = 1

_OWN_FOLDERS = frozenset({"units", "lookup", "state"})


@dataclass(frozen=True, kw_only=True)
class ArtifactListing:
    """One artifact of an entry and every piece that it serves for one shape."""

    piece_index: tuple[int, ...]
    shape: Shape
    adaptor: str
    digest: str
    size_bytes: int
    compile_secs: float
    proved: bool

    def to_json(self) -> Json:
        """Return the artifact as `inspect cache` prints it."""
        return {
            "piece_index": list(self.piece_index),
            "shape": shape_to_json(self.shape),
            "adaptor": self.adaptor,
            "digest": self.digest,
            "size_bytes": self.size_bytes,
            "compile_secs": self.compile_secs,
            "proved": self.proved,
        }


@dataclass(frozen=True, kw_only=True)
class EntryListing:
    """One rank and prefix; the piece counts are those of the first variant."""

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
    fallbacks: tuple[Fallback, ...]
    size_bytes: int
    created: str
    last_used: str | None

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
        }


@dataclass(frozen=True, kw_only=True)
class CacheListing:
    """All entries of a cache, and what was skipped."""

    root: Path
    entries: tuple[EntryListing, ...]
    size_bytes: int
    warnings: tuple[str, ...]

    def to_json(self) -> Json:
        """Return the listing as `inspect cache --json` prints it."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "entries": [entry.to_json() for entry in self.entries],
            "size_bytes": self.size_bytes,
            "warnings": list(self.warnings),
        }


def scan(root: Path, *, missing_ok: bool = False) -> CacheListing:
    """Return what is in a cache.

    Args:
        root: The cache root, as `resolve_root` gives it.
        missing_ok: Whether a root that does not exist is an empty cache, as the default one is before the first warm.

    Raises:
        CacheError: There is no such folder, or it cannot be listed.
    """
    layout = CacheLayout(root=root)
    if not root.is_dir() and not (missing_ok and not root.exists()):
        what = "is a file and not a cache folder" if root.exists() else "does not exist"
        raise CacheError(f"{root} {what}. Name the folder of a cache, or warm a model to make one.", path=root)
    warnings = list(_foreign(layout))
    entries = []
    for hash_ in layout.hashes():
        found = [entry for name in layout.rank_names(hash_) if (entry := _entry(layout, name, warnings)) is not None]
        if found and not layout.key_file(hash_).exists():
            warnings.append(f"Entry {short(hash_)} has no {KEY_FILE} and cannot be loaded: warm the model again.")
        entries += found
    return CacheListing(
        root=root, entries=tuple(entries), size_bytes=_disk_usage(layout.base), warnings=tuple(warnings)
    )


def list_entry(layout: CacheLayout, name: RankName) -> EntryListing | None:
    """Return the listing of one rank and prefix, as `warm --json` prints it, or None when there is none.

    Raises:
        CacheError: Its manifest cannot be trusted or read.
    """
    manifest = read_manifest(layout, name)
    return None if manifest is None else _listing(layout, manifest)


def _entry(layout: CacheLayout, name: RankName, warnings: list[str]) -> EntryListing | None:
    try:
        manifest = read_manifest(layout, name)
    except CacheError as error:
        warnings.append(str(error))
        return None
    if manifest is None:  # a warm that has not come to its end, or never will
        return None
    objects = ObjectStore(layout.entry_dir(name.hash))
    named = {(row.digest, row.kind): row.size_bytes for row in manifest.rows}
    missing = [digest for (digest, kind), size in named.items() if objects.size(digest, kind) != size]
    if missing:
        warnings.append(
            f"Entry {short(name.hash)} (rank {name.rank}, {name.prefix}) names {len(missing)} artifacts that are "
            f"missing or of another size, the first {short(missing[0])}: warm the model again."
        )
    return _listing(layout, manifest)


def _listing(layout: CacheLayout, manifest: Manifest) -> EntryListing:
    first = manifest.variants[0]
    artifacts = group_rows(manifest.rows)
    sizes = {row.digest: row.size_bytes for row in manifest.rows}
    files = sum(record.size_bytes for record in manifest.files.values())
    return EntryListing(
        hash=manifest.hash,
        rank=manifest.rank,
        prefix=manifest.prefix,
        model=manifest.model,
        level=manifest.level,
        adaptor=manifest.adaptor,
        variants=len(manifest.variants),
        pieces=first.pieces,
        splitting_pieces=first.splitting_pieces,
        unique_pieces=first.unique_pieces,
        artifacts=artifacts,
        fallbacks=manifest.fallbacks,
        size_bytes=sum(sizes.values()) + files + _size(layout.manifest_file(manifest.name)),
        created=manifest.created,
        last_used=StateStore(layout).usage(manifest.name).last_used,
    )


def group_rows(rows: Iterable[ManifestRow]) -> tuple[ArtifactListing, ...]:
    """Return rows as artifacts, each with every piece that it serves for one shape, in order of shape and piece."""
    groups: dict[tuple[str, str, str], list[ManifestRow]] = {}
    for row in rows:
        groups.setdefault((shape_text(row.shape), row.adaptor, row.digest), []).append(row)
    listed = [
        ArtifactListing(
            piece_index=tuple(sorted({row.piece_index for row in group})),
            shape=group[0].shape,
            adaptor=group[0].adaptor,
            digest=group[0].digest,
            size_bytes=group[0].size_bytes,
            compile_secs=max(row.compile_secs for row in group),
            proved=all(row.proved for row in group),
        )
        for group in groups.values()
    ]
    return tuple(sorted(listed, key=lambda item: (shape_order(item.shape), item.piece_index, item.adaptor)))


def _foreign(layout: CacheLayout) -> Iterator[str]:
    """A warning for each thing in the cache folder that is not ours."""
    try:
        names = sorted(entry.name for entry in layout.base.iterdir())
    except OSError:
        return
    for name in names:
        if name in _OWN_FOLDERS or is_temporary(name):
            continue
        path = layout.base / name
        if not is_hash(name) or not path.is_dir():
            yield f"{path} is not part of the cache and was skipped."
            continue
        strangers = [child.name for child in path.iterdir() if not _is_ours(child.name)]
        if strangers:
            yield f"{path} holds {', '.join(sorted(strangers)[:3])}, which cgtool did not write and skipped."


def _is_ours(name: str) -> bool:
    return name in {KEY_FILE, "artifacts"} or parse_rank_folder(name) is not None or is_temporary(name)


def _disk_usage(folder: Path) -> int:
    """The bytes of all files under a folder, each inode once; what vanishes meanwhile counts nothing."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(above, name))  # noqa: PTH118 - os.walk speaks str, and this is hot
            except OSError:
                continue
            if (identity := (status.st_dev, status.st_ino)) not in seen:
                seen.add(identity)
                total += status.st_size
    return total


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
