"""The listing of a cache, as `inspect cache` shows it. Must not import torch.

Reads manifests, last-used stamps and sizes. Artifacts are not opened; `verify` does that. Files that are foreign, torn
or of another schema are skipped with a warning, so that one bad file does not hide the rest. A cache may hold 100,000
artifacts, so paths are plain strings and each folder is read once. An entry's figures:

- `size_bytes`: the size of the entry shipped alone: each distinct artifact once, plus the files of its rank;
- `unshared_bytes`: the same, with an artifact counted once for every piece and shape that it serves;
- `artifact_secs`: the compile time of its distinct artifacts;
- `saved_secs`: `hits` times `artifact_secs`: the compile time that processes saved by loading the entry.

Artifacts are not stat'ed one by one: sizes come from the manifest, and hard links to one file are recognized by the
inodes in the folder listing. Finding the bytes that only units hold takes a look into every unit's folder. In a large
cache this is skipped if there are no more units than artifacts and no artifact of a sample has a link count of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from msgspec.structs import asdict, replace

from cgtool.errors import CacheError
from cgtool.host import gc_paused
from cgtool.plan.pieces import Json
from cgtool.plan.shapes import Shape, shape_order, shape_text
from cgtool.store.files import cache_error, is_temporary, os_errors_as_cache_errors, read_bytes
from cgtool.store.layout import (
    ARTIFACTS,
    KEY_FILE,
    MANIFEST_FILE,
    RANK_FILES,
    SIGNATURES,
    UNIT_FILE,
    CacheLayout,
    RankName,
    is_hash,
    parse_rank_folder,
    short,
)
from cgtool.store.lookup import StateStore, Usage
from cgtool.store.records import Manifest, Row, parse_manifest, timestamp
from cgtool.store.walk import EntryView, RankView, view_entry

SCHEMA = 2

_OWN_FOLDERS = frozenset({"units", "lookup", "state", ARTIFACTS})
#: Files of a rank folder whose sizes are in its manifest.
_NAMED_FILES = frozenset({MANIFEST_FILE, *RANK_FILES})
_UNIT_RECORDS = frozenset({UNIT_FILE, "lock"})
#: Up to this many units are always read.
_MAX_UNITS_ALWAYS_READ = 5000
#: Number of entries that contribute an artifact to the link-count sample.
_SAMPLE_SIZE = 100


@dataclass(frozen=True, kw_only=True)
class EntryListing:
    """One rank and prefix of an entry; the module's docstring defines the figures."""

    #: Without rows if the listing was made without artifacts.
    manifest: Manifest
    usage: Usage
    #: The compiled shapes, in order.
    shapes: tuple[Shape, ...]
    #: Size of the manifest and of the files that it names, without artifacts.
    own_bytes: int
    unshared_bytes: int
    artifact_secs: float
    #: Inode of each artifact, or its file name if the file is missing → size according to the manifest.
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
        """Make a listing from a manifest of `num_bytes`; `inodes` maps artifact file names to inodes."""
        inodes = inodes or {}
        own_bytes = num_bytes + sum(file.size_bytes for file in manifest.files.values())
        distinct = {row.artifact.file: row.artifact for row in manifest.rows}
        return cls(
            manifest=manifest if artifacts else replace(manifest, rows=()),
            usage=usage,
            shapes=manifest.shapes,
            own_bytes=own_bytes,
            unshared_bytes=own_bytes + sum(row.artifact.size_bytes for row in manifest.rows),
            artifact_secs=round(sum(artifact.compile_secs for artifact in distinct.values()), 3),
            artifact_files={inodes.get(name, name): artifact.size_bytes for name, artifact in distinct.items()},
        )

    @property
    def size_bytes(self) -> int:
        """Size of the entry shipped alone."""
        return self.own_bytes + sum(self.artifact_files.values())

    @property
    def saved_secs(self) -> float:
        """Compile time saved by its hits."""
        return round(self.usage.hits * self.artifact_secs, 3)

    def to_json(self) -> Json:
        """Return the entry as `inspect cache` prints it; piece counts are those of the first variant."""
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
            "artifacts": [_artifact_json(rows) for rows in _group_by_artifact(manifest.rows)],
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


def _group_by_artifact(rows: Iterable[Row]) -> list[list[Row]]:
    """Group the rows that share an artifact for one shape; groups are sorted by shape and piece."""
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
    """All entries of a cache, sorted by hash, rank and prefix, with warnings about what was skipped.

    `size_bytes` is the disk usage of the entries and of artifacts that only units hold. A file with several hard links
    counts once; the units' records do not count.
    """

    root: Path
    entries: tuple[EntryListing, ...]
    size_bytes: int
    warnings: tuple[str, ...]

    def bytes_of(self, entries: Iterable[EntryListing]) -> int:
        """Return the disk usage of some of the entries; a file that they share counts once."""
        own_bytes = 0
        artifacts: dict[int, int] = {}
        for entry in entries:
            own_bytes += entry.own_bytes
            artifacts.update((file, size) for file, size in entry.artifact_files.items() if isinstance(file, int))
        return own_bytes + sum(artifacts.values())

    def to_json(self) -> Json:
        """Return the listing as JSON."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "entries": [entry.to_json() for entry in self.entries],
            "size_bytes": self.size_bytes,
            "warnings": list(self.warnings),
        }


def scan(root: Path, *, missing_ok: bool = False, artifacts: bool = True) -> CacheListing:
    """List a cache; without `artifacts`, the manifests of the listed entries have no rows.

    Raises:
        CacheError: `root` is not a folder or cannot be read. A missing folder is an empty cache if `missing_ok`.
    """
    with os_errors_as_cache_errors(root):
        is_folder, exists = root.is_dir(), root.exists()
    if not is_folder and not (missing_ok and not exists):
        problem = "is a file and not a cache folder" if exists else "does not exist"
        raise CacheError(f"{root} {problem}. Name the folder of a cache, or warm a model to make one.", path=root)
    with gc_paused():  # up to a hundred thousand names, and all of them are kept
        return _Scan(CacheLayout(root=root), artifacts=artifacts).listing()


def list_entry(layout: CacheLayout, name: RankName, usage: Usage | None = None) -> EntryListing | None:
    """Read the listing of one rank and prefix with its artifacts; None if it has no manifest."""
    path = layout.manifest_file(name)
    data = read_bytes(path)
    if data is None:
        return None
    return EntryListing.of(
        parse_manifest(data, path=path, name=name), len(data), usage or StateStore(layout).usage(name)
    )


class _Scan:
    def __init__(self, layout: CacheLayout, *, artifacts: bool) -> None:
        self.layout = layout
        self.stamps = StateStore(layout).stamps()
        self.with_artifacts = artifacts
        self.entries: list[EntryListing] = []
        self.warnings: list[str] = []
        self.foreign: list[str] = []
        #: inode → bytes
        self.sizes: dict[int, int] = {}
        self.sample: list[str] = []
        self.own_bytes = 0

    def listing(self) -> CacheListing:
        for child in sorted(_scandir(str(self.layout.base)), key=attrgetter("name")):
            if is_hash(child.name) and child.is_dir():
                self._add_entry(view_entry(self.layout, child.name))
            elif child.name not in _OWN_FOLDERS and not is_temporary(child.name):
                self.foreign.append(f"{child.path} is not part of the cache and was skipped.")
        self._add_unit_sizes(str(self.layout.units_dir))
        return CacheListing(
            root=self.layout.root,
            entries=tuple(self.entries),
            size_bytes=self.own_bytes + sum(self.sizes.values()),
            warnings=(*self.foreign, *self.warnings),
        )

    def _add_entry(self, entry: EntryView) -> None:
        """Add one entry; any part that cannot be listed or trusted becomes a warning."""
        self.warnings += map(str, entry.problems)
        self.own_bytes += _size(f"{entry.folder}/{KEY_FILE}") if KEY_FILE in entry.files else 0
        if SIGNATURES in entry.files:
            self.own_bytes += sum(_size(child.path) for child in _scandir(f"{entry.folder}/{SIGNATURES}"))
        for rank in entry.ranks:
            self._add_rank(rank, entry)
        for name in entry.artifacts.keys() - entry.named:  # no manifest states their size
            self.sizes[entry.artifacts[name]] = _size(f"{entry.folder}/{ARTIFACTS}/{name}")
        if entry.artifacts and len(self.sample) < _SAMPLE_SIZE:
            self.sample.append(f"{entry.folder}/{ARTIFACTS}/{next(iter(entry.artifacts))}")
        foreign = sorted(filter(_is_foreign, entry.files))
        if foreign:
            names = ", ".join(foreign[:3])
            self.foreign.append(f"{entry.folder} holds files that cgtool did not write; they were skipped: {names}.")
        if entry.manifests and KEY_FILE not in entry.files:
            self.warnings.append(
                f"Entry {short(entry.hash)} has no {KEY_FILE} and cannot be loaded: warm the model again."
            )

    def _add_rank(self, rank: RankView, entry: EntryView) -> None:
        manifest, status = rank.manifest, rank.manifest_status
        if manifest is None or status is None:  # damaged, or its warm is running or was interrupted
            self.own_bytes += sum(_size(f"{rank.folder}/{name}") for name in rank.files)
            return
        name = manifest.name
        used_ns, hits = self.stamps.get(name.flat, (0, 0))
        usage = Usage(hits=hits, last_used=timestamp(used_ns / 1e9) if used_ns else None)
        listing = EntryListing.of(manifest, status[1], usage, artifacts=self.with_artifacts, inodes=entry.artifacts)
        others = [file for file in rank.files if file not in _NAMED_FILES]
        self.own_bytes += listing.own_bytes + sum(_size(f"{rank.folder}/{file}") for file in others)
        missing = []
        for file, size in listing.artifact_files.items():
            if isinstance(file, int):
                self.sizes[file] = size
            else:
                missing.append(file)
        if missing:
            self.warnings.append(
                f"Entry {short(name.hash)} (rank {name.rank}, {name.prefix}) names {len(missing)} artifacts that are "
                f"missing, the first {short(missing[0])}: warm the model again."
            )
        self.entries.append(listing)

    def _add_unit_sizes(self, folder: str) -> None:
        """Count the artifacts that only units hold."""
        units = [unit.path for group in _scandir(folder) for unit in _scandir(group.path)]
        few = len(units) <= _MAX_UNITS_ALWAYS_READ
        if few or len(units) > len(self.sizes) or any(map(_has_one_link, self.sample)):
            for unit in units:
                for child in _scandir(unit):
                    if child.name not in _UNIT_RECORDS and child.inode() not in self.sizes:
                        self.sizes[child.inode()] = _size(child.path)


def _has_one_link(path: str) -> bool:
    try:
        return os.lstat(path).st_nlink == 1
    except OSError:
        return False


def _scandir(folder: str) -> list[os.DirEntry[str]]:
    """List a folder in no order; one that is missing, was just removed or is a file is empty."""
    try:
        with os.scandir(folder) as children:
            return list(children)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise cache_error(error, Path(folder), doing="read") from error


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _is_foreign(name: str) -> bool:
    """Return whether cgtool never writes a file of this name into an entry's folder."""
    return name not in (KEY_FILE, ARTIFACTS, SIGNATURES) and parse_rank_folder(name) is None and not is_temporary(name)
