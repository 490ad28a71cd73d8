"""Looking through a cache for its listing: `cgtool inspect cache`. Must not import torch.

Reads manifests, stamps and sizes, and digests nothing: that is for `verify`. What is foreign, torn or of a newer
schema is skipped with a warning, so that one bad file never hides the rest. Paths are plain text and folders are read
once, for a cache may hold 100,000 artifacts. JSON, of which `cgtool.cache.listing` says more::

    {"schema": 1, "root": str, "entries": [entry...], "size_bytes": int, "warnings": [str...]}

The bytes of an artifact that a manifest names are taken from there, and which of them are one file of the disk from the
inodes that a folder lists with its names; so nothing is asked of the disk for each artifact. What units hold that no
entry does is found by looking into their folders. In a large cache that is left out where nothing hints at it: where
there are no more units than artifacts, and none of a sample of those is a file of one name.
"""

from __future__ import annotations

import os
from operator import attrgetter
from pathlib import Path

from cgtool.cache.files import cache_error, is_temporary, read_bytes, telling
from cgtool.cache.layout import (
    ARTIFACTS,
    KEY_FILE,
    MANIFEST_FILE,
    RANK_FILES,
    SIGNATURES,
    UNIT_FILE,
    CacheLayout,
    RankName,
    is_hash,
    is_prefix,
    parse_rank_folder,
    short,
)
from cgtool.cache.listing import CacheListing, EntryListing, entry_listing
from cgtool.cache.manifest import parse_manifest
from cgtool.cache.rows import ArtifactListing
from cgtool.cache.state import StateStore, Usage, timestamp
from cgtool.errors import CacheError
from cgtool.garbage import uncollected

__all__ = ["ArtifactListing", "CacheListing", "EntryListing", "list_entry", "scan", "with_artifacts"]

_OWN_FOLDERS = frozenset({"units", "lookup", "state"})
#: Files of a rank folder whose sizes its manifest says.
_NAMED_FILES = frozenset({MANIFEST_FILE, *RANK_FILES})
_UNIT_RECORDS = frozenset({UNIT_FILE, "lock"})
#: So many units are looked into in any case, and so many artifacts are asked how many names they have.
_FEW_UNITS, _SAMPLE = 5000, 100
_NAME = attrgetter("name")


def scan(root: Path, *, missing_ok: bool = False, artifacts: bool = True) -> CacheListing:
    """Return what is in a cache.

    Args:
        root: The cache root, as `resolve_root` gives it.
        missing_ok: Whether a root that does not exist is an empty cache, as the default one is before the first warm.
        artifacts: Whether to list each artifact.

    Raises:
        CacheError: There is no such folder, or it cannot be listed.
    """
    with telling(root):
        is_folder, is_there = root.is_dir(), root.exists()
    if not is_folder and not (missing_ok and not is_there):
        what = "is a file and not a cache folder" if is_there else "does not exist"
        raise CacheError(f"{root} {what}. Name the folder of a cache, or warm a model to make one.", path=root)
    with uncollected():  # a hundred thousand names, none of which is garbage
        return _Scan(CacheLayout(root=root), artifacts=artifacts).listing()


def list_entry(layout: CacheLayout, name: RankName) -> EntryListing | None:
    """Return the listing of one rank and prefix, as `warm --json` prints it, or None when there is none.

    Raises:
        CacheError: Its manifest cannot be trusted or read.
    """
    path = layout.manifest_file(name)
    data = read_bytes(path)
    if data is None:
        return None
    parse_manifest(data, path=path, name=name)
    return entry_listing(data, path=path, name=name, usage=StateStore(layout).usage(name))


def with_artifacts(layout: CacheLayout, entry: EntryListing) -> EntryListing:
    """Return an entry that was listed without its artifacts with them; as it is where its manifest is gone by now."""
    name = RankName(hash=entry.hash, rank=entry.rank, prefix=entry.prefix)
    path = layout.manifest_file(name)
    usage = Usage(hits=entry.hits, last_used=entry.last_used)
    try:
        data = read_bytes(path)
        return entry if data is None else entry_listing(data, path=path, name=name, usage=usage)
    except CacheError:
        return entry


class _Scan:
    def __init__(self, layout: CacheLayout, *, artifacts: bool) -> None:
        self.layout = layout
        self.used = str(layout.state_dir / "used")
        self.with_artifacts = artifacts
        self.entries: list[EntryListing] = []
        self.warnings: list[str] = []
        self.foreign: list[str] = []
        #: hash → artifact's file name → which file of the disk that is
        self.files: dict[str, dict[str, int]] = {}
        #: file of the disk → bytes
        self.sizes: dict[int, int] = {}
        self.sample: list[str] = []
        self.own_bytes = 0

    def listing(self) -> CacheListing:
        base = str(self.layout.base)
        for child in _listed(base):
            if is_hash(child.name) and child.is_dir():
                self._entry(child.name, child.path)
            elif child.name not in _OWN_FOLDERS and not is_temporary(child.name):
                self.foreign.append(f"{child.path} is not part of the cache and was skipped.")
        self._units(str(self.layout.units_dir))
        return CacheListing(
            root=self.layout.root,
            entries=tuple(self.entries),
            size_bytes=self.own_bytes + sum(self.sizes.values()),
            warnings=(*self.foreign, *self.warnings),
            files=self.files,
        )

    def _entry(self, hash_: str, folder: str) -> None:
        """Look through one entry; what cannot be listed is a warning."""
        before = len(self.entries)
        has_key = False
        ranks: list[tuple[int, str]] = []
        strangers: list[str] = []
        artifacts: dict[str, int] = {}
        try:
            for child in _listed(folder):
                rank = parse_rank_folder(child.name)
                if child.name == KEY_FILE:
                    has_key = True
                    self.own_bytes += _stat_size(child)
                elif child.name == ARTIFACTS:
                    artifacts = {found.name: found.inode() for found in _listed(child.path, in_order=False)}
                    self.files[hash_] = artifacts
                elif child.name == SIGNATURES:
                    self.own_bytes += sum(map(_stat_size, _listed(child.path)))
                elif rank is not None:
                    ranks.append((rank, child.path))
                elif not is_temporary(child.name):
                    strangers.append(child.name)
            for rank, path in sorted(ranks):
                for child in _listed(path):
                    if is_prefix(child.name):
                        self._rank(RankName(hash=hash_, rank=rank, prefix=child.name), child.path, artifacts)
        except CacheError as error:
            self.warnings.append(str(error))
        self._unnamed(f"{folder}/{ARTIFACTS}", artifacts, self.entries[before:])
        if strangers:
            self.foreign.append(f"{folder} holds {', '.join(strangers[:3])}, which cgtool did not write and skipped.")
        if len(self.entries) > before and not has_key:
            self.warnings.append(f"Entry {short(hash_)} has no {KEY_FILE} and cannot be loaded: warm the model again.")

    def _unnamed(self, folder: str, found: dict[str, int], entries: list[EntryListing]) -> None:
        """Count an entry's artifacts that no manifest names as the disk says."""
        for name in found.keys() - set().union(*(entry.artifact_files for entry in entries)):
            self.sizes[found[name]] = _size(f"{folder}/{name}")
        if found and len(self.sample) < _SAMPLE:
            self.sample.append(f"{folder}/{next(iter(found))}")

    def _rank(self, name: RankName, folder: str, artifacts: dict[str, int]) -> None:
        path = f"{folder}/{MANIFEST_FILE}"
        found = _listed(folder, in_order=False)
        try:
            data = _read(path)
            if data is None:  # a warm that has not come to its end, or never will
                entry = None
            else:
                entry = entry_listing(
                    data, path=path, name=name, usage=self._usage(name), artifacts=self.with_artifacts
                )
        except CacheError as error:
            self.warnings.append(str(error))
            entry = None
        if entry is None:
            self.own_bytes += sum(map(_stat_size, found))
            return
        self.own_bytes += entry.own_bytes
        self.own_bytes += sum([_stat_size(child) for child in found if child.name not in _NAMED_FILES])
        named = entry.artifact_files.items()
        self.sizes.update([(artifacts[file], size) for file, size in named if file in artifacts])
        if missing := [file for file in entry.artifact_files if file not in artifacts]:
            self.warnings.append(
                f"Entry {short(name.hash)} (rank {name.rank}, {name.prefix}) names {len(missing)} artifacts that are "
                f"missing, the first {short(missing[0])}: warm the model again."
            )
        self.entries.append(entry)

    def _usage(self, name: RankName) -> Usage:
        try:
            status = os.stat(f"{self.used}/{name.flat}")  # noqa: PTH116 - one of thousands
        except OSError:
            return Usage()
        return Usage(hits=status.st_size, last_used=timestamp(status.st_mtime))

    def _units(self, folder: str) -> None:
        """Count what units hold and entries do not."""
        groups = {f"{folder}/{group}": _names(f"{folder}/{group}") for group in _names(folder)}
        count = sum(map(len, groups.values()))
        if count <= _FEW_UNITS or count > len(self.sizes) or any(map(_has_one_name, self.sample)):
            for unit in (f"{group}/{name}" for group, names in groups.items() for name in names):
                for child in _listed(unit, in_order=False):
                    if child.name not in _UNIT_RECORDS and child.inode() not in self.sizes:
                        self.sizes[child.inode()] = _stat_size(child)


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


def _stat_size(child: os.DirEntry[str]) -> int:
    try:
        return child.stat(follow_symlinks=False).st_size
    except OSError:
        return 0


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123 - one of thousands
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise cache_error(error, Path(path), doing="read") from error
