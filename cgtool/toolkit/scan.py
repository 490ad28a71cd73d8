"""Looking through a cache for its listing: `cgtool inspect cache`. Must not import torch.

Reads manifests, stamps and sizes, and opens no artifact: that is for `verify`. What is foreign, torn or of another
schema is skipped with a warning, so that one bad file never hides the rest. Paths are plain text and folders are read
once, for a cache may hold 100,000 artifacts. JSON, of which `cgtool.toolkit.listing` says more::

    {"schema": 2, "root": str, "entries": [entry...], "size_bytes": int, "warnings": [str...]}

The bytes of an artifact that a manifest names are taken from there, and which of them are one file of the disk from the
inodes that a folder lists with its names; so nothing is asked of the disk for each artifact. What units hold that no
entry does is found by looking into their folders. In a large cache that is left out where nothing hints at it: where
there are no more units than artifacts, and none of a sample of those is a file of one name.
"""

from __future__ import annotations

import os
from operator import attrgetter
from pathlib import Path

from cgtool.errors import CacheError
from cgtool.host import gc_paused
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
from cgtool.store.records import parse_manifest, timestamp
from cgtool.store.walk import EntryView, RankView, view_entry
from cgtool.toolkit.listing import CacheListing, EntryListing

_OWN_FOLDERS = frozenset({"units", "lookup", "state"})
#: Files of a rank folder whose sizes its manifest says.
_NAMED_FILES = frozenset({MANIFEST_FILE, *RANK_FILES})
_UNIT_RECORDS = frozenset({UNIT_FILE, "lock"})
#: So many units are looked into in any case, and so many artifacts are asked how many names they have.
_FEW_UNITS, _SAMPLE = 5000, 100
_NAME = attrgetter("name")


def scan(root: Path, *, missing_ok: bool = False, artifacts: bool = True) -> CacheListing:
    """Return what is in a cache."""
    with os_errors_as_cache_errors(root):
        is_folder, is_there = root.is_dir(), root.exists()
    if not is_folder and not (missing_ok and not is_there):
        what = "is a file and not a cache folder" if is_there else "does not exist"
        raise CacheError(f"{root} {what}. Name the folder of a cache, or warm a model to make one.", path=root)
    with gc_paused():  # a hundred thousand names, none of which is garbage
        return _Scan(CacheLayout(root=root), artifacts=artifacts).listing()


def list_entry(layout: CacheLayout, name: RankName) -> EntryListing | None:
    """Return the listing of one rank and prefix, as `warm --json` prints it, or None when there is none."""
    path = layout.manifest_file(name)
    data = read_bytes(path)
    if data is None:
        return None
    manifest = parse_manifest(data, path=path, name=name)
    return EntryListing.of(manifest, len(data), StateStore(layout).usage(name))


def with_artifacts(layout: CacheLayout, entry: EntryListing) -> EntryListing:
    """Return an entry that was listed without its artifacts with them; as it is where its manifest is gone by now."""
    name = entry.manifest.name
    path = layout.manifest_file(name)
    try:
        data = read_bytes(path)
        if data is None:
            return entry
        return EntryListing.of(parse_manifest(data, path=path, name=name), len(data), entry.usage)
    except CacheError:
        return entry


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
            self.own_bytes += sum(map(_stat_size, _listed(f"{entry.folder}/{SIGNATURES}")))
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


def _is_strange(name: str) -> bool:
    """Return whether cgtool writes nothing of that name into an entry's folder."""
    return name not in (KEY_FILE, ARTIFACTS, SIGNATURES) and parse_rank_folder(name) is None and not is_temporary(name)
