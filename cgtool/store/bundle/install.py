"""Installing an unpacked and verified bundle in a cache. Must not import torch.

A new entry is renamed into place as a whole. An existing entry is merged: artifacts by content, then each rank by
`EntryWriter`, under its lock and with one rename. If the process is killed, each entry is either unchanged or complete.
Existing rows are kept; the bundle's rows are added to them.

A bundle is unpacked and verified in `torch_compile_cache/.import.<pid>.<token>.tmp/`, a separate cache root that no
reader opens. The importing process locks that folder; an unlocked one was left by a killed process, and the next import
removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from cgtool.errors import CacheCorruptError, CacheError, CacheSchemaError, RefusedError
from cgtool.host import closing
from cgtool.plan.grammar import sha256_hex
from cgtool.store.bundle.unpack import EntryContent, Unpacked
from cgtool.store.bundle_index import refused, shown
from cgtool.store.entry import Entry, EntryWriter, ObjectStore, read_entry
from cgtool.store.files import (
    cache_error,
    discard,
    ensure_folder,
    ensure_root,
    names_in,
    os_errors_as_cache_errors,
    read_bytes,
    sync_folder,
    write_atomic,
)
from cgtool.store.key import read_key
from cgtool.store.layout import (
    ARTIFACTS,
    KEY_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    SIGNATURES,
    CacheLayout,
    RankName,
    short,
)
from cgtool.store.leases import hold_folder, hold_writing, is_abandoned
from cgtool.store.lookup import LookupStore
from cgtool.store.records import Key, Manifest, Row, RowPlace

Outcome = Literal["new", "merged", "same"]

_UNPACKING_FOLDER = re.compile(r"\.import\.[0-9]+\.[0-9a-f]+\.tmp")


def check_fits(layout: CacheLayout, unpacked: Unpacked, *, replacing: bool) -> None:
    """Check that a bundle can be merged into the cache, before anything changes."""
    for content in unpacked.entries:
        check_no_links(_target_folders(layout, content))
        try:
            read_key(layout, content.hash)
        except CacheCorruptError:
            pass  # it will be replaced
        except CacheSchemaError as error:
            raise _schema_refusal(content.hash, error) from error
        for manifest in content.manifests:
            _check_plan(_current(layout, manifest.name), manifest, replacing=replacing)


def check_no_links(folders: Iterable[Path]) -> None:
    """Check that folders of a cache are not symlinks, through which an import would write elsewhere."""
    for folder in folders:
        with os_errors_as_cache_errors(folder):
            is_link = folder.is_symlink()
        if is_link:
            message = (
                f"{folder} is a link, but an import only writes inside the cache. Nothing was changed. Replace the "
                "link by the folder that it leads to, or use another cache with --cache-dir."
            )
            raise RefusedError(message, reason="link_here", path=folder)


def _target_folders(layout: CacheLayout, content: EntryContent) -> Iterator[Path]:
    """Yield every folder that installing an entry may write to."""
    entry = layout.entry_dir(content.hash)
    yield from (layout.lookup_dir, layout.state_dir, entry, entry / ARTIFACTS, entry / SIGNATURES)
    for manifest in content.manifests:
        folder = layout.rank_dir(manifest.name)
        yield from (folder.parent, folder)


def _current(layout: CacheLayout, name: RankName) -> Entry | None:
    try:
        return read_entry(layout, name, files=())
    except CacheCorruptError:
        return None  # it will be replaced
    except CacheSchemaError as error:
        raise _schema_refusal(name.hash, error) from error


def _schema_refusal(hash_: str, error: CacheSchemaError) -> RefusedError:
    message = (
        f"Another version of cgtool wrote the entry {short(hash_)} in the cache. Import the bundle with that version."
    )
    return RefusedError(message, reason="other_schema_here", path=error.path, expected=error.expected)


def _check_plan(entry: Entry | None, manifest: Manifest, *, replacing: bool) -> None:
    if entry is None or replacing or _has_same_plan(entry, manifest):
        return
    message = (
        f"The entry {short(manifest.hash)} (rank {manifest.rank}, {manifest.prefix}) in the cache has another plan, "
        "whose pieces do not match the bundle's artifacts. Use --replace to take the bundle's plan, or keep yours."
    )
    raise RefusedError(message, reason="other_plan", path=manifest.name.flat)


def check_pickles(entries: tuple[EntryContent, ...], *, trust: bool) -> list[str]:
    """Return warnings about artifacts that torch will unpickle; refuse them unless `trust`.

    A signature is not enough: it identifies the author but does not show that the user accepts pickle.
    """
    names = [name for content in entries for name in content.pickles]
    if names and not trust:
        advice = "Nothing was changed. Import it with --trust, or warm with aot_inductor, which does not use pickle."
        raise refused("pickle", "would be unpickled when opened", member=names[0], advice=advice)
    if not names:
        return []
    more = "" if len(names) == 1 else f" and {len(names) - 1} more"
    return [f"{shown(names[0])}{more} will be unpickled by torch when loaded, which can run arbitrary code."]


def install(layout: CacheLayout, unpacked: Unpacked, *, replacing: bool) -> list[tuple[Outcome, int]]:
    """Install every entry of a bundle; return the outcome and the number of new rows for each."""
    ensure_root(layout.root)
    ensure_folder(layout.base)
    for content in unpacked.entries:
        _add_signature(unpacked.layout.entry_dir(content.hash), unpacked)
    installed = []
    for content in unpacked.entries:
        lease = hold_writing(layout, content.hash)  # keeps prune from removing artifacts that no manifest names yet
        try:
            installed.append(_install(layout, unpacked, content, replacing=replacing))
        finally:
            if lease is not None:
                lease.release()
    return installed


def _install(layout: CacheLayout, unpacked: Unpacked, content: EntryContent, *, replacing: bool) -> tuple[Outcome, int]:
    source, target = unpacked.layout.entry_dir(content.hash), layout.entry_dir(content.hash)
    names = [manifest.name for manifest in content.manifests]
    with os_errors_as_cache_errors(target):
        is_new = not target.exists()
    if is_new:
        lookup = LookupStore(layout)
        for name in names:  # a pruned entry may have left its mark
            lookup.forget(name)
        if _move(source, target):
            for manifest in content.manifests:
                with contextlib.suppress(CacheError):  # the next lookup indexes it
                    lookup.index(manifest.name, manifest.lookup)
            rows = sum(len(manifest.rows) for manifest in content.manifests)
            return "new", rows
    return _merge(layout, unpacked, content, replacing=replacing)


def _move(source: Path, target: Path) -> bool:
    """Move a folder into place; return False if another process was faster."""
    for folder, folders, _ in os.walk(source):
        for name in folders:
            sync_folder(Path(folder) / name)
    sync_folder(source)
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise cache_error(error, target) from error
    sync_folder(target.parent)
    return True


def _merge(layout: CacheLayout, unpacked: Unpacked, content: EntryContent, *, replacing: bool) -> tuple[Outcome, int]:
    objects = ObjectStore(layout.entry_dir(content.hash))
    theirs = ObjectStore(unpacked.layout.entry_dir(content.hash))
    for digest, kind in content.artifacts:
        objects.link_from(theirs.path(digest, kind), digest, kind)
    added = [
        _merge_rank(layout, unpacked, manifest, content.key, replacing=replacing) for manifest in content.manifests
    ]
    if _is_as_signed(layout, unpacked, content):
        _add_signature(layout.entry_dir(content.hash), unpacked)
    is_same = all(rows is None for rows in added)
    return ("same" if is_same else "merged"), sum(rows or 0 for rows in added)


def _merge_rank(
    layout: CacheLayout, unpacked: Unpacked, manifest: Manifest, key: Key, *, replacing: bool
) -> int | None:
    """Merge one rank; return the number of rows that are new in the cache, or None if there was nothing to merge."""
    writer = EntryWriter(layout, key, rank=manifest.rank, prefix=manifest.prefix)
    bundled = read_entry(unpacked.layout, manifest.name, files=manifest.files)
    if bundled is None:
        raise CacheError(f"{unpacked.layout.root} was removed. Import again.", path=unpacked.layout.root)
    kept: set[RowPlace] = set()

    def merge(entry: Entry | None) -> tuple[Manifest, Mapping[str, bytes]]:
        nonlocal kept
        _check_plan(entry, bundled.manifest, replacing=replacing)
        kept = {row.place for row in _kept_rows(entry, bundled.manifest, writer.objects)}
        return _merge_entries(entry, bundled, writer.objects)

    before = _current(layout, manifest.name)
    if before is not None and _is_intact(layout, before) and merge(before)[0] == before.manifest:
        return None
    return sum(row.place not in kept for row in writer.update(merge).rows)


def _is_intact(layout: CacheLayout, entry: Entry) -> bool:
    try:
        return read_entry(layout, entry.name, files=entry.manifest.files) is not None
    except CacheCorruptError:
        return False


def _merge_entries(entry: Entry | None, bundled: Entry, objects: ObjectStore) -> tuple[Manifest, Mapping[str, bytes]]:
    """Return a rank's manifest after merging the bundle's into it, and the new files; existing rows take precedence."""
    theirs = bundled.manifest
    if entry is None or not _has_same_plan(entry, theirs):
        return theirs, bundled.files
    ours = entry.manifest
    lookup = tuple(dict.fromkeys((*ours.lookup, *theirs.lookup)))
    base = replace(theirs, created=ours.created, cgtool=ours.cgtool, lookup=lookup)
    merged = base.with_rows(_kept_rows(entry, theirs, objects), ours.fallbacks)
    records = {**theirs.files, **ours.files}
    # Includes files that the rank has already: the writer writes only those that are missing or corrupt.
    new = {name: data for name, data in bundled.files.items() if records[name] == theirs.files[name]}
    return replace(merged, files=records), new


def _has_same_plan(entry: Entry, manifest: Manifest) -> bool:
    return entry.manifest.files.get(PLAN_FILE) == manifest.files[PLAN_FILE]


def _kept_rows(entry: Entry | None, theirs: Manifest, objects: ObjectStore) -> list[Row]:
    """Return the rows of an entry to keep: those of the same plan whose artifacts are in place."""
    rows = entry.manifest.rows if entry is not None and _has_same_plan(entry, theirs) else ()
    return [row for row in rows if objects.has(row.artifact)]


def _is_as_signed(layout: CacheLayout, unpacked: Unpacked, content: EntryContent) -> bool:
    """Return whether the installed key and manifests are identical to the bundle's, so that its signature is valid."""
    for member in unpacked.members_of(content.hash):
        if member.path.endswith((f"/{KEY_FILE}", f"/{MANIFEST_FILE}")):
            data = read_bytes(layout.root / member.path)
            if data is None or sha256_hex(data) != member.sha256:
                return False
    return True


def _add_signature(entry: Path, unpacked: Unpacked) -> None:
    """Store a bundle's index and signatures in an entry, for the trust policy of a load."""
    if unpacked.signature_bytes is None:
        return
    name = sha256_hex(unpacked.index_bytes)
    write_atomic(entry / SIGNATURES / f"{name}.json", unpacked.index_bytes)
    write_atomic(entry / SIGNATURES / f"{name}.sig", unpacked.signature_bytes)


@contextlib.contextmanager
def unpacking_folder(layout: CacheLayout) -> Iterator[Path]:
    """Yield a new folder beside the entries of a cache, and remove it and any folders created for it afterwards."""
    check_no_links([layout.base])
    created = ensure_folder(layout.base)
    folder = layout.base / f".import.{os.getpid()}.{secrets.token_hex(6)}.tmp"
    try:
        for name in names_in(layout.base):
            if _UNPACKING_FOLDER.fullmatch(name) and is_abandoned(layout.base / name):
                discard(layout.base / name)
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise cache_error(error, folder) from error
        held: list[int] = []
        try:
            with os_errors_as_cache_errors(folder):
                hold_folder(folder, held)
            yield folder
        finally:
            closing(held)
    finally:
        discard(folder)
        for above in created:
            with contextlib.suppress(OSError):  # not empty any more
                above.rmdir()
