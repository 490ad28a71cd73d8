"""The direct-mode lookup, which leads from cheap facts to candidate entries, and hit counters. Must not import torch.

`lookup/<digest>/<hash>` is an empty file that makes an entry a candidate for the facts with this digest. It is touched
when the entry is published. Manifests contain their lookup digests, so the index can be rebuilt:
`lookup/indexed/<hash>-rank_<i>-<prefix>` marks the indexed manifests, and all others (copied from elsewhere, left by a
killed process, or all of them after `lookup/` was removed) are indexed when no candidate is a hit. For a read-only
cache this happens in memory, on each lookup.

A candidate is only a hint: its factors and guards decide whether it is a hit.

`state/used/<hash>-rank_<i>-<prefix>` grows by one byte per hit, so its size is the number of hits and its modification
time is the time of last use. An append needs no lock. Hits of a read-only or full cache are not counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from cgtool.errors import CacheError
from cgtool.store.files import (
    RECORD_MODE,
    SAFE_OPEN_FLAGS,
    names_in,
    open_descriptor,
    os_errors_as_cache_errors,
    remove,
    touch,
)
from cgtool.store.layout import CacheLayout, RankName, check_hash, is_hash
from cgtool.store.records import Manifest, read_manifest, timestamp

_log = logging.getLogger(__name__)


class LookupStore:
    """The lookup of one cache."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout

    def add(self, digest: str, hash_: str) -> None:
        """Make an entry a candidate for a lookup digest."""
        touch(self._layout.lookup_dir / check_hash(digest) / check_hash(hash_))

    def index(self, name: RankName, digests: Iterable[str]) -> None:
        """Index a manifest: add its digests, then mark it as indexed."""
        for digest in digests:
            self.add(digest, name.hash)
        touch(self._layout.lookup_dir / "indexed" / name.flat)

    def forget(self, name: RankName) -> None:
        """Unmark a manifest that is about to change, so that it is indexed again even if this process is killed."""
        remove(self._layout.lookup_dir / "indexed" / name.flat)

    def lost(self, manifest: Manifest) -> tuple[Path, ...]:
        """Return the missing lookup files of a manifest that is marked as indexed; () if it is not marked.

        Loads cannot find such an entry. An unmarked manifest loses nothing, because the next load indexes it.
        """
        if not os.path.lexists(self._layout.lookup_dir / "indexed" / manifest.name.flat):
            return ()
        marks = (self._layout.lookup_dir / check_hash(digest) / manifest.hash for digest in manifest.lookup)
        return tuple(mark for mark in marks if not os.path.lexists(mark))

    def candidates(self, digest: str) -> Iterator[str]:
        """Yield the hashes of the candidate entries for a lookup digest, most recently published first.

        Indexed candidates come first and need only the lookup files. If the caller continues past them, the whole cache
        is walked for manifests that are not indexed yet.

        A lookup folder that is missing, incomplete or read-only is not an error.

        Raises:
            CacheError: The cache folder or the lookup folder cannot be listed. That is not a miss, which would make the
                caller compile an entry that the cache may already contain.
        """
        indexed = self._indexed(digest)
        yield from indexed
        # Walk to the end before yielding: another process may remove entries while the caller checks a candidate.
        new = {manifest.hash for manifest in self._index_new() if digest in manifest.lookup}
        yield from sorted(new.difference(indexed))

    def _indexed(self, digest: str) -> list[str]:
        folder = self._layout.lookup_dir / check_hash(digest)
        marks: list[os.DirEntry[str]] = []
        with (
            os_errors_as_cache_errors(folder),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(folder) as children,
        ):
            known = [mark for mark in children if is_hash(mark.name) and self._layout.key_file(mark.name).exists()]
            marks = sorted(known, key=lambda mark: (mark.stat(follow_symlinks=False).st_mtime_ns, mark.name))
        return [mark.name for mark in reversed(marks)]

    def _index_new(self) -> Iterator[Manifest]:
        """Index the manifests that are not indexed yet, and yield them."""
        indexed = set(names_in(self._layout.lookup_dir / "indexed"))
        for hash_ in self._layout.hashes():
            for name in self._layout.rank_names(hash_):
                if name.flat not in indexed and (manifest := self._index_manifest(name)) is not None:
                    yield manifest

    def _index_manifest(self, name: RankName) -> Manifest | None:
        try:
            manifest = read_manifest(self._layout, name)
        except CacheError as error:  # reported to the user when the entry is opened
            _log.debug("not indexed: %s", error)
            return None
        if manifest is not None:
            try:
                self.index(name, manifest.lookup)
            except CacheError as error:
                _log.debug("the lookup could not be written: %s", error)
        return manifest


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """How often an entry was loaded, and the time of its last load in UTC."""

    hits: int = 0
    last_used: str | None = None


class StateStore:
    """The hit counters of one cache. No method raises `OSError`."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout

    def record_hit(self, name: RankName) -> None:
        """Count one load of an entry, if the cache is writable."""
        path = self._layout.used_file(name)
        with contextlib.suppress(OSError):
            try:
                _append(str(path))
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                _append(str(path))

    def stamps(self) -> dict[str, tuple[int, int]]:
        """Return (time of last load in ns since the epoch, number of loads) by the flat name of a rank and prefix."""
        stamps: dict[str, tuple[int, int]] = {}
        with contextlib.suppress(OSError), os.scandir(self._layout.state_dir / "used") as files:
            for file in files:
                with contextlib.suppress(OSError):
                    status = file.stat()
                    stamps[file.name] = status.st_mtime_ns, status.st_size
        return stamps

    def usage(self, name: RankName) -> Usage:
        """Return an entry's usage; unused if nothing is known."""
        try:
            status = self._layout.used_file(name).stat()
        except OSError:
            return Usage()
        return Usage(hits=status.st_size, last_used=timestamp(status.st_mtime))


def _append(path: str) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | SAFE_OPEN_FLAGS
    with open_descriptor(os.open, path, flags, RECORD_MODE) as descriptor:
        os.write(descriptor, b".")
