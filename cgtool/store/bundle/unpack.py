"""Unpacking an untrusted bundle into a separate folder, and verifying it. Must not import torch.

Every byte is checked against the index before any of it is parsed. Then the records of each entry are parsed as load
will parse them: every file that they name must be present and match the index, and no other files may be present.
Nothing is written outside the folder, and no existing file is opened for writing.
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
from cgtool.store.bundle.reading import OpenBundle, Source, open_bundle
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

#: Flushing files concurrently: a disk completes many flushes in the time of one.
_THREADS = 16
#: Files that may be open while they wait for their flush.
_MAX_OPEN = 64
#: Called with the number of members on disk and the total number.
OnMember = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class EntryContent:
    """A verified entry of a bundle."""

    hash: str
    key: Key
    manifests: tuple[Manifest, ...]
    #: Member names of the artifacts that torch would unpickle.
    pickles: tuple[str, ...]

    @property
    def artifacts(self) -> dict[tuple[str, str], int]:
        """The sizes of the artifacts that the manifests name, by digest and kind."""
        return {
            (row.artifact.digest, row.artifact.kind): row.artifact.size_bytes
            for manifest in self.manifests
            for row in manifest.rows
        }


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """A verified bundle."""

    layout: CacheLayout
    index: Index
    index_bytes: bytes
    signature_bytes: bytes | None
    #: The id of the trusted key that signed it; None if no signature was required.
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
    """Unpack a bundle into an empty private folder, and verify all of it.

    Args:
        source: The bundle.
        folder: The folder to unpack into.
        keys: Trusted keys, one of which must have signed the bundle; None requires no signature.
        limits: Limits above which the bundle is refused.
        on_member: Called after each member is written.

    Raises:
        RefusedError: The bundle is not trusted or not valid; do not use anything in the folder.
    """
    limits = limits or Limits()
    with open_bundle(source, limits) as bundle:
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
    """Verify a bundle and yield a temporary cache root with its entries.

    The entries are untrusted: inspect them, but do not load them.
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
    write = _write_in_order if bundle.at_once == 1 else _write_concurrently
    for number, _ in enumerate(write(bundle, index, folder, signed=signed), 1):
        if on_member is not None:
            on_member(number, len(index.members))


def _write_in_order(bundle: OpenBundle, index: Index, folder: Path, *, signed: bool) -> Iterator[None]:
    """Write the members in order; yield after each one is flushed to disk."""
    flushes: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="cgtool-flush") as pool:
        for member, body in bundle.members(index):
            path = folder / member.path
            descriptor = _create(path, member)
            actual = _write(descriptor, path, member, body)
            flushes.append(pool.submit(_flush, descriptor, path))
            _check_digest(member, actual, signed=signed)
            if len(flushes) > _MAX_OPEN:
                yield flushes.popleft().result()
        for flush in flushes:
            yield flush.result()


def _write_concurrently(bundle: OpenBundle, index: Index, folder: Path, *, signed: bool) -> Iterator[None]:
    """Write several members concurrently; yield after each one is flushed to disk.

    An interrupt does not wait for the threads, which may be blocked on the network for a long time. They are therefore
    daemons, and no file is created in the folder after this generator ends, when the folder may be removed.
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

    pending: deque[AsyncResult[None]] = deque()
    with ThreadPool(bundle.at_once) as pool:
        try:
            for member_and_body in bundle.members(index):
                pending.append(pool.apply_async(store, member_and_body))
                if len(pending) > bundle.at_once:
                    yield outcome(pending.popleft())
            for result in pending:
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
    """Write a new file and return the digest of its bytes; the descriptor stays open unless an error is raised."""
    digest = hashlib.sha256()
    try:
        for chunk in body:
            digest.update(chunk)
            try:  # convert only write errors: the loop can also raise read errors
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
        why = "was changed after it was signed" if signed else "does not match its digest"
        raise refused(reason, why, member=member.path, expected=member.sha256, actual=actual)


def _flush(descriptor: int, path: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise cache_error(error, path) from error
    finally:
        os.close(descriptor)


def check_entry(layout: CacheLayout, hash_: str, members: Iterable[Member]) -> EntryContent:
    """Verify one entry that was unpacked under a separate cache root."""
    by_path = {member.path: member for member in members}
    base = f"{CACHE_FOLDER}/{hash_}"
    key_name = f"{base}/{KEY_FILE}"
    if key_name not in by_path:
        raise refused("missing_member", "is missing", member=key_name)
    with _parse_errors_as_refusals(key_name, "corrupt_key"):
        key = parse_key(_read_record(layout, key_name), path=layout.root / key_name, hash_=hash_)
    places = {(place.rank, place.prefix) for member in by_path.values() if (place := member.place).rank is not None}
    ranks = [
        _check_rank(layout, RankName(hash=hash_, rank=rank, prefix=prefix), by_path) for rank, prefix in sorted(places)
    ]
    if not ranks:
        raise refused("missing_member", "is missing", member=f"{base}/rank_0")
    manifests = tuple(manifest for manifest, _ in ranks)
    artifacts = _artifact_names(base, (row for manifest in manifests for row in manifest.rows), by_path)
    folder = f"{base}/{ARTIFACTS}/"
    for name in by_path:
        if name.startswith(folder) and name not in artifacts:
            raise refused("unnamed_artifact", "is an artifact that no manifest names", member=name)
    for name in sorted(artifacts):
        if by_path[name].place.kind == PACKAGE_KIND:
            check_package(layout.root / name, by_path[name])
    for manifest, plan in ranks:
        _check_origins(layout.root / folder, folder, manifest, plan)
    pickles = tuple(name for name in sorted(artifacts) if by_path[name].place.kind in PICKLE_KINDS)
    return EntryContent(hash=hash_, key=key, manifests=manifests, pickles=pickles)


def _check_rank(layout: CacheLayout, name: RankName, by_path: Mapping[str, Member]) -> tuple[Manifest, Plan]:
    folder = f"{CACHE_FOLDER}/{name.hash}/rank_{name.rank}/{name.prefix}"
    manifest_name, plan_name = f"{folder}/{MANIFEST_FILE}", f"{folder}/{PLAN_FILE}"
    for required in (manifest_name, plan_name):
        if required not in by_path:
            raise refused("missing_member", "is missing", member=required)
    with _parse_errors_as_refusals(manifest_name, "corrupt_manifest"):
        manifest = parse_manifest(_read_record(layout, manifest_name), path=layout.root / manifest_name, name=name)
    for file, record in manifest.files.items():
        member = by_path.get(f"{folder}/{file}")
        if member is None:
            raise refused("missing_member", "is named by its manifest but missing", member=f"{folder}/{file}")
        if (record.sha256, record.size_bytes) != (member.sha256, member.size_bytes):
            raise refused("digest_mismatch", "does not match the digest in its manifest", member=member.path)
    places = [member.place for member in by_path.values()]
    files = {place.file for place in places if (place.rank, place.prefix) == (name.rank, name.prefix)}
    for file in sorted(files - manifest.files.keys() - {MANIFEST_FILE}):
        raise refused("unlisted_member", "is not named by its manifest", member=f"{folder}/{file}")
    return manifest, _check_plan(layout, plan_name, manifest)


def _check_plan(layout: CacheLayout, name: str, manifest: Manifest) -> Plan:
    with _parse_errors_as_refusals(name, "corrupt_plan"):
        plan = parse_plan(_read_record(layout, name), path=layout.root / name)
    if len(plan.variants) != len(manifest.variants):
        raise refused(
            "corrupt_plan",
            "has different variants than its manifest",
            member=name,
            expected=len(manifest.variants),
            actual=len(plan.variants),
        )
    pieces = [{step.piece for step in variant.steps} for variant in plan.variants]
    for row in manifest.rows:
        if row.piece_index not in pieces[row.variant]:
            raise refused("corrupt_plan", "lacks a piece that its manifest names", member=name, actual=row.piece_index)
    return plan


def _read_record(layout: CacheLayout, name: str) -> bytes:
    """Return the bytes of a record after checking that parsing them takes bounded memory."""
    data = (layout.root / name).read_bytes()
    check_values(data, name)
    return data


def _check_origins(folder: Path, name: str, manifest: Manifest, plan: Plan) -> None:
    """Check that each artifact's origin matches its row, as load does."""
    for row, error in misplaced(manifest, plan, folder):
        why = f"does not match its manifest: {_without_remedy(error)}"
        raise refused("strange_artifact", why, member=name + row.artifact.file)


def _artifact_names(base: str, rows: Iterator[Row], by_path: Mapping[str, Member]) -> set[str]:
    names = set()
    for row in rows:
        name = f"{base}/{ARTIFACTS}/{row.artifact.file}"
        member = by_path.get(name)
        if member is None:
            raise refused("missing_artifact", "is named by a manifest but missing", member=name)
        if member.size_bytes != row.artifact.size_bytes:
            raise refused(
                "size_mismatch",
                "has a different size than in its manifest",
                member=name,
                expected=row.artifact.size_bytes,
                actual=member.size_bytes,
            )
        names.add(name)
    return names


def check_package(path: Path, member: Member) -> None:
    """Check that a package contains only the native code, kernels and metadata that cgtool writes."""
    try:
        unpack_package(path.read_bytes(), verified=True)
    except ArtifactError as error:
        why = f"is not a package written by cgtool: {_without_remedy(error)}"
        raise refused("strange_package", why, member=member.path) from error


def _without_remedy(error: ArtifactError) -> str:
    return str(error).rpartition(". ")[0]  # the importing user cannot warm the model again


@contextlib.contextmanager
def _parse_errors_as_refusals(member: str, reason: str) -> Iterator[None]:
    """Convert any error that an untrusted record causes in a parser to a refusal of the member."""
    try:
        yield
    except CacheSchemaError as error:
        why = f"has schema {str(error.actual)[:20]}, but this cgtool reads schema {error.expected}"
        raise refused("unknown_schema", why, member=member, expected=error.expected) from error
    except (CacheCorruptError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise refused(reason, "was not written by cgtool", member=member, actual=str(error)[:500]) from error
    except RecursionError as error:
        raise refused(reason, "is nested too deeply", member=member) from error
    except MemoryError as error:
        raise refused("too_large", "needs more memory than is available", member=member) from error
