"""Read-only walk through a cache: every entry with its ranks and artifacts as they are on disk. Must not import torch.

The walk lists folders, reads manifests and checks their grammar and seal, and opens nothing else. Anything that cannot
be listed, read or trusted is recorded as a problem in the view instead of raised, so that one bad file does not hide
the others. The folder of an entry may be a symlink; links inside it are not followed because their targets do not
belong to the cache. Paths are strings and each folder is read once, because a cache may contain 100,000 artifacts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from cgtool.errors import CacheError, CacheSchemaError
from cgtool.store.files import cache_error, is_newer, read_bytes
from cgtool.store.layout import ARTIFACTS, MANIFEST_FILE, CacheLayout, RankName, is_hash, is_prefix, parse_rank_folder
from cgtool.store.records import Manifest, parse_manifest

#: A file's modification time in nanoseconds since the epoch, and its size in bytes.
Status = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RankView:
    """One rank and prefix of an entry."""

    name: RankName
    folder: str
    #: The names in its folder.
    files: tuple[str, ...]
    #: None if there is no manifest that can be read and trusted.
    manifest: Manifest | None = None
    #: Status of the manifest's file.
    manifest_status: Status | None = None
    #: Why an existing manifest cannot be read or trusted.
    problem: CacheError | None = None

    @property
    def has_manifest(self) -> bool:
        """Whether there is a manifest, valid or not, i.e. whether a warm has finished."""
        return self.manifest is not None or self.problem is not None

    @property
    def created(self) -> float | None:
        """When it was first published, in seconds since the epoch; the file's time if the manifest is invalid."""
        if self.manifest is None:
            return None if self.manifest_status is None else self.manifest_status[0] / 1e9
        try:
            return datetime.fromisoformat(self.manifest.created).timestamp()
        except (ValueError, OverflowError):
            return None


@dataclass(frozen=True, kw_only=True)
class EntryView:
    """One entry."""

    hash: str
    folder: str
    is_link: bool
    files: tuple[str, ...]
    ranks: tuple[RankView, ...]
    #: Inodes by artifact file name; they identify hard links to the same file.
    artifacts: Mapping[str, int]
    #: Errors for the folders that could not be listed.
    unlisted: tuple[CacheError, ...]

    @property
    def problems(self) -> tuple[CacheError, ...]:
        """Errors for everything that could not be listed, read or trusted."""
        return (*self.unlisted, *(rank.problem for rank in self.ranks if rank.problem is not None))

    @property
    def is_readable(self) -> bool:
        """Whether the view is complete, so that files which it does not name are known to be unused."""
        return not self.is_link and not self.problems

    @property
    def is_finished(self) -> bool:
        """Whether any rank has a manifest."""
        return any(rank.has_manifest for rank in self.ranks)

    @property
    def is_newer(self) -> bool:
        """Whether a newer version of cgtool wrote any part of it."""
        return any(isinstance(error, CacheSchemaError) and is_newer(error) for error in self.problems)

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The manifests that can be trusted."""
        return tuple(rank.manifest for rank in self.ranks if rank.manifest is not None)

    @property
    def model(self) -> str:
        """The model's display name; "" if no manifest contains it."""
        return next((manifest.model for manifest in self.manifests if manifest.model), "")

    @property
    def created(self) -> float | None:
        """When the newest of its ranks was published, in seconds since the epoch; None if unknown."""
        return max((rank.created for rank in self.ranks if rank.created is not None), default=None)

    @property
    def lookup(self) -> tuple[str, ...]:
        """The lookup digests that lead to it."""
        return tuple(dict.fromkeys(digest for manifest in self.manifests for digest in manifest.lookup))

    @property
    def named(self) -> frozenset[str]:
        """The file names of the artifacts that its manifests name."""
        return frozenset(row.artifact.file for manifest in self.manifests for row in manifest.rows)

    def without_rows(self, *, artifacts: bool = True) -> EntryView:
        """Return the view without the rows of its manifests: 100,000 rows take 100 MB of memory."""
        ranks = (
            rank if rank.manifest is None else replace(rank, manifest=structs.replace(rank.manifest, rows=()))
            for rank in self.ranks
        )
        return replace(self, ranks=tuple(ranks), artifacts=self.artifacts if artifacts else {})


def walk(layout: CacheLayout) -> Iterator[EntryView]:
    """Yield every entry of a cache, in order of hashes.

    Raises:
        CacheError: The cache folder itself cannot be listed.
    """
    for hash_ in layout.hashes():
        yield view_entry(layout, hash_)


def view_entry(layout: CacheLayout, hash_: str) -> EntryView:
    """Return one entry; a missing entry is empty."""
    folder = f"{layout.base}/{hash_}"
    ranks: list[RankView] = []
    artifacts: dict[str, int] = {}
    unlisted: list[CacheError] = []
    children = _children(folder, unlisted, follow=True)
    numbers = sorted(rank for name in children if (rank := parse_rank_folder(name)) is not None)
    for rank in numbers:
        above = f"{folder}/rank_{rank}"
        for prefix in sorted(filter(is_prefix, _children(above, unlisted))):
            name = RankName(hash=hash_, rank=rank, prefix=prefix)
            inner = f"{above}/{prefix}"
            if not os.path.islink(inner):  # noqa: PTH114 - a str, thousands of times
                ranks.append(_view_rank(name, inner, tuple(_children(inner, unlisted))))
            else:
                unlisted.append(_link_error(inner))
    if ARTIFACTS in children:
        artifacts = {name: child.inode() for name, child in _children(f"{folder}/{ARTIFACTS}", unlisted).items()}
    return EntryView(
        hash=hash_,
        folder=folder,
        is_link=os.path.islink(folder),  # noqa: PTH114 - as above
        files=tuple(children),
        ranks=tuple(ranks),
        artifacts=artifacts,
        unlisted=tuple(unlisted),
    )


class UnitView(NamedTuple):
    """A folder among the units; the key is the folder's name, or "" if that is not a valid key."""

    key: str
    folder: str
    files: tuple[str, ...]


def walk_units(layout: CacheLayout, unlisted: list[CacheError]) -> Iterator[UnitView]:
    """Yield every unit of a cache in order of keys; append an error to `unlisted` for each unreadable folder."""
    base = str(layout.units_dir)
    for shard in sorted(_children(base, unlisted)):
        for name in sorted(_children(f"{base}/{shard}", unlisted)):
            errors: list[CacheError] = []
            unit = view_unit(f"{base}/{shard}/{name}", errors)
            unlisted += errors
            if not errors:
                yield unit


def view_unit(folder: str, unlisted: list[CacheError] | None = None) -> UnitView:
    """Return a unit and the names in its folder, which are empty if it is missing or cannot be listed."""
    shard, name = folder.split("/")[-2:]
    if not (is_hash(name) and name.startswith(shard)):
        return UnitView("", folder, ())
    errors: list[CacheError] = [] if unlisted is None else unlisted
    return UnitView(name, folder, tuple(_children(folder, errors)))


def status_of(path: str | Path) -> Status | None:
    """Return a status that changes when a file is written; None if there is no such file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a hundred thousand times
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _view_rank(name: RankName, folder: str, files: tuple[str, ...]) -> RankView:
    if MANIFEST_FILE not in files:
        return RankView(name=name, folder=folder, files=files)
    path = f"{folder}/{MANIFEST_FILE}"
    status = status_of(path)  # before reading, so that a later write changes the status
    manifest, problem = None, None
    try:
        data = read_bytes(path)
        if data is None:
            problem = CacheError(f"{path} was removed while it was read. Try again.", path=path)
        else:
            manifest = parse_manifest(data, path=path, name=name)
    except CacheError as error:
        problem = error
    return RankView(name=name, folder=folder, files=files, manifest=manifest, manifest_status=status, problem=problem)


def _children(folder: str, unlisted: list[CacheError], *, follow: bool = False) -> dict[str, os.DirEntry[str]]:
    """Return a folder's children by name; {} if it is missing, a file, or a symlink and `follow` is false."""
    if not follow and os.path.islink(folder):  # noqa: PTH114 - as above
        unlisted.append(_link_error(folder))
        return {}
    try:
        with os.scandir(folder) as children:
            return {child.name: child for child in children}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        unlisted.append(cache_error(error, folder, doing="read"))
        return {}


def _link_error(folder: str) -> CacheError:
    return CacheError(f"{folder} is a link, which cgtool does not follow. Remove it.", path=folder)
