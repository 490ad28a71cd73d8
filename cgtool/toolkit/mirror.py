"""Mirror a remote store as a local cache root, so that commands read it like a cache. Must not import torch.

Records are fetched unchecked; whoever reads them validates them. Artifacts are sparse files of the right size, unless
their contents are requested. Removals from the mirror can be applied to the store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

from msgspec.structs import replace

from cgtool.errors import CacheError, RemoteError
from cgtool.remote.entries import AT_ONCE, index_path, indexes, member_path, open_bundle, unit_path
from cgtool.remote.stores import Store, open_store, read
from cgtool.store.bundle_index import Limits, Member, parse_index
from cgtool.store.files import discard, ensure_root
from cgtool.store.layout import MANIFEST_FILE, PLAN_FILE, UNIT_FILE, CacheLayout, RankName, is_hash
from cgtool.store.records import Artifact, Manifest, parse_manifest
from cgtool.store.units import parse_unit
from cgtool.threads import in_parallel

_MOST_RECORD_BYTES = 2**30
#: Unreferenced artifacts may belong to a push in progress.
_GRACE_SECS = 86400.0


@dataclass(frozen=True)
class Mirror:
    """The state of a store when it was read: a cache root, the entries and the units."""

    store: Store
    root: Path
    hashes: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    #: The artifact's name in the store → its first file in the mirror.
    placed: dict[str, Path] = field(default_factory=dict)

    @property
    def layout(self) -> CacheLayout:
        """The mirror as a cache."""
        return CacheLayout(root=self.root)


@contextlib.contextmanager
def mirrored(url: str, *, artifacts: bool = False) -> Iterator[Mirror]:
    """Yield a temporary mirror of a store; with `artifacts`, also fetch their contents."""
    mirror = Mirror(open_store(url), Path(tempfile.mkdtemp(prefix="cgtool-remote-")))
    try:
        ensure_root(mirror.root)
        mirror.layout.base.mkdir()
        with ThreadPool(AT_ONCE) as pool:
            _fill(mirror, pool, artifacts=artifacts)
        yield mirror
    finally:
        discard(mirror.root)


def _fill(mirror: Mirror, pool: ThreadPool, *, artifacts: bool) -> None:
    store, sizes = mirror.store, {item.path: item.size_bytes for item in mirror.store.list("artifacts")}
    members: dict[tuple[str, str], Member] = {}
    keys = [(hash_, digest) for hash_, digests in indexes(store).items() for digest in digests]
    bundles = in_parallel(pool, lambda key: open_bundle(store, *key), keys)
    for (hash_, _), bundle in zip(keys, bundles, strict=True):
        if bundle is not None:
            mirror.hashes.add(hash_)
            for member in parse_index(bundle.index_bytes, limits=Limits()).members:
                members[member.path, member.sha256] = member
    records = [member for member in members.values() if not member.place.kind]
    bodies = in_parallel(pool, lambda member: read(store, member_path(member), most=_MOST_RECORD_BYTES), records)
    _write_records(mirror, zip(records, bodies, strict=True))
    mirror.units.update(filter(is_hash, (item.path.rpartition("/")[2] for item in store.list("units"))))
    copies = [
        (member_path(member), mirror.root / member.path, member.size_bytes)
        for member in members.values()
        if member.place.kind
    ]
    copies += filter(None, in_parallel(pool, partial(_write_unit, mirror), sorted(mirror.units)))
    first = {path: (copy, sizes[path] or size) for path, copy, size in reversed(copies) if path in sizes}
    list(in_parallel(pool, partial(_write_artifact, mirror, artifacts=artifacts), first.items()))
    for path, copy, _ in copies:
        if path in mirror.placed and copy != mirror.placed[path]:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.hardlink_to(mirror.placed[path])


def _write_records(mirror: Mirror, records: Iterable[tuple[Member, bytes | None]]) -> None:
    """Write the records; merge the manifests of a rank that was pushed more than once, as a pull would."""
    manifests: dict[RankName, Manifest] = {}
    for member, body in records:
        if body is None:
            continue
        data = body
        place, path = member.place, mirror.root / member.path
        if place.file == MANIFEST_FILE and place.rank is not None:
            name = RankName(hash=place.hash, rank=place.rank, prefix=place.prefix)
            with contextlib.suppress(CacheError):  # a torn manifest is written unchanged, for the walk to report
                manifest = parse_manifest(data, path=path, name=name)
                if name in manifests:
                    manifest = _merged(manifests[name], manifest)
                    data = manifest.to_bytes()
                manifests[name] = manifest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _merged(ours: Manifest, theirs: Manifest) -> Manifest:
    if ours.files.get(PLAN_FILE) != theirs.files.get(PLAN_FILE):
        return ours
    return replace(ours.with_rows(theirs.rows, theirs.fallbacks), files={**theirs.files, **ours.files})


def _write_unit(mirror: Mirror, key: str) -> tuple[str, Path, int] | None:
    """Write the record of a unit; return its artifact's name in the store, its path in the mirror and its size."""
    folder = mirror.layout.unit_dir(key)
    data = read(mirror.store, unit_path(key), most=_MOST_RECORD_BYTES)
    if data is None:
        return None
    folder.mkdir(parents=True)
    (folder / UNIT_FILE).write_bytes(data)
    artifact = _artifact_of(data, key)
    return None if artifact is None else (f"artifacts/{artifact.file}", folder / artifact.file, artifact.size_bytes)


def _artifact_of(data: bytes, key: str) -> Artifact | None:
    try:
        return parse_unit(data, path=unit_path(key), key=key)
    except CacheError:
        return None


def _write_artifact(mirror: Mirror, copy: tuple[str, tuple[Path, int]], *, artifacts: bool) -> None:
    """Write the first copy of an artifact: its contents, or a sparse file of its size."""
    path, (target, size) = copy
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        if artifacts:
            file.writelines(mirror.store.get(path) or ())
        else:
            os.truncate(file.fileno(), size)
    mirror.placed[path] = target


def remove_pruned(mirror: Mirror) -> int:
    """Apply a mirror's removals to its store, and remove old unreferenced artifacts; return the number of files.

    An entry's index is removed first. What was pushed since the mirror was made is kept.
    """
    store, layout, removed = mirror.store, mirror.layout, 0
    gone = mirror.hashes.difference(layout.hashes())
    for hash_, digests in indexes(store).items():
        if hash_ in gone:
            places = [index_path(hash_, digest) for digest in digests]
            places += [item.path for item in store.list(f"entries/{hash_}") if item.path not in places]
            removed += _delete(store, places)
    removed += _delete(store, [item.path for item in store.list("lookup") if item.path.rpartition("/")[2] in gone])
    units = [key for key in mirror.units if not (layout.unit_dir(key) / UNIT_FILE).exists()]
    removed += _delete(store, [unit_path(key) for key in units])
    named = _named(store)
    old = _clock(store) - _GRACE_SECS
    unnamed = [item.path for item in store.list("artifacts") if item.path not in named and 0 < item.modified < old]
    return removed + _delete(store, unnamed)


def _clock(store: Store) -> float:
    """Return the time by the store's clock, to which file ages relate; 0 if the store reports no times."""
    path = f"clock/{secrets.token_hex(8)}"
    store.put(path, b"")
    times = [item.modified for item in store.list("clock") if item.path == path]
    store.delete(path)
    return max(times, default=0.0)


def _named(store: Store) -> set[str]:
    """Return the artifacts that entries or units of a store name; raise if an index cannot be read."""
    named = set()
    for hash_, digests in indexes(store).items():
        for digest in digests:
            bundle = open_bundle(store, hash_, digest)
            if bundle is None:
                message = f"{index_path(hash_, digest)} of {store.url} is incomplete, so its artifacts are unknown."
                raise RemoteError(f"{message} Push that entry again, or remove the file.", path=store.url)
            members = parse_index(bundle.index_bytes, limits=Limits()).members
            named |= {member_path(member) for member in members}
    for item in store.list("units"):
        key = item.path.rpartition("/")[2]
        data = read(store, item.path, most=_MOST_RECORD_BYTES)
        artifact = None if data is None else _artifact_of(data, key)
        if artifact is not None:
            named.add(f"artifacts/{artifact.file}")
    return named


def _delete(store: Store, paths: list[str]) -> int:
    for path in paths:
        store.delete(path)
    return len(paths)
