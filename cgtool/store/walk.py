"""The walk through a cache: each entry with its ranks and artifacts, as they lie. No torch; writes nothing.

Folders are listed, manifests are read and matched to their grammar and seal, and nothing else is opened. What cannot be
listed, read or trusted is a problem of the view and no error, so that one bad file hides no other. The folder of an
entry may be a link; a link below it is not followed, for what is behind it is not the cache's. Paths are plain text and
each folder is read once, for a cache may hold 100,000 artifacts.
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

#: When a file was written, in nanoseconds since the epoch, and its size in bytes.
Status = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RankView:
    """One rank and prefix of an entry."""

    name: RankName
    folder: str
    #: The names in its folder.
    files: tuple[str, ...]
    #: None where there is none that can be read and trusted.
    manifest: Manifest | None = None
    #: Of the manifest's file.
    manifest_status: Status | None = None
    #: Why there is a manifest and it cannot be read or trusted.
    problem: CacheError | None = None

    @property
    def has_manifest(self) -> bool:
        """Whether there is a manifest, whatever is in it: a warm came to its end."""
        return self.manifest is not None or self.problem is not None

    @property
    def created(self) -> float | None:
        """When it was first published, seconds since the epoch; as far as the disk knows where its manifest is bad."""
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
    #: Artifact's file name → its inode: which file of the disk it is.
    artifacts: Mapping[str, int]
    #: What of it could not be listed, and why.
    unlisted: tuple[CacheError, ...]

    @property
    def problems(self) -> tuple[CacheError, ...]:
        """Everything that could not be listed, read or trusted."""
        return (*self.unlisted, *(rank.problem for rank in self.ranks if rank.problem is not None))

    @property
    def is_readable(self) -> bool:
        """Whether all of it is known, so that something may be concluded from what it does not name."""
        return not self.is_link and not self.problems

    @property
    def is_finished(self) -> bool:
        """Whether any rank has a manifest."""
        return any(rank.has_manifest for rank in self.ranks)

    @property
    def is_newer(self) -> bool:
        """Whether a newer version of cgtool wrote any of it."""
        return any(isinstance(error, CacheSchemaError) and is_newer(error) for error in self.problems)

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The manifests that can be trusted."""
        return tuple(rank.manifest for rank in self.ranks if rank.manifest is not None)

    @property
    def model(self) -> str:
        """What people call the model; "" where no manifest says it."""
        return next((manifest.model for manifest in self.manifests if manifest.model), "")

    @property
    def created(self) -> float | None:
        """When the last of its ranks was made, seconds since the epoch; None where that is not known."""
        return max((rank.created for rank in self.ranks if rank.created is not None), default=None)

    @property
    def lookup(self) -> tuple[str, ...]:
        """The digests of cheap facts that lead to it."""
        return tuple(dict.fromkeys(digest for manifest in self.manifests for digest in manifest.lookup))

    @property
    def named(self) -> frozenset[str]:
        """The file names of the artifacts that its manifests name."""
        return frozenset(row.artifact.file for manifest in self.manifests for row in manifest.rows)

    def without_rows(self, *, artifacts: bool = True) -> EntryView:
        """Return the view with manifests that name no artifacts: a hundred thousand rows take a hundred megabytes."""
        ranks = (
            rank if rank.manifest is None else replace(rank, manifest=structs.replace(rank.manifest, rows=()))
            for rank in self.ranks
        )
        return replace(self, ranks=tuple(ranks), artifacts=self.artifacts if artifacts else {})


def walk(layout: CacheLayout) -> Iterator[EntryView]:
    """Yield every entry of a cache, by hash.

    Raises:
        CacheError: The cache folder itself cannot be listed.
    """
    for hash_ in layout.hashes():
        yield view_entry(layout, hash_)


def view_entry(layout: CacheLayout, hash_: str) -> EntryView:
    """Return one entry; one that is not there holds nothing."""
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
                ranks.append(_rank(name, inner, tuple(_children(inner, unlisted))))
            else:
                unlisted.append(_link(inner))
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
    """What lies among the units; the key, its folder's name, is "" of what is no unit."""

    key: str
    folder: str
    files: tuple[str, ...]


def walk_units(layout: CacheLayout, unlisted: list[CacheError]) -> Iterator[UnitView]:
    """Yield every unit of a cache that can be listed, by key; `unlisted` gets an error for each other folder."""
    base = str(layout.units_dir)
    for shard in sorted(_children(base, unlisted)):
        for name in sorted(_children(f"{base}/{shard}", unlisted)):
            errors: list[CacheError] = []
            unit = view_unit(f"{base}/{shard}/{name}", errors)
            unlisted += errors
            if not errors:
                yield unit


def view_unit(folder: str, unlisted: list[CacheError] | None = None) -> UnitView:
    """Return what lies in a unit's folder; nothing where that is missing, or cannot be listed."""
    shard, name = folder.split("/")[-2:]
    if not (is_hash(name) and name.startswith(shard)):
        return UnitView("", folder, ())
    errors: list[CacheError] = [] if unlisted is None else unlisted
    return UnitView(name, folder, tuple(_children(folder, errors)))


def status_of(path: str | Path) -> Status | None:
    """Return what tells whether a file was written since; None where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - a hundred thousand times
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _rank(name: RankName, folder: str, files: tuple[str, ...]) -> RankView:
    if MANIFEST_FILE not in files:
        return RankView(name=name, folder=folder, files=files)
    path = f"{folder}/{MANIFEST_FILE}"
    status = status_of(path)  # what is written after that is news
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
    """What is in a folder, by name; nothing in one that is missing, a file, or a link that is not to be followed."""
    if not follow and os.path.islink(folder):  # noqa: PTH114 - as above
        unlisted.append(_link(folder))
        return {}
    try:
        with os.scandir(folder) as found:
            return {child.name: child for child in found}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        unlisted.append(cache_error(error, folder, doing="read"))
        return {}


def _link(folder: str) -> CacheError:
    return CacheError(f"{folder} is a link, which cgtool does not follow. Remove it.", path=folder)
