"""The listing of a cache: what `inspect cache` says of it and of each entry. Must not import torch.

Reads manifests, stamps and sizes, and opens no artifact: that is for `verify`. What is foreign, torn or of another
schema is skipped with a warning, so that one bad file never hides the rest. Paths are plain text and folders are read
once, for a cache may hold 100,000 artifacts. An entry's figures:

- `size_bytes`: what shipping it alone takes: each different artifact once, and the files of its rank;
- `unshared_bytes`: the same, with the artifact counted for every piece and shape that it serves;
- `artifact_secs`: how long its different artifacts took to compile, each once;
- `saved_secs`: `hits` times that: the seconds of compiling that the processes which loaded it did without.

The bytes of an artifact that a manifest names are taken from there, and which of them are one file of the disk from the
inodes that a folder lists with its names; so nothing is asked of the disk for each artifact. What units hold that no
entry does is found by looking into their folders. In a large cache that is left out where nothing hints at it: where
there are no more units than artifacts, and none of a sample of those is a file of one name.
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
#: Files of a rank folder whose sizes its manifest says.
_NAMED_FILES = frozenset({MANIFEST_FILE, *RANK_FILES})
_UNIT_RECORDS = frozenset({UNIT_FILE, "lock"})
#: So many units are looked into in any case, and so many artifacts are asked how many names they have.
_FEW_UNITS, _SAMPLE = 5000, 100
_NAME = attrgetter("name")


@dataclass(frozen=True, kw_only=True)
class EntryListing:
    """One rank and prefix; the figures are the module's."""

    #: Its manifest; without rows where the listing was asked for without artifacts.
    manifest: Manifest
    usage: Usage
    #: What it was compiled for, in order.
    shapes: tuple[Shape, ...]
    #: The bytes of its own files: the manifest, and what that names beside artifacts.
    own_bytes: int
    unshared_bytes: int
    artifact_secs: float
    #: Which file of the disk an artifact is, or its name where it is missing → its size as the manifest says it.
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
    """All entries of a cache by hash, rank and prefix, and what was skipped.

    `size_bytes` is what all of it takes on the disk, a file of several names once: its entries and what units hold
    beside them, without the units' own records.
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
        """Return the listing as JSON."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "entries": [entry.to_json() for entry in self.entries],
            "size_bytes": self.size_bytes,
            "warnings": list(self.warnings),
        }


def scan(root: Path, *, missing_ok: bool = False, artifacts: bool = True) -> CacheListing:
    """Return what is in a cache."""
    with os_errors_as_cache_errors(root):
        is_folder, is_there = root.is_dir(), root.exists()
    if not is_folder and not (missing_ok and not is_there):
        what = "is a file and not a cache folder" if is_there else "does not exist"
        raise CacheError(f"{root} {what}. Name the folder of a cache, or warm a model to make one.", path=root)
    with gc_paused():  # a hundred thousand names, none of which is garbage
        return _Scan(CacheLayout(root=root), artifacts=artifacts).listing()


def list_entry(layout: CacheLayout, name: RankName, usage: Usage | None = None) -> EntryListing | None:
    """Return the listing of one rank and prefix with its artifacts, as they are now; None where there is none."""
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
        self.used = StateStore(layout).stamps()
        self.with_artifacts = artifacts
        self.entries: list[EntryListing] = []
        self.warnings: list[str] = []
        self.foreign: list[str] = []
        #: file of the disk → bytes
        self.sizes: dict[int, int] = {}
        self.sample: list[str] = []
        self.own_bytes = 0

    def listing(self) -> CacheListing:
        base = str(self.layout.base)
        for child in _listed(base):
            if is_hash(child.name) and child.is_dir():
                self._entry(view_entry(self.layout, child.name))
            elif child.name not in _OWN_FOLDERS and not is_temporary(child.name):
                self.foreign.append(f"{child.path} is not part of the cache and was skipped.")
        self._units(str(self.layout.units_dir))
        return CacheListing(
            root=self.layout.root,
            entries=tuple(self.entries),
            size_bytes=self.own_bytes + sum(self.sizes.values()),
            warnings=(*self.foreign, *self.warnings),
        )

    def _entry(self, entry: EntryView) -> None:
        """Add one entry; what of it cannot be listed or trusted is a warning."""
        self.warnings += map(str, entry.problems)
        self.own_bytes += _size(f"{entry.folder}/{KEY_FILE}") if KEY_FILE in entry.files else 0
        if SIGNATURES in entry.files:
            self.own_bytes += sum(_size(child.path) for child in _listed(f"{entry.folder}/{SIGNATURES}"))
        for rank in entry.ranks:
            self._rank(rank, entry)
        for name in entry.artifacts.keys() - entry.named:  # are as large as the disk says
            self.sizes[entry.artifacts[name]] = _size(f"{entry.folder}/{ARTIFACTS}/{name}")
        if entry.artifacts and len(self.sample) < _SAMPLE:
            self.sample.append(f"{entry.folder}/{ARTIFACTS}/{next(iter(entry.artifacts))}")
        strangers = sorted(name for name in entry.files if _is_strange(name))
        if strangers:
            told = ", ".join(strangers[:3])
            self.foreign.append(f"{entry.folder} holds {told}, which cgtool did not write and skipped.")
        if entry.manifests and KEY_FILE not in entry.files:
            self.warnings.append(
                f"Entry {short(entry.hash)} has no {KEY_FILE} and cannot be loaded: warm the model again."
            )

    def _rank(self, rank: RankView, entry: EntryView) -> None:
        manifest, status = rank.manifest, rank.manifest_status
        if manifest is None or status is None:  # bad, or of a warm that has not come to its end, or never will
            self.own_bytes += sum(_size(f"{rank.folder}/{name}") for name in rank.files)
            return
        name = manifest.name
        used_ns, hits = self.used.get(name.flat, (0, 0))
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

    def _units(self, folder: str) -> None:
        """Count what units hold and entries do not."""
        groups = {f"{folder}/{group}": _names(f"{folder}/{group}") for group in _names(folder)}
        count = sum(map(len, groups.values()))
        if count <= _FEW_UNITS or count > len(self.sizes) or any(map(_has_one_name, self.sample)):
            for unit in (f"{group}/{name}" for group, names in groups.items() for name in names):
                for child in _listed(unit, in_order=False):
                    if child.name not in _UNIT_RECORDS and child.inode() not in self.sizes:
                        self.sizes[child.inode()] = _size(child.path)


def _has_one_name(path: str) -> bool:
    try:
        return os.lstat(path).st_nlink == 1
    except OSError:
        return False


def _listed(folder: str, *, in_order: bool = True) -> list[os.DirEntry[str]]:
    """What is in a folder, by name; one that is missing, was removed meanwhile or is a file holds nothing."""
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=_NAME) if in_order else list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise cache_error(error, Path(folder), doing="read") from error


def _names(folder: str) -> list[str]:
    """The names of what `_listed` lists, in no order."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone, of a hundred thousand folders
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise cache_error(error, Path(folder), doing="read") from error


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _is_strange(name: str) -> bool:
    """Return whether cgtool writes nothing of that name into an entry's folder."""
    return name not in (KEY_FILE, ARTIFACTS, SIGNATURES) and parse_rank_folder(name) is None and not is_temporary(name)
