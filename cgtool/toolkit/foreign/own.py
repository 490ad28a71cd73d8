"""cgtool's own cache in the words of the readers: `toolkit.scan` looks, this translates. Must not import torch."""

from __future__ import annotations

from pathlib import Path

from cgtool.errors import CacheError
from cgtool.store.layout import CACHE_FOLDER, KEY_FILE, CacheLayout, is_hash, resolve_root
from cgtool.store.records import Manifest, Row
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignCache, ForeignEntry
from cgtool.toolkit.foreign.tree import opened
from cgtool.toolkit.listing import CacheListing, EntryListing
from cgtool.toolkit.scan import scan

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
    manifest = entry.manifest
    there = listing.files.get(manifest.hash, {})
    return ForeignEntry(
        name=manifest.hash,
        kind="model",
        path=CacheLayout(root=listing.root).rank_dir(manifest.name),
        artifacts=tuple(_artifact(row, manifest, is_there=row.artifact.file in there) for row in manifest.rows),
        size_bytes=entry.size_bytes,
        num_files=len(entry.artifact_files) + 1,
        created=manifest.created,
        last_used=entry.usage.last_used,
        ranks=(str(manifest.rank),),
        prefixes=(manifest.prefix,),
        deletable=False,
        why_not="its ranks share artifacts; use cgtool prune",
    )


def _artifact(row: Row, manifest: Manifest, *, is_there: bool) -> ForeignArtifact:
    return ForeignArtifact(
        path=f"artifacts/{row.artifact.file}",
        what=row.adaptor,
        size_bytes=row.artifact.size_bytes if is_there else 0,
        rank=str(manifest.rank),
        prefix=manifest.prefix,
        shape=row.shape,
        piece_index=row.piece_index,
        holds_pickle=row.artifact.kind in _PICKLES,
        problems=() if is_there else ("the manifest names it and it is missing",),
    )
