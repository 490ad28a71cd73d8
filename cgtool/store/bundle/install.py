"""Taking what was unpacked and checked into a cache. Must not import torch.

An entry that is new is renamed into place whole. One that is there already is merged: artifacts by content, then each
rank through `EntryWriter`, under its lock and with one rename. Killed at any moment, each entry is as before or as
after. Rows that are there stay as they are; the bundle's are added beside them.

A bundle is unpacked in `torch_compile_cache/.import.<pid>.<token>.tmp/`, a cache root of its own that no reader looks
into, before any of it is believed. Its maker holds a lock on it, so that one which nobody holds was left by a killed
process and is removed by the next import.
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

_NAME = re.compile(r"\.import\.[0-9]+\.[0-9a-f]+\.tmp")


def check_fits(layout: CacheLayout, unpacked: Unpacked, *, replacing: bool) -> None:
    """Check that a bundle can be merged with what is there, before anything changes."""
    for content in unpacked.entries:
        check_no_links(_written_to(layout, content))
        try:
            read_key(layout, content.hash)
        except CacheCorruptError:
            pass  # replaced
        except CacheSchemaError as error:
            raise _newer(content.hash, error) from error
        for manifest in content.manifests:
            _check_plan(_current(layout, manifest.name), manifest, replacing=replacing)


def check_no_links(folders: Iterable[Path]) -> None:
    """Check that folders of a cache are no links, through which an import would write elsewhere."""
    for folder in folders:
        with os_errors_as_cache_errors(folder):
            is_link = folder.is_symlink()
        if is_link:
            message = (
                f"{folder} is a link, and an import writes nowhere but into the cache. Nothing was changed. Put what "
                "it leads to in its place, or name another cache with --cache-dir."
            )
            raise RefusedError(message, reason="link_here", path=folder)


def _written_to(layout: CacheLayout, content: EntryContent) -> Iterator[Path]:
    """Yield every folder that taking in an entry may write to."""
    entry = layout.entry_dir(content.hash)
    yield from (layout.lookup_dir, layout.state_dir, entry, entry / ARTIFACTS, entry / SIGNATURES)
    for manifest in content.manifests:
        folder = layout.rank_dir(manifest.name)
        yield from (folder.parent, folder)


def _current(layout: CacheLayout, name: RankName) -> Entry | None:
    try:
        return read_entry(layout, name, files=())
    except CacheCorruptError:
        return None  # replaced
    except CacheSchemaError as error:
        raise _newer(name.hash, error) from error


def _newer(hash_: str, error: CacheSchemaError) -> RefusedError:
    message = (
        f"The cache holds the entry {short(hash_)} as another version of cgtool wrote it. Import it with that one."
    )
    return RefusedError(message, reason="other_schema_here", path=error.path, expected=error.expected)


def _check_plan(entry: Entry | None, manifest: Manifest, *, replacing: bool) -> None:
    if entry is None or replacing or _has_same_plan(entry, manifest):
        return
    message = (
        f"The cache holds the entry {short(manifest.hash)} (rank {manifest.rank}, {manifest.prefix}) with another "
        "plan, to whose pieces the bundle's artifacts do not belong. Take the bundle's with --replace, or keep yours."
    )
    raise RefusedError(message, reason="other_plan", path=manifest.name.flat)


def check_pickles(entries: tuple[EntryContent, ...], *, trust: bool) -> list[str]:
    """Say which artifacts torch will unpickle; who signed them says who made them, not that pickle was wanted."""
    names = [name for content in entries for name in content.pickles]
    if names and not trust:
        advice = "Nothing was changed. Import it with --trust, or warm with the adaptor aot_inductor, which has none."
        raise refused("pickle", "is opened by unpickling it", member=names[0], advice=advice)
    if not names:
        return []
    more = "" if len(names) == 1 else f" and {len(names) - 1} more"
    return [f"{shown(names[0])}{more} will be unpickled by torch when loaded, which runs any code in it."]


def install(layout: CacheLayout, unpacked: Unpacked, *, replacing: bool) -> list[tuple[Outcome, int]]:
    """Put every entry of a bundle in place; return what became of each, and how many rows the cache did not have."""
    ensure_root(layout.root)
    ensure_folder(layout.base)
    for content in unpacked.entries:
        _add_signature(unpacked.layout.entry_dir(content.hash), unpacked)
    installed = []
    for content in unpacked.entries:
        lease = hold_writing(layout, content.hash)  # artifacts come before the manifests that name them
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
        for name in names:  # what was pruned may have left its mark
            lookup.forget(name)
        if _renamed(source, target):
            for manifest in content.manifests:
                with contextlib.suppress(CacheError):  # whoever looks next takes it in
                    lookup.index(manifest.name, manifest.lookup)
            rows = sum(len(manifest.rows) for manifest in content.manifests)
            return "new", rows
    return _merge(layout, unpacked, content, replacing=replacing)


def _renamed(source: Path, target: Path) -> bool:
    """Move a folder into place; False where another process was faster."""
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
    added = [_merge_rank(layout, unpacked, one, content.key, replacing=replacing) for one in content.manifests]
    if _is_whole(layout, unpacked, content):
        _add_signature(layout.entry_dir(content.hash), unpacked)
    is_same = all(rows is None for rows in added)
    return ("same" if is_same else "merged"), sum(rows or 0 for rows in added)


def _merge_rank(
    layout: CacheLayout, unpacked: Unpacked, manifest: Manifest, key: Key, *, replacing: bool
) -> int | None:
    """Merge one rank; return how many rows the cache did not have, None where there was nothing to merge."""
    # It says from here on that the entry is being written.
    writer = EntryWriter(layout, key, rank=manifest.rank, prefix=manifest.prefix)
    whole = read_entry(unpacked.layout, manifest.name, files=manifest.files)
    if whole is None:
        raise CacheError(f"{unpacked.layout.root} was removed. Import again.", path=unpacked.layout.root)
    kept: set[RowPlace] = set()

    def merge(entry: Entry | None) -> tuple[Manifest, Mapping[str, bytes]]:
        nonlocal kept
        _check_plan(entry, whole.manifest, replacing=replacing)
        kept = {row.place for row in _kept_rows(entry, whole.manifest, writer.objects)}
        return _merged(entry, whole, writer.objects)

    before = _current(layout, manifest.name)
    if before is not None and _is_intact(layout, before) and merge(before)[0] == before.manifest:
        return None
    return sum(row.place not in kept for row in writer.update(merge).rows)


def _is_intact(layout: CacheLayout, entry: Entry) -> bool:
    try:
        return read_entry(layout, entry.name, files=entry.manifest.files) is not None
    except CacheCorruptError:
        return False


def _merged(entry: Entry | None, whole: Entry, objects: ObjectStore) -> tuple[Manifest, Mapping[str, bytes]]:
    """Return what a rank is once the bundle's (`whole`) is in it, and the files that are new; rows in place win."""
    theirs = whole.manifest
    if entry is None or not _has_same_plan(entry, theirs):
        return theirs, whole.files
    ours = entry.manifest
    lookup = tuple(dict.fromkeys((*ours.lookup, *theirs.lookup)))
    base = replace(theirs, created=ours.created, cgtool=ours.cgtool, lookup=lookup)
    merged = base.with_rows(_kept_rows(entry, theirs, objects), ours.fallbacks)
    named = {**theirs.files, **ours.files}
    # The writer leaves alone what is intact.
    new = {name: data for name, data in whole.files.items() if named[name] == theirs.files[name]}
    return replace(merged, files=named), new


def _has_same_plan(entry: Entry, manifest: Manifest) -> bool:
    return entry.manifest.files.get(PLAN_FILE) == manifest.files[PLAN_FILE]


def _kept_rows(entry: Entry | None, theirs: Manifest, objects: ObjectStore) -> list[Row]:
    """The rows of an entry that stay: those of the same plan whose artifacts are in place."""
    rows = entry.manifest.rows if entry is not None and _has_same_plan(entry, theirs) else ()
    return [row for row in rows if objects.has(row.artifact)]


def _is_whole(layout: CacheLayout, unpacked: Unpacked, content: EntryContent) -> bool:
    """Whether the key and the manifests in place are the bundle's to the byte, so that its signature holds for them."""
    for member in unpacked.members_of(content.hash):
        if member.path.endswith((f"/{KEY_FILE}", f"/{MANIFEST_FILE}")):
            data = read_bytes(layout.root / member.path)
            if data is None or sha256_hex(data) != member.sha256:
                return False
    return True


def _add_signature(entry: Path, unpacked: Unpacked) -> None:
    """Let an entry remember who signed it: load may ask."""
    if unpacked.signature_bytes is None:
        return
    name = sha256_hex(unpacked.index_bytes)
    write_atomic(entry / SIGNATURES / f"{name}.json", unpacked.index_bytes)
    write_atomic(entry / SIGNATURES / f"{name}.sig", unpacked.signature_bytes)


@contextlib.contextmanager
def unpacking_folder(layout: CacheLayout) -> Iterator[Path]:
    """Yield a new folder beside the entries of a cache; what was made for it is gone afterwards."""
    check_no_links([layout.base])
    made = ensure_folder(layout.base)
    folder = layout.base / f".import.{os.getpid()}.{secrets.token_hex(6)}.tmp"
    try:
        for name in names_in(layout.base):
            if _NAME.fullmatch(name) and is_abandoned(layout.base / name):
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
        for above in made:
            with contextlib.suppress(OSError):  # something is in it by now
                above.rmdir()
