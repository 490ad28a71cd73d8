"""Entries: how a rank folder is published and read, as before or as after and never in between. Must not import torch.

`manifest.json` is the one file that readers start from, and replacing it by a rename is the one moment at which an
entry changes. The manifest names the digests of its folder's other files, each of which lies in one of two places::

    <name>                   plan.json, computation_graph.py, transformed_code.py: what people look at
    .<name>.<sha256>.next    the same content while it is being published

A writer, under the rank's lock:

1. puts artifacts and `key.json` (content-addressed, or the same by construction) in place;
2. writes each file that changed as `.<name>.<sha256>.next`, which clashes with no reader;
3. renames the new `manifest.json` into place: the entry is now the new one;
4. renames each `.next` over its `<name>`.

A reader takes `<name>` if its bytes match the manifest's digest, or else the `.next` of that digest; if neither is
there the manifest has been replaced meanwhile, and it starts over. Killed before 3, the entry is as before; killed
after 3, it is as after, and the next writer does 4. A `.next` that no manifest names was left by a killed writer, and
is removed. Where locks do not work, 4 copies and removes nothing that is not old, so that writers cannot take files
from each other; rows of two simultaneous writers may then be lost, which costs a compile and never a wrong answer.

`artifacts/<sha256>.<kind>` holds exactly the bytes that the name says, or it is corrupt. Equal artifacts of different
pieces, sizes and ranks are one file, and where the file system allows it one file with the unit that it came from.
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
        """Return where an artifact lies, whether it is there or not."""
        return self.folder / f"{check_hash(digest)}.{check_kind(kind)}"

    def has(self, artifact: Artifact) -> bool:
        """Return whether an artifact is in place, by its size, without reading it.

        Raises:
            CacheError: It cannot be looked at. To call it absent would have a writer drop the rows that name it.
        """
        path = self.path(artifact.digest, artifact.kind)
        with os_errors_as_cache_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return path.stat().st_size == artifact.size_bytes
        return False

    def put(self, data: bytes, kind: str) -> str:
        """Store an artifact and return its digest; an intact one that is there already is kept."""
        digest = sha256_hex(data)
        path = self.path(digest, kind)
        if not _holds(path, digest):
            write_atomic(path, data, mode=ARTIFACT_MODE)
        return digest

    def get(self, digest: str, kind: str) -> bytes:
        """Return an artifact's bytes, which match their digest.

        Open what is returned and never the path again: the file may change between the two.
        """
        return read_matching(self.path(digest, kind), digest)

    def link_from(self, source: Path, digest: str, kind: str) -> None:
        """Take over an artifact from another place of the same cache: a hard link where possible, else a copy."""
        path = self.path(digest, kind)
        if _holds(path, digest):
            return
        data = read_matching(source, digest)
        ensure_folder(self.folder)
        try:
            os.link(source, path)
        except FileExistsError:  # another process was faster, or a corrupt file is in the way
            if not _holds(path, digest):
                write_atomic(path, data, mode=ARTIFACT_MODE)
        except OSError as error:  # another file system, no links there, or too many of them
            _log.debug("copying %s: %s", source.name, error)
            write_atomic(path, data, mode=ARTIFACT_MODE)
        else:
            sync_folder(self.folder)


def _holds(path: Path, digest: str) -> bool:
    """Whether a file is there and intact; a corrupt one is to be replaced."""
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
#: How often a reader starts over while writers replace the manifest; each time takes them several flushes of the disk.
_ATTEMPTS = 20


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent view of one rank and prefix, as it was at one moment, with the files that were asked for."""

    manifest: Manifest
    files: Mapping[str, bytes]
    objects: ObjectStore

    @property
    def name(self) -> RankName:
        """The hash, rank and prefix."""
        return self.manifest.name

    def artifact(self, artifact: Artifact) -> bytes:
        """Return the bytes of an artifact, which match their digest."""
        return self.objects.get(artifact.digest, artifact.kind)

    def artifacts(self, artifacts: Iterable[Artifact]) -> dict[str, bytes]:
        """Return the bytes of artifacts by digest, each read once."""
        found: dict[str, bytes | Exception] = {}

        def read(some: Sequence[Artifact]) -> None:
            for artifact in some:
                try:
                    found[artifact.digest] = self.artifact(artifact)
                except Exception as error:  # noqa: BLE001 - raised below, whichever thread met it
                    found[artifact.digest] = error

        distinct = list({artifact.digest: artifact for artifact in artifacts}.values())
        on_two_threads(read, distinct)
        for result in found.values():
            if isinstance(result, Exception):
                raise result
        return {digest: data for digest, data in found.items() if isinstance(data, bytes)}


def read_entry(
    layout: CacheLayout, name: RankName, *, files: Iterable[str] = (PLAN_FILE,), manifest: bytes | None = None
) -> Entry | None:
    """Return an entry with the files that were asked for, or None when there is none.

    A manifest whose bytes are given is the only one that is taken.
    """
    wanted = tuple(files)
    folder = layout.rank_dir(name)
    given = None if manifest is None else parse_manifest(manifest, path=layout.manifest_file(name), name=name)
    earlier = given
    for _ in range(_ATTEMPTS):
        current = read_manifest(layout, name) if given is None else given
        if current is None:
            return None
        found = {file: _read_file(folder, file, current) for file in wanted}
        complete = {file: data for file, data in found.items() if data is not None}
        if len(complete) == len(wanted):
            return Entry(manifest=current, files=complete, objects=ObjectStore(layout.entry_dir(name.hash)))
        if current == earlier:
            raise _broken(folder, current, next(file for file in wanted if file not in complete))
        earlier = current
    raise CacheError(f"{folder} kept changing while it was read. Try again.", path=folder)


def entry_with_plan(layout: CacheLayout, name: RankName) -> tuple[Entry, Plan]:
    """Return an entry, which must be there, and its plan."""
    entry, folder = read_entry(layout, name), layout.rank_dir(name)
    if entry is None:
        raise CacheError(f"Entry {short(name.hash)} was removed meanwhile. Look again.", path=folder)
    return entry, parse_plan(entry.files[PLAN_FILE], path=folder / PLAN_FILE)


class EntryWriter:
    """Writes one rank and prefix of one entry."""

    def __init__(self, layout: CacheLayout, key: Key, *, rank: int, prefix: str) -> None:
        self._layout = layout
        self._key = key
        self.name = RankName(hash=key.hash, rank=rank, prefix=prefix)
        self.objects = ObjectStore(layout.entry_dir(self.name.hash))
        # From here on artifacts are put in place that no manifest names yet: prune must leave them alone.
        self._lease = hold_writing(layout, self.name.hash)

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
        """Publish a whole entry and return its manifest; the artifacts of its rows must be in `objects` by now.

        Where another process published the same plan meanwhile, its rows are kept beside ours. The manifest's `files`
        are filled in here, and `plan.json` must be among them.
        """
        if PLAN_FILE not in files:
            raise CacheError(f"An entry needs its {PLAN_FILE}. Please report this.", path=self.name.flat)

        def change(entry: Entry | None) -> tuple[Manifest, Mapping[str, bytes]]:
            if entry is None or entry.manifest.files.get(PLAN_FILE) != FileRecord.of(files[PLAN_FILE]):
                return manifest, files
            kept = [row for row in entry.manifest.rows if self.objects.has(row.artifact)]
            theirs = entry.manifest
            ours = replace(manifest, rows=tuple(kept), fallbacks=theirs.fallbacks, created=theirs.created)
            return ours.with_rows(manifest.rows, manifest.fallbacks), files

        return self.update(change)

    def add_rows(
        self, rows: Iterable[Row], fallbacks: Iterable[Fallback] = (), variants: Sequence[VariantCounts] = ()
    ) -> Manifest:
        """Add rows to an entry that is there; rows that other processes added meanwhile are kept.

        No `variants` leave what is said of them as it is.

        Raises:
            CacheError: There is no such entry, it cannot be written, or an artifact is not in place.
        """
        added, fallen = tuple(rows), tuple(fallbacks)

        def change(entry: Entry | None) -> tuple[Manifest, Mapping[str, bytes]]:
            if entry is None:
                path = self._layout.rank_dir(self.name)
                raise CacheError(f"There is no intact entry in {path} to add to. Warm the model again.", path=path)
            manifest = entry.manifest.with_rows(added, fallen)
            return replace(manifest, variants=tuple(variants) or manifest.variants), {}

        return self.update(change)

    def update(self, change: Callable[[Entry | None], tuple[Manifest, Mapping[str, bytes]]]) -> Manifest:
        """Replace an entry by what `change` makes of it, under its lock; return the manifest that was published.

        `change` takes what is there, None where that is nothing intact, and returns the new manifest and the files that
        are new; those that it does not give stay as they are.

        Raises:
            CacheSchemaError: A newer version of cgtool wrote what is there.
            CacheError: It cannot be written, or an artifact is not in place.
        """
        from cgtool.store.key import write_key  # who reads needs neither
        from cgtool.store.lock import file_lock

        ensure_root(self._layout.root)
        with file_lock(self._layout.entry_lock(self.name)) as is_held:
            write_key(self._layout, self._key)
            entry = self._current()
            manifest, files = change(entry)
            kept = {} if entry is None else dict(entry.manifest.files)
            named = {**kept, **{name: FileRecord.of(data) for name, data in files.items()}}
            manifest = replace(manifest.with_rows(()), files=named)  # in order
            self._check(manifest)
            self._commit(manifest, files, entry)
            self._settle(exclusive=is_held)
        from cgtool.store.pruned import sweep_trash  # a load does without

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
                "A manifest was given to the writer of another entry. Please report this.",
                expected=self.name.flat,
                actual=manifest.name.flat,
            )
        for row in manifest.rows:
            if not self.objects.has(row.artifact):
                path = self.objects.path(row.artifact.digest, row.artifact.kind)
                raise CacheError(f"{path} is named by a manifest and is not in place. Warm the model again.", path=path)

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

    def _settle(self, *, exclusive: bool) -> None:
        """Give the files that the manifest in place names the names that people look for, and remove leftovers."""
        folder = self._layout.rank_dir(self.name)
        manifest = read_manifest(self._layout, self.name)
        named = {} if manifest is None else {name: record.sha256 for name, record in manifest.files.items()}
        with os_errors_as_cache_errors(folder):
            paths = list(folder.iterdir())
        for path in paths:
            match = re.fullmatch(NEXT, path.name)
            if match is None:
                continue
            current = named.get(match["name"]) == match["digest"]
            with contextlib.suppress(OSError):
                if current and exclusive:
                    path.replace(folder / match["name"])
                elif current:
                    write_atomic(folder / match["name"], path.read_bytes())
                elif exclusive or time.time() - path.stat().st_mtime > _ABANDONED_SECS:
                    path.unlink()
        sync_folder(folder)
        sweep(folder)


def _next(folder: Path, name: str, digest: str) -> Path:
    return folder / f".{name}.{digest}.next"


def _read_file(folder: Path, name: str, manifest: Manifest) -> bytes | None:
    """The bytes of a file as the manifest names it, from either of its two places; None when neither has them."""
    record = manifest.files.get(name)
    if record is None:
        return None
    # the first place again: a writer may have renamed the other one over it meanwhile
    for path in (folder / name, _next(folder, name, record.sha256), folder / name):
        data = read_bytes(path)
        if data is not None and sha256_hex(data) == record.sha256:
            return data
    return None


def _broken(folder: Path, manifest: Manifest, name: str) -> CacheCorruptError:
    path = folder / name
    record = manifest.files.get(name)
    if record is None:
        return corrupt_error(path, "the manifest does not name it")
    data = read_bytes(path)
    if data is None:
        return corrupt_error(path, "the manifest names it and it is missing", expected=record.sha256)
    return corrupt_error(path, "its bytes do not match its digest", expected=record.sha256, actual=sha256_hex(data))
