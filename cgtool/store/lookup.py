"""The direct-mode lookup, and what is known of hits: from cheap facts to the entries worth a closer look. No torch.

`lookup/<digest>/<hash>` is an empty file for each entry that cheap facts with this digest may mean, touched when the
entry is published. A manifest carries its own digests, so all of this can be made again:
`lookup/indexed/<hash>-rank_<i>-<prefix>` marks the manifests that were taken in, and any other (copied in from
elsewhere, left by a killed process, or all of them after `lookup/` was removed) is taken in when somebody finds nothing
among what is marked. On a read-only cache this happens in memory, each time.

A candidate is a hint: whether it is a hit is for its factors and guards to say.

`state/used/<hash>-rank_<i>-<prefix>` grows by one byte a hit, so its size is the number of hits and its modification
time the last use: one append, which needs no lock. A cache that is read-only or full simply is not stamped.
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
        """Let a digest of cheap facts lead to an entry."""
        touch(self._layout.lookup_dir / check_hash(digest) / check_hash(hash_))

    def index(self, name: RankName, digests: Iterable[str]) -> None:
        """Take in a manifest: all its digests, and then the mark that it was taken in."""
        for digest in digests:
            self.add(digest, name.hash)
        touch(self._layout.lookup_dir / "indexed" / name.flat)

    def forget(self, name: RankName) -> None:
        """Remove the mark of a manifest that is about to change, so that it is taken in again whatever happens."""
        remove(self._layout.lookup_dir / "indexed" / name.flat)

    def lost(self, manifest: Manifest) -> tuple[Path, ...]:
        """Return the marks that should lead to a manifest and are gone, while the mark that it was taken in is there.

        No load finds such an entry. Without that last mark the next load takes it in, and nothing is lost.
        """
        if not os.path.lexists(self._layout.lookup_dir / "indexed" / manifest.name.flat):
            return ()
        marks = (self._layout.lookup_dir / check_hash(digest) / manifest.hash for digest in manifest.lookup)
        return tuple(mark for mark in marks if not os.path.lexists(mark))

    def candidates(self, digest: str) -> Iterator[str]:
        """Yield the hashes of the entries that a digest of cheap facts may mean, those marked last first.

        The marks are all that is read for these. Whoever is content with none of them goes on, and only then is the
        whole cache walked for manifests that were not taken in yet.

        Never raises on account of a lookup that is missing, torn or read-only; one that cannot be read is no miss.

        Raises:
            CacheError: The cache folder or the lookup cannot be listed.
        """
        marked = self._marked(digest)
        yield from marked
        # In one go: while a caller looks at one, another process may remove the next.
        found = {manifest.hash for manifest in self._newcomers() if digest in manifest.lookup}
        yield from sorted(found.difference(marked))

    def _marked(self, digest: str) -> list[str]:
        folder = self._layout.lookup_dir / check_hash(digest)
        marks: list[os.DirEntry[str]] = []
        # One that cannot be listed is no miss: the model would be compiled again, whatever the disk has.
        with (
            os_errors_as_cache_errors(folder),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(folder) as found,
        ):
            known = [mark for mark in found if is_hash(mark.name) and self._layout.key_file(mark.name).exists()]
            marks = sorted(known, key=lambda mark: (mark.stat(follow_symlinks=False).st_mtime_ns, mark.name))
        return [mark.name for mark in reversed(marks)]

    def _newcomers(self) -> Iterator[Manifest]:
        """Yield the manifests that were not taken in yet, and take them in."""
        indexed = set(names_in(self._layout.lookup_dir / "indexed"))
        for hash_ in self._layout.hashes():
            for name in self._layout.rank_names(hash_):
                if name.flat not in indexed and (manifest := self._manifest(name)) is not None:
                    yield manifest

    def _manifest(self, name: RankName) -> Manifest | None:
        try:
            manifest = read_manifest(self._layout, name)
        except CacheError as error:  # whoever opens this entry says so to the user
            _log.debug("not taken into the lookup: %s", error)
            return None
        if manifest is not None:
            try:
                self.index(name, manifest.lookup)
            except CacheError as error:
                _log.debug("the lookup could not be written: %s", error)
        return manifest


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """How often an entry was loaded, and when last, in UTC."""

    hits: int = 0
    last_used: str | None = None


class StateStore:
    """The stamps of one cache. No method raises on account of the disk."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout

    def record_hit(self, name: RankName) -> None:
        """Count one load of an entry, if the cache can be written to."""
        path = self._layout.used_file(name)
        with contextlib.suppress(OSError):
            try:
                _append(str(path))
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                _append(str(path))

    def stamps(self) -> dict[str, tuple[int, int]]:
        """Return when each rank and prefix was loaded last, in ns since the epoch, and how often, by its flat name."""
        found: dict[str, tuple[int, int]] = {}
        with contextlib.suppress(OSError), os.scandir(self._layout.state_dir / "used") as stamps:
            for stamp in stamps:
                with contextlib.suppress(OSError):
                    status = stamp.stat()
                    found[stamp.name] = status.st_mtime_ns, status.st_size
        return found

    def usage(self, name: RankName) -> Usage:
        """Return how an entry was used; never used where nothing is known."""
        try:
            status = self._layout.used_file(name).stat()
        except OSError:
            return Usage()
        return Usage(hits=status.st_size, last_used=timestamp(status.st_mtime))


def _append(path: str) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | SAFE_OPEN_FLAGS
    with open_descriptor(os.open, path, flags, RECORD_MODE) as descriptor:
        os.write(descriptor, b".")
