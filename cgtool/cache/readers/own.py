"""cgtool's own cache in the words of the readers: `cgtool.cache.scan` looks, this translates. Must not import torch."""

from __future__ import annotations

from pathlib import Path

from cgtool.cache.layout import CACHE_FOLDER, KEY_FILE, CacheLayout, RankName, is_hash, resolve_root
from cgtool.cache.listing import CacheListing, EntryListing
from cgtool.cache.readers.records import ForeignArtifact, ForeignCache, ForeignEntry
from cgtool.cache.readers.tree import opened
from cgtool.cache.rows import ArtifactListing
from cgtool.cache.scan import scan
from cgtool.errors import CacheError

_OWN_FOLDERS = ("units", "lookup", "state")
_MARK = b"a cache of cgtool"
_TAG_BYTES = 512
#: Kinds of artifacts that torch unpickles: those of the adaptors "inductor" and "inductor_standalone".
_PICKLES = ("mega", "aot")


def is_own(path: Path) -> bool:
    """Return whether cgtool keeps its cache in a folder: a root, or the `torch_compile_cache` in one."""
    root = resolve_root(path)
    layout = CacheLayout(root=root)
    try:
        with opened(layout.tag) as stream:
            if _MARK in stream.read(_TAG_BYTES):
                return True
    except (CacheError, OSError):
        pass
    try:
        names = [child.name for child in layout.base.iterdir()]
    except OSError:
        return False
    if any(is_hash(name) and _is_file(layout.base / name / KEY_FILE) for name in names):
        return True
    return len(set(names) & set(_OWN_FOLDERS)) > 1


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # in a folder that may not be read
        return False


def read_own(path: Path) -> ForeignCache:
    """Return what a cache of cgtool's holds.

    Args:
        path: Its root, or the `torch_compile_cache` in it.

    Raises:
        CacheError: It cannot be listed.
    """
    listing = scan(resolve_root(path))
    return ForeignCache(
        system="cgtool",
        version=None,
        root=listing.root / CACHE_FOLDER,
        entries=tuple(_entry(listing, entry) for entry in listing.entries),
        size_bytes=listing.size_bytes,
        warnings=listing.warnings,
        deletion="Use `cgtool prune`: it spares what live processes use.",
    )


def _entry(listing: CacheListing, entry: EntryListing) -> ForeignEntry:
    name = RankName(hash=entry.hash, rank=entry.rank, prefix=entry.prefix)
    there = listing.files.get(entry.hash, {})
    by_digest = {file.partition(".")[0]: file for file in there}
    return ForeignEntry(
        name=entry.hash,
        kind="model",
        path=CacheLayout(root=listing.root).rank_dir(name),
        artifacts=tuple(
            _artifact(artifact, by_digest.get(artifact.digest), entry, piece)
            for artifact in entry.artifacts
            for piece in artifact.piece_index
        ),
        size_bytes=entry.size_bytes,
        num_files=len(entry.artifact_files) + 1,
        created=entry.created,
        last_used=entry.last_used,
        ranks=(str(entry.rank),),
        prefixes=(entry.prefix,),
        deletable=False,
        why_not="its ranks share artifacts; use cgtool prune",
    )


def _artifact(artifact: ArtifactListing, file: str | None, entry: EntryListing, piece: int) -> ForeignArtifact:
    return ForeignArtifact(
        path=f"artifacts/{file or artifact.digest}",
        what=artifact.adaptor,
        size_bytes=0 if file is None else artifact.size_bytes,
        rank=str(entry.rank),
        prefix=entry.prefix,
        shape=artifact.shape,
        piece_index=piece,
        holds_pickle=(file or "").partition(".")[2] in _PICKLES,
        problems=() if file is not None else ("the manifest names it and it is missing",),
    )
