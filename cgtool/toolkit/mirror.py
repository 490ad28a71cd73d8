"""A store as a cache root of its own: what looks at a cache looks at a store, by the same walk. Needs no torch.

Records are fetched as they are, and checked by whoever reads them. Artifacts are files of the right size without bytes,
unless they are asked for. What goes from the mirror can be made to go from the store.
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
#: What nothing names may be what a push that is under way has sent already.
_GRACE_SECS = 86400.0


@dataclass(frozen=True)
class Mirror:
    """What a store held when it was read: a cache root, the entries and the units."""

    store: Store
    root: Path
    hashes: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    #: name in the store → the first file of that artifact
    placed: dict[str, Path] = field(default_factory=dict)

    @property
    def layout(self) -> CacheLayout:
        """The cache that the mirror is."""
        return CacheLayout(root=self.root)


@contextlib.contextmanager
def mirrored(url: str, *, artifacts: bool = False) -> Iterator[Mirror]:
    """Yield what a store holds as a cache root, which is gone afterwards; with `artifacts`, their bytes too."""
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
    store, there = mirror.store, {item.path: item.size_bytes for item in mirror.store.list("artifacts")}
    members: dict[tuple[str, str], Member] = {}
    found = [(hash_, digest) for hash_, digests in indexes(store).items() for digest in digests]
    for hash_, bundle in zip(found, in_parallel(pool, lambda pair: open_bundle(store, *pair), found), strict=True):
        if bundle is not None:
            mirror.hashes.add(hash_[0])
            for member in parse_index(bundle.index_bytes, limits=Limits()).members:
                members[member.path, member.sha256] = member
    records = [member for member in members.values() if not member.place.kind]
    bodies = in_parallel(pool, lambda member: read(store, member_path(member), most=_MOST_RECORD_BYTES), records)
    _write_records(mirror, zip(records, bodies, strict=True))
    keys = [item.path.rpartition("/")[2] for item in store.list("units")]
    mirror.units.update(filter(is_hash, keys))
    wanted = [(member_path(one), mirror.root / one.path, one.size_bytes) for one in members.values() if one.place.kind]
    wanted += filter(None, in_parallel(pool, partial(_unit, mirror), sorted(mirror.units)))
    first = {path: (place, there[path] or size) for path, place, size in reversed(wanted) if path in there}
    list(in_parallel(pool, partial(_place, mirror, artifacts=artifacts), first.items()))
    for path, copy, _ in wanted:
        if path in mirror.placed and copy != mirror.placed[path]:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.hardlink_to(mirror.placed[path])


def _write_records(mirror: Mirror, records: Iterable[tuple[Member, bytes | None]]) -> None:
    """Write records; of a rank that was pushed more than once, the manifest that a pull would make of them."""
    manifests: dict[RankName, Manifest] = {}
    for member, found in records:
        if found is None:
            continue
        data = found
        place, path = member.place, mirror.root / member.path
        if place.file == MANIFEST_FILE and place.rank is not None:
            name = RankName(hash=place.hash, rank=place.rank, prefix=place.prefix)
            with contextlib.suppress(CacheError):  # one that is torn lies there as it is, for the walk to name
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


def _unit(mirror: Mirror, key: str) -> tuple[str, Path, int] | None:
    """Write the record of a unit; return its artifact's name, its place and its size."""
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


def _place(mirror: Mirror, wanted: tuple[str, tuple[Path, int]], *, artifacts: bool) -> None:
    """Put an artifact in its first place: its bytes, or as much of nothing."""
    path, (place, size) = wanted
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("xb") as file:
        if artifacts:
            file.writelines(mirror.store.get(path) or ())
        else:
            os.truncate(file.fileno(), size)
    mirror.placed[path] = place


def remove_pruned(mirror: Mirror) -> int:
    """Remove from a store what went from its mirror, and old artifacts that nothing names; return how many files went.

    The index of an entry goes first. What was pushed since the mirror was made stays.
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
    """What time it is at a store, whose clock and not ours says how old a file is; 0 where it does not say."""
    path = f"clock/{secrets.token_hex(8)}"
    store.put(path, b"")
    times = [item.modified for item in store.list("clock") if item.path == path]
    store.delete(path)
    return max(times, default=0.0)


def _named(store: Store) -> set[str]:
    """The artifacts that something in a store names; where that cannot be told, nothing may go."""
    named = set()
    for hash_, digests in indexes(store).items():
        for digest in digests:
            bundle = open_bundle(store, hash_, digest)
            if bundle is None:
                message = f"{index_path(hash_, digest)} of {store.url} is not whole, so its artifacts are not known."
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
