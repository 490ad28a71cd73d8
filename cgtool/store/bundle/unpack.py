"""Unpacking a bundle that a stranger may have made, into a folder of its own, and checking it. Must not import torch.

Every byte is matched to the index before any of it is parsed. Then the records of each entry are parsed as load will
parse them: what one names must be there, in the index's words, and nothing may be there that none names. Nothing is
written outside of the folder, whose files are all new.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path

from cgtool.errors import ArtifactError, CacheCorruptError, CacheSchemaError
from cgtool.plan.records import Plan, parse_plan
from cgtool.store import signatures
from cgtool.store.artifacts import misplaced
from cgtool.store.artifacts import unpack as unpack_package
from cgtool.store.bundle.reading import OpenBundle, Source, opened
from cgtool.store.bundle_index import (
    PACKAGE_KIND,
    PICKLE_KINDS,
    Index,
    Limits,
    Member,
    check_values,
    names_of_folders,
    parse_index,
    refused,
)
from cgtool.store.files import cache_error, discard, os_errors_as_cache_errors
from cgtool.store.layout import ARTIFACTS, CACHE_FOLDER, KEY_FILE, MANIFEST_FILE, PLAN_FILE, CacheLayout, RankName
from cgtool.store.records import Key, Manifest, Row, parse_key, parse_manifest
from cgtool.threads import outcome

#: One flush after another waits for the disk each time; a disk takes many together in the time of one.
_THREADS = 16
#: Files that are open and wait for their flush.
_MOST_OPEN = 64
#: Is told how many members are on the disk, of how many.
OnMember = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class EntryContent:
    """One entry of a bundle, checked."""

    hash: str
    key: Key
    manifests: tuple[Manifest, ...]
    #: The artifacts that torch would unpickle, by member name.
    pickles: tuple[str, ...]

    @property
    def artifacts(self) -> dict[tuple[str, str], int]:
        """The size of each artifact that a manifest names, by digest and kind."""
        return {
            (row.artifact.digest, row.artifact.kind): row.artifact.size_bytes
            for manifest in self.manifests
            for row in manifest.rows
        }


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """A bundle that was checked."""

    layout: CacheLayout
    index: Index
    index_bytes: bytes
    signature_bytes: bytes | None
    #: The id of the trusted key that signed it; None where no keys were asked for.
    signed_by: str | None
    entries: tuple[EntryContent, ...]

    def members_of(self, hash_: str) -> tuple[Member, ...]:
        """Return the members of one entry."""
        start = f"{CACHE_FOLDER}/{hash_}/"
        return tuple(member for member in self.index.members if member.path.startswith(start))


def unpack(
    source: Source,
    folder: Path,
    *,
    keys: signatures.PublicKeys | None = None,
    limits: Limits | None = None,
    on_member: OnMember | None = None,
) -> Unpacked:
    """Unpack a bundle into an empty folder of the caller's own, and check all of it.

    Without `keys` no signature is asked for. What is refused (RefusedError) is not believed: nothing of it may be used.
    """
    limits = limits or Limits()
    with opened(source, limits) as bundle:
        signed_by = None
        if keys is not None:
            signed_by = signatures.check(bundle.index_bytes, bundle.signature_bytes, keys, what=bundle.what)
        elif bundle.signature_bytes is not None:
            signatures.parse_signatures(bundle.signature_bytes)
        index = parse_index(bundle.index_bytes, limits=limits)
        _write_all(bundle, index, folder, signed=signed_by is not None, on_member=on_member)
    layout = CacheLayout(root=folder)
    grouped: dict[str, list[Member]] = {}
    for member in index.members:
        grouped.setdefault(member.place.hash, []).append(member)
    with os_errors_as_cache_errors(folder):
        entries = tuple(check_entry(layout, hash_, members) for hash_, members in grouped.items())
    return Unpacked(
        layout=layout,
        index=index,
        index_bytes=bundle.index_bytes,
        signature_bytes=bundle.signature_bytes,
        signed_by=signed_by,
        entries=entries,
    )


@contextlib.contextmanager
def unpacked(source: Source, *, limits: Limits | None = None) -> Iterator[Path]:
    """Check a bundle and yield a cache root that holds it, for as long as the block runs.

    What it holds was made by a stranger: it may be looked at, and must not be loaded.
    """
    folder = Path(tempfile.mkdtemp(prefix="cgtool-bundle-"))
    try:
        unpack(source, folder, limits=limits)
        yield folder
    finally:
        discard(folder)


def _write_all(bundle: OpenBundle, index: Index, folder: Path, *, signed: bool, on_member: OnMember | None) -> None:
    for name in sorted(names_of_folders(member.path for member in index.members)):
        try:
            (folder / name).mkdir()
        except OSError as error:
            raise cache_error(error, folder / name) from error
    write = _write_in_turn if bundle.at_once == 1 else _write_beside
    for number, _ in enumerate(write(bundle, index, folder, signed=signed), 1):
        if on_member is not None:
            on_member(number, len(index.members))


def _write_in_turn(bundle: OpenBundle, index: Index, folder: Path, *, signed: bool) -> Iterator[None]:
    """Write the members in order; yield after each that is on the disk."""
    flushes: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="cgtool-flush") as pool:
        for member, body in bundle.members(index):
            path = folder / member.path
            descriptor = _create(path, member)
            actual = _write(descriptor, path, member, body)
            flushes.append(pool.submit(_flush, descriptor, path))
            _check_digest(member, actual, signed=signed)
            if len(flushes) > _MOST_OPEN:
                yield flushes.popleft().result()
        for flush in flushes:
            yield flush.result()


def _write_beside(bundle: OpenBundle, index: Index, folder: Path, *, signed: bool) -> Iterator[None]:
    """Write several members at a time; yield after each that is on the disk.

    Whoever is interrupted waits for none of them: a network may keep a thread waiting for long. So the threads are
    daemons, and once the folder is to be removed no file is begun in it.
    """
    ended, starting = threading.Event(), threading.Lock()

    def store(member: Member, body: Iterable[bytes]) -> None:
        path = folder / member.path
        with starting:
            if ended.is_set():
                return
            descriptor = _create(path, member)
        actual = _write(descriptor, path, member, itertools.takewhile(lambda _: not ended.is_set(), body))
        _flush(descriptor, path)
        _check_digest(member, actual, signed=signed)

    under_way: deque[AsyncResult[None]] = deque()
    with ThreadPool(bundle.at_once) as pool:
        try:
            for one in bundle.members(index):
                under_way.append(pool.apply_async(store, one))
                if len(under_way) > bundle.at_once:
                    yield outcome(under_way.popleft())
            for result in under_way:
                yield outcome(result)
        finally:
            with starting:
                ended.set()


def _create(path: Path, member: Member) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, member.mode)
    except OSError as error:
        raise cache_error(error, path, needed_bytes=member.size_bytes) from error


def _write(descriptor: int, path: Path, member: Member, body: Iterable[bytes]) -> str:
    """Write a new file, which stays open where that succeeds; return the digest of what was written."""
    digest = hashlib.sha256()
    try:
        for chunk in body:
            digest.update(chunk)
            try:  # only errors of writing are the disk's: those of reading pass through the same loop
                view = memoryview(chunk)
                while view:
                    view = view[os.write(descriptor, view) :]
            except OSError as error:
                raise cache_error(error, path, needed_bytes=member.size_bytes) from error
    except BaseException:
        os.close(descriptor)
        raise
    return digest.hexdigest()


def _check_digest(member: Member, actual: str, *, signed: bool) -> None:
    if actual != member.sha256:
        reason = "tampered" if signed else "digest_mismatch"
        why = "was changed after it was signed" if signed else "differs from its digest"
        raise refused(reason, why, member=member.path, expected=member.sha256, actual=actual)


def _flush(descriptor: int, path: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise cache_error(error, path) from error
    finally:
        os.close(descriptor)


def check_entry(layout: CacheLayout, hash_: str, members: Iterable[Member]) -> EntryContent:
    """Check one entry that lies unpacked under a cache root of its own."""
    there = {member.path: member for member in members}
    base = f"{CACHE_FOLDER}/{hash_}"
    key_name = f"{base}/{KEY_FILE}"
    if key_name not in there:
        raise refused("missing_member", "is missing", member=key_name)
    with _believing(key_name, "corrupt_key"):
        key = parse_key(_record(layout, key_name), path=layout.root / key_name, hash_=hash_)
    names = sorted(_rank_names(hash_, there.values()), key=lambda name: (name.rank, name.prefix))
    ranks = [_check_rank(layout, name, there) for name in names]
    if not ranks:
        raise refused("missing_member", "is missing", member=f"{base}/rank_0")
    manifests = tuple(manifest for manifest, _ in ranks)
    named = _artifact_names(base, (row for manifest in manifests for row in manifest.rows), there)
    folder = f"{base}/{ARTIFACTS}/"
    for name in there:
        if name.startswith(folder) and name not in named:
            raise refused("unnamed_artifact", "is an artifact that no manifest names", member=name)
    for name in sorted(named):
        if there[name].place.kind == PACKAGE_KIND:
            check_package(layout.root / name, there[name])
    for manifest, plan in ranks:
        _check_origins(layout.root / folder, folder, manifest, plan)
    pickles = tuple(name for name in sorted(named) if there[name].place.kind in PICKLE_KINDS)
    return EntryContent(hash=hash_, key=key, manifests=manifests, pickles=pickles)


def _rank_names(hash_: str, members: Iterable[Member]) -> set[RankName]:
    places = [member.place for member in members]
    return {RankName(hash=hash_, rank=p.rank, prefix=p.prefix) for p in places if p.rank is not None}


def _check_rank(layout: CacheLayout, name: RankName, there: Mapping[str, Member]) -> tuple[Manifest, Plan]:
    folder = f"{CACHE_FOLDER}/{name.hash}/rank_{name.rank}/{name.prefix}"
    manifest_name, plan_name = f"{folder}/{MANIFEST_FILE}", f"{folder}/{PLAN_FILE}"
    for needed in (manifest_name, plan_name):
        if needed not in there:
            raise refused("missing_member", "is missing", member=needed)
    with _believing(manifest_name, "corrupt_manifest"):
        manifest = parse_manifest(_record(layout, manifest_name), path=layout.root / manifest_name, name=name)
    for file, record in manifest.files.items():
        member = there.get(f"{folder}/{file}")
        if member is None:
            raise refused("missing_member", "is named by its manifest and is missing", member=f"{folder}/{file}")
        if (record.sha256, record.size_bytes) != (member.sha256, member.size_bytes):
            raise refused("digest_mismatch", "is another file than its manifest names", member=member.path)
    ours = {place.file for m in there.values() if (place := m.place).prefix == name.prefix and place.rank == name.rank}
    for file in sorted(ours - manifest.files.keys() - {MANIFEST_FILE}):
        raise refused("unlisted_member", "is named by no manifest", member=f"{folder}/{file}")
    return manifest, _check_plan(layout, plan_name, manifest)


def _check_plan(layout: CacheLayout, name: str, manifest: Manifest) -> Plan:
    with _believing(name, "corrupt_plan"):
        plan = parse_plan(_record(layout, name), path=layout.root / name)
    if len(plan.variants) != len(manifest.variants):
        raise refused(
            "corrupt_plan",
            "has other variants than its manifest says",
            member=name,
            expected=len(manifest.variants),
            actual=len(plan.variants),
        )
    pieces = [{step.piece for step in variant.steps} for variant in plan.variants]
    for row in manifest.rows:
        if row.piece_index not in pieces[row.variant]:
            raise refused("corrupt_plan", "lacks a piece that its manifest names", member=name, actual=row.piece_index)
    return plan


def _record(layout: CacheLayout, name: str) -> bytes:
    """Return the bytes of a record, of which it is known what they come to once they are parsed."""
    data = (layout.root / name).read_bytes()
    check_values(data, name)
    return data


def _check_origins(folder: Path, name: str, manifest: Manifest, plan: Plan) -> None:
    """Check that each artifact is what its row says, as load does."""
    for row, error in misplaced(manifest, plan, folder):
        why = f"is not what its manifest says: {_without_remedy(error)}"
        raise refused("strange_artifact", why, member=name + row.artifact.file)


def _artifact_names(base: str, rows: Iterator[Row], there: Mapping[str, Member]) -> set[str]:
    found = set()
    for row in rows:
        name = f"{base}/{ARTIFACTS}/{row.artifact.file}"
        member = there.get(name)
        if member is None:
            raise refused("missing_artifact", "is named by a manifest and is missing", member=name)
        if member.size_bytes != row.artifact.size_bytes:
            raise refused(
                "size_mismatch",
                "has another size than its manifest says",
                member=name,
                expected=row.artifact.size_bytes,
                actual=member.size_bytes,
            )
        found.add(name)
    return found


def check_package(path: Path, member: Member) -> None:
    """Check that a package holds native code, kernels and metadata of ours, and nothing else."""
    try:
        unpack_package(path.read_bytes(), verified=True)
    except ArtifactError as error:
        why = f"is no package of cgtool's: {_without_remedy(error)}"
        raise refused("strange_package", why, member=member.path) from error


def _without_remedy(error: ArtifactError) -> str:
    return str(error).rpartition(". ")[0]  # whoever imports cannot warm it again


@contextlib.contextmanager
def _believing(member: str, reason: str) -> Iterator[None]:
    """Turn what a stranger's record makes a parser raise into a refusal that names the member."""
    try:
        yield
    except CacheSchemaError as error:
        why = f"has the schema {str(error.actual)[:20]}, and this cgtool reads {error.expected}"
        raise refused("unknown_schema", why, member=member, expected=error.expected) from error
    except (CacheCorruptError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise refused(reason, "is not as cgtool writes it", member=member, actual=str(error)[:500]) from error
    except RecursionError as error:
        raise refused(reason, "is nested without end", member=member) from error
    except MemoryError as error:
        raise refused("too_large", "needs more memory than there is", member=member) from error
