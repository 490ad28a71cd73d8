"""Entries: publishing and reading a rank folder atomically. Must not import torch.

`manifest.json` is the only file that readers start from, and an entry changes at the single moment when a rename
replaces it. The manifest names the digests of the other files in its folder, each of which is in one of two places::

    <name>                   plan.json, computation_graph.py, transformed_code.py: the names that people look for
    .<name>.<sha256>.next    the same content while it is being published

A writer holds the rank's lock and

1. puts artifacts and `key.json` (content-addressed, or the same by construction) in place;
2. writes each changed file as `.<name>.<sha256>.next`, a name that conflicts with no reader;
3. renames the new `manifest.json` into place, which publishes the new version of the entry;
4. renames each `.next` over its `<name>`.

A reader uses `<name>` if its bytes match the manifest's digest, or else the `.next` with that digest. If neither
exists, the manifest has been replaced in the meantime and the reader starts over. A writer killed before step 3 leaves
the old version; one killed after step 3 leaves the new version, and the next writer performs step 4. A `.next` that no
manifest names was left by a killed writer and is removed. Where locks do not work, step 4 copies files and removes only
old ones, so that writers cannot take files from each other; rows of two simultaneous writers may then be lost, which
costs a recompile but never gives a wrong result.

`artifacts/<sha256>.<kind>` must contain exactly the bytes that its name promises, or it is corrupt. Equal artifacts of
different pieces, sizes and ranks share one file and, if the file system supports hard links, the file of their unit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from cgtool.errors import CacheCorruptError, CacheError, CacheSchemaError
from cgtool.host import on_two_threads
from cgtool.plan.grammar import sha256_hex
from cgtool.plan.records import Plan, parse_plan
from cgtool.store.files import (
    ARTIFACT_MODE,
    corrupt_error,
    ensure_folder,
    ensure_root,
    is_newer,
    os_errors_as_cache_errors,
    read_bytes,
    read_matching,
    sweep,
    sync_folder,
    write_atomic,
)
from cgtool.store.layout import ARTIFACTS, PLAN_FILE, CacheLayout, RankName, check_hash, check_kind, short
from cgtool.store.leases import hold_writing
from cgtool.store.lookup import LookupStore
from cgtool.store.records import (
    Artifact,
    Fallback,
    FileRecord,
    Key,
    Manifest,
    Row,
    VariantCounts,
    parse_manifest,
    read_manifest,
)

_log = logging.getLogger(__name__)


class ObjectStore:
    """The `artifacts` folder of one entry."""

    def __init__(self, entry_dir: Path) -> None:
        self.folder = entry_dir / ARTIFACTS

    def path(self, digest: str, kind: str) -> Path:
        """Return the path of an artifact, which need not exist."""
        return self.folder / f"{check_hash(digest)}.{check_kind(kind)}"

    def has(self, artifact: Artifact) -> bool:
        """Return whether an artifact is in place, judging by its size without reading it.

        Raises:
            CacheError: Its status is unknown. Treating it as absent would make a writer drop the rows that name it.
        """
        path = self.path(artifact.digest, artifact.kind)
        with os_errors_as_cache_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return path.stat().st_size == artifact.size_bytes
        return False

    def put(self, data: bytes, kind: str) -> str:
        """Store an artifact and return its digest; an existing intact file is kept."""
        digest = sha256_hex(data)
        path = self.path(digest, kind)
        if not _is_intact(path, digest):
            write_atomic(path, data, mode=ARTIFACT_MODE)
        return digest

    def get(self, digest: str, kind: str) -> bytes:
        """Return an artifact's verified bytes.

        Use the returned bytes and do not open the path again: the file may have changed since.
        """
        return read_matching(self.path(digest, kind), digest)

    def link_from(self, source: Path, digest: str, kind: str) -> None:
        """Add an artifact from elsewhere in the same cache, as a hard link if possible, else as a copy."""
        path = self.path(digest, kind)
        if _is_intact(path, digest):
            return
        data = read_matching(source, digest)
        ensure_folder(self.folder)
        try:
            os.link(source, path)
        except FileExistsError:  # another process was faster, or the existing file is corrupt
            if not _is_intact(path, digest):
                write_atomic(path, data, mode=ARTIFACT_MODE)
        except OSError as error:  # another file system, links are unsupported, or the file has too many
            _log.debug("copying %s: %s", source.name, error)
            write_atomic(path, data, mode=ARTIFACT_MODE)
        else:
            sync_folder(self.folder)


def _is_intact(path: Path, digest: str) -> bool:
    data = read_bytes(path)
    if data is None:
        return False
    if sha256_hex(data) == digest:
        return True
    _log.warning("%s is corrupt and will be replaced", path)
    return False


#: The name of a file that is being published.
NEXT = r"\.(?P<name>.+)\.(?P<digest>[0-9a-f]{64})\.next"
_ABANDONED_SECS = 3600.0
#: How often a reader starts over while writers replace the manifest; each replacement needs several disk flushes.
_ATTEMPTS = 20


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent snapshot of one rank and prefix, with the requested files."""

    manifest: Manifest
    files: Mapping[str, bytes]
    objects: ObjectStore

    @property
    def name(self) -> RankName:
        """The hash, rank and prefix."""
        return self.manifest.name

    def artifact(self, artifact: Artifact) -> bytes:
        """Return the verified bytes of an artifact."""
        return self.objects.get(artifact.digest, artifact.kind)

    def artifacts(self, artifacts: Iterable[Artifact]) -> dict[str, bytes]:
        """Return the verified bytes of artifacts by digest; each artifact is read once."""
        results: dict[str, bytes | Exception] = {}

        def read(some: Sequence[Artifact]) -> None:
            for artifact in some:
                try:
                    results[artifact.digest] = self.artifact(artifact)
                except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
                    results[artifact.digest] = error

        distinct = list({artifact.digest: artifact for artifact in artifacts}.values())
        on_two_threads(read, distinct)
        for result in results.values():
            if isinstance(result, Exception):
                raise result
        return {digest: data for digest, data in results.items() if isinstance(data, bytes)}


def read_entry(
    layout: CacheLayout, name: RankName, *, files: Iterable[str] = (PLAN_FILE,), manifest: bytes | None = None
) -> Entry | None:
    """Return an entry with the requested files, or None if there is no such entry.

    If the bytes of a manifest are given, no other version of the entry is accepted.
    """
    wanted = tuple(files)
    folder = layout.rank_dir(name)
    pinned = None if manifest is None else parse_manifest(manifest, path=layout.manifest_file(name), name=name)
    previous = pinned
    for _ in range(_ATTEMPTS):
        current = read_manifest(layout, name) if pinned is None else pinned
        if current is None:
            return None
        contents = {file: _read_file(folder, file, current) for file in wanted}
        complete = {file: data for file, data in contents.items() if data is not None}
        if len(complete) == len(wanted):
            return Entry(manifest=current, files=complete, objects=ObjectStore(layout.entry_dir(name.hash)))
        if current == previous:
            raise _file_error(folder, current, next(file for file in wanted if file not in complete))
        previous = current
    raise CacheError(f"{folder} kept changing while it was read. Try again.", path=folder)


def entry_with_plan(layout: CacheLayout, name: RankName) -> tuple[Entry, Plan]:
    """Return an existing entry and its plan."""
    entry, folder = read_entry(layout, name), layout.rank_dir(name)
    if entry is None:
        raise CacheError(f"Entry {short(name.hash)} has just been removed. Try again.", path=folder)
    return entry, parse_plan(entry.files[PLAN_FILE], path=folder / PLAN_FILE)


class EntryWriter:
    """Writes one rank and prefix of one entry."""

    def __init__(self, layout: CacheLayout, key: Key, *, rank: int, prefix: str) -> None:
        self._layout = layout
        self._key = key
        self.name = RankName(hash=key.hash, rank=rank, prefix=prefix)
        self.objects = ObjectStore(layout.entry_dir(self.name.hash))
        # The lease keeps prune from removing artifacts that no manifest names yet.
        self._lease = hold_writing(layout, self.name.hash)

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
        """Publish a whole entry and return its manifest; the artifacts of its rows must be in `objects` already.

        If another process has published the same plan, its rows are kept. This fills in the manifest's `files`;
        `files` must include `plan.json`.
        """
        if PLAN_FILE not in files:
            raise CacheError(f"An entry needs its {PLAN_FILE}. Please report this.", path=self.name.flat)

        def change(entry: Entry | None) -> tuple[Manifest, Mapping[str, bytes]]:
            if entry is None or entry.manifest.files.get(PLAN_FILE) != FileRecord.of(files[PLAN_FILE]):
                return manifest, files
            current = entry.manifest
            rows = tuple(row for row in current.rows if self.objects.has(row.artifact))
            base = replace(manifest, rows=rows, fallbacks=current.fallbacks, created=current.created)
            return base.with_rows(manifest.rows, manifest.fallbacks), files

        return self.update(change)

    def add_rows(
        self, rows: Iterable[Row], fallbacks: Iterable[Fallback] = (), variants: Sequence[VariantCounts] = ()
    ) -> Manifest:
        """Add rows to an existing entry and keep the rows that other processes have added.

        Empty `variants` leave the manifest's variants unchanged.

        Raises:
            CacheError: There is no such entry, it cannot be written, or an artifact is not in place.
        """
        new_rows, new_fallbacks = tuple(rows), tuple(fallbacks)

        def change(entry: Entry | None) -> tuple[Manifest, Mapping[str, bytes]]:
            if entry is None:
                path = self._layout.rank_dir(self.name)
                raise CacheError(f"There is no intact entry in {path} to add rows to. Warm the model again.", path=path)
            manifest = entry.manifest.with_rows(new_rows, new_fallbacks)
            return replace(manifest, variants=tuple(variants) or manifest.variants), {}

        return self.update(change)

    def update(self, change: Callable[[Entry | None], tuple[Manifest, Mapping[str, bytes]]]) -> Manifest:
        """Apply `change` to an entry under its lock, and return the published manifest.

        `change` takes the current entry, or None if there is no intact one, and returns the new manifest and the files
        that are new; other files stay unchanged.

        Raises:
            CacheSchemaError: A newer version of cgtool wrote the current entry.
            CacheError: The entry cannot be written, or an artifact is not in place.
        """
        from cgtool.store.key import write_key  # imported lazily: readers need neither
        from cgtool.store.lock import file_lock

        ensure_root(self._layout.root)
        with file_lock(self._layout.entry_lock(self.name)) as is_held:
            write_key(self._layout, self._key)
            entry = self._current()
            manifest, files = change(entry)
            records = {} if entry is None else dict(entry.manifest.files)
            records.update((name, FileRecord.of(data)) for name, data in files.items())
            manifest = replace(manifest.with_rows(()), files=records)  # with_rows sorts
            self._check(manifest)
            self._commit(manifest, files, entry)
            self._rename_published(exclusive=is_held)
        from cgtool.store.pruned import sweep_trash  # imported lazily: a load does not need it

        sweep_trash(self._layout)
        return manifest

    def _current(self) -> Entry | None:
        try:
            return read_entry(self._layout, self.name, files=())
        except CacheCorruptError as error:
            _log.warning("%s It is replaced.", error)
        except CacheSchemaError as error:
            if is_newer(error):
                raise
        return None

    def _check(self, manifest: Manifest) -> None:
        if manifest.name != self.name:
            raise CacheError(
                "A manifest was passed to the writer of another entry. Please report this.",
                expected=self.name.flat,
                actual=manifest.name.flat,
            )
        for row in manifest.rows:
            if not self.objects.has(row.artifact):
                path = self.objects.path(row.artifact.digest, row.artifact.kind)
                raise CacheError(f"{path} is named by a manifest but missing. Warm the model again.", path=path)

    def _commit(self, manifest: Manifest, files: Mapping[str, bytes], entry: Entry | None) -> None:
        folder = self._layout.rank_dir(self.name)
        lookup = LookupStore(self._layout)
        for name, data in files.items():
            if _read_file(folder, name, manifest) is None:
                write_atomic(_next(folder, name, manifest.files[name].sha256), data)
        if entry is None or entry.manifest.lookup != manifest.lookup:
            lookup.forget(self.name)
        write_atomic(self._layout.manifest_file(self.name), manifest.to_bytes())
        lookup.index(self.name, manifest.lookup)

    def _rename_published(self, *, exclusive: bool) -> None:
        """Rename the `.next` files of the current manifest to their final names, and remove leftovers."""
        folder = self._layout.rank_dir(self.name)
        manifest = read_manifest(self._layout, self.name)
        digests = {} if manifest is None else {name: record.sha256 for name, record in manifest.files.items()}
        with os_errors_as_cache_errors(folder):
            paths = list(folder.iterdir())
        for path in paths:
            match = re.fullmatch(NEXT, path.name)
            if match is None:
                continue
            is_current = digests.get(match["name"]) == match["digest"]
            with contextlib.suppress(OSError):
                if is_current and exclusive:
                    path.replace(folder / match["name"])
                elif is_current:
                    write_atomic(folder / match["name"], path.read_bytes())
                elif exclusive or time.time() - path.stat().st_mtime > _ABANDONED_SECS:
                    path.unlink()
        sync_folder(folder)
        sweep(folder)


def _next(folder: Path, name: str, digest: str) -> Path:
    return folder / f".{name}.{digest}.next"


def _read_file(folder: Path, name: str, manifest: Manifest) -> bytes | None:
    """Return a file's bytes from whichever of its two places matches the manifest, or None."""
    record = manifest.files.get(name)
    if record is None:
        return None
    # Try the first place twice: a writer may have renamed the second over it in the meantime.
    for path in (folder / name, _next(folder, name, record.sha256), folder / name):
        data = read_bytes(path)
        if data is not None and sha256_hex(data) == record.sha256:
            return data
    return None


def _file_error(folder: Path, manifest: Manifest, name: str) -> CacheCorruptError:
    path = folder / name
    record = manifest.files.get(name)
    if record is None:
        return corrupt_error(path, "the manifest does not name it")
    data = read_bytes(path)
    if data is None:
        return corrupt_error(path, "the manifest names it but it is missing", expected=record.sha256)
    return corrupt_error(path, "its bytes do not match its digest", expected=record.sha256, actual=sha256_hex(data))
