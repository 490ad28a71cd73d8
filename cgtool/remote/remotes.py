"""The configured remote stores: queried for units before a compile, and for entries on a miss. Must not import torch.

Stores are optional unless they are required: if one fails, there is a warning, and all processes that share the cache
suspend it for a minute. Content from a store is always verified. By configuring a store the user trusts it like a
private cache; with trusted keys, unsigned content is ignored, which includes all units.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cgtool.errors import ArtifactError, CacheCorruptError, CacheMissError, CacheSchemaError, RefusedError, RemoteError
from cgtool.host import environment
from cgtool.plan.grammar import sha256_hex
from cgtool.remote.entries import candidates, in_cache, indexes, open_bundle, unit_path
from cgtool.remote.sending import Each, kept_signature, send_entry
from cgtool.remote.stores import Store, open_store, read, redacted, stream
from cgtool.store.artifacts import Origin, split_origin
from cgtool.store.artifacts import unpack as unpack_package
from cgtool.store.bundle.gather import gather
from cgtool.store.bundle.install import check_fits, check_pickles, install, unpacking_folder
from cgtool.store.bundle.unpack import unpack
from cgtool.store.bundle_index import PACKAGE_KIND, Limits, parse_index, refused
from cgtool.store.files import seal, touch
from cgtool.store.layout import CACHE_FOLDER, MANIFEST_FILE, CacheLayout, RankName
from cgtool.store.leases import keep
from cgtool.store.lock import file_lock
from cgtool.store.records import Artifact, Key, Unit
from cgtool.store.trust import TrustPolicy
from cgtool.store.units import parse_unit

if TYPE_CHECKING:
    from cgtool.config import CompilationConfig
    from cgtool.store.signatures import PublicKeys

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

#: How long a failed store is not used.
_SUSPEND_SECS = 60.0
_MAX_UNIT_BYTES = 2**20
#: Units' artifacts are held in memory.
_MAX_ARTIFACT_BYTES = 4 * 2**30
#: Candidates to check per lookup; each edit of a model adds one.
_MAX_CANDIDATES = 256


class Remotes:
    """The stores of one process, queried in order; if they are required, a failure is an error."""

    def __init__(
        self,
        layout: CacheLayout,
        urls: Sequence[str],
        *,
        trust: TrustPolicy,
        readonly: bool = False,
        required: bool = False,
    ) -> None:
        self.urls = tuple(urls)
        self.readonly = readonly
        self.required = required
        self._layout = layout
        self._trust = trust
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, layout: CacheLayout, config: CompilationConfig | None, trust: TrustPolicy) -> Remotes:
        """Return the stores in a configuration, or else in the environment variables of this process."""
        from cgtool.config import CompilationConfig  # imported lazily: a load needs it only on a miss

        names = ("CGTOOL_REMOTE", "CGTOOL_REMOTE_READONLY", "CGTOOL_REMOTE_REQUIRED")
        variables = environment().variables
        defaults = CompilationConfig.from_variables({name: variables.get(name, "") for name in names})
        chosen = config or defaults
        return cls(
            layout,
            chosen.remote or defaults.remote,
            trust=trust,
            readonly=chosen.remote_readonly or defaults.remote_readonly,
            required=chosen.remote_required or defaults.remote_required,
        )

    def working(self) -> Iterator[str]:
        """Yield the URLs of the stores that have not failed recently, or of all stores if they are required."""
        for url in self.urls:
            if self.required or not self._is_suspended(url):
                yield url

    def unit(self, key: str, origin: Origin) -> tuple[bytes, Artifact] | None:
        """Return the verified bytes and artifact of a unit from the first store that has it."""
        if self._trust.trusted_keys:
            return None
        return next(self._query(partial(_get_unit, key=key, origin=origin)), None)

    def put_unit(self, key: str, data: bytes, artifact: Artifact) -> None:
        """Add a unit to every store that does not have it."""
        if not self.readonly:
            list(self._query(partial(_put_unit, key=key, data=data, artifact=artifact)))

    def push(self, name: RankName, *, each: Each = map) -> None:
        """Add a finished rank of an entry to every store that does not have it."""
        if self.readonly or not self.urls or not keep(self._layout, name):
            return
        contents = gather(self._layout, [name])
        signed = kept_signature(self._layout, name.hash, contents)

        def send(store: Store) -> None:
            sent = send_entry(store, name.hash, contents, signed, each=each)
            if (warning := sent.warning(store)) is not None:
                _log.warning("%s", warning)

        for url in self.working():
            self._try(url, send)

    def find(
        self, find: Callable[[], _Answer], lookup: str, fits: Callable[[Key], bool], *, rank: int, prefix: str
    ) -> _Answer | None:
        """Pull candidate entries for a model, one at a time, until `find` succeeds.

        A lock ensures that of several processes on one machine that need the same model, one pulls and the others find
        the entry.

        Args:
            find: Looks for the model in the cache; raises CacheMissError if no entry serves it.
            lookup: The lookup digest of the model.
            fits: Returns whether an entry with a key may serve the model; others are not pulled.
            rank: The rank to pull.
            prefix: The prefix to pull.

        Returns:
            The result of `find`, or None if it never succeeded.
        """

        def pull_and_find(store: Store) -> _Answer | None:
            for hash_ in list(candidates(store, lookup))[:_MAX_CANDIDATES]:
                name = RankName(hash=hash_, rank=rank, prefix=prefix)
                if self._ensure_pulled(store, name, fits):
                    with contextlib.suppress(CacheMissError):
                        return find()
            return None

        if not self.urls:
            return None
        with file_lock(self._layout.state_dir / "locks" / f"pull-{lookup}"):
            return next(self._query(pull_and_find), None)

    def _ensure_pulled(self, store: Store, name: RankName, fits: Callable[[Key], bool]) -> bool:
        """Pull an entry if it fits and is not in the cache; return whether the cache contains it."""
        if self._layout.manifest_file(name).exists():
            return True
        keys = None
        if self._trust.trusted_keys:
            from cgtool.store.signatures import load_public_keys  # imported lazily: takes tens of milliseconds

            keys = load_public_keys(self._trust.trusted_keys)
        pulled = False
        for digest in indexes(store, name.hash).get(name.hash, ()):
            pulled |= self._pull_bundle(store, name, digest, fits, keys)
        return pulled

    def _pull_bundle(
        self, store: Store, name: RankName, digest: str, fits: Callable[[Key], bool], keys: PublicKeys | None
    ) -> bool:
        """Pull one bundle of an entry if it contains the rank, is trusted and fits; return whether it was pulled."""
        bundle = open_bundle(store, name.hash, digest, partial(in_cache, self._layout))
        if bundle is None:
            return False
        if keys is not None:
            from cgtool.store import signatures

            signatures.check(bundle.index_bytes, bundle.signature_bytes, keys, what=bundle.what)
        index = parse_index(bundle.index_bytes, limits=Limits())
        wanted = f"{CACHE_FOLDER}/{name.hash}/rank_{name.rank}/{name.prefix}/{MANIFEST_FILE}"
        if wanted not in {member.path for member in index.members} or not fits(bundle.key(index, name.hash)):
            return False
        began = time.monotonic()
        with unpacking_folder(self._layout) as folder:
            unpacked = unpack(bundle, folder, keys=keys)
            check_pickles(unpacked.entries, trust=keys is None)
            check_fits(self._layout, unpacked, replacing=False)
            install(self._layout, unpacked, replacing=False)
        _log.info("Pulled %s from %s in %.1f s", name.hash, store.url, time.monotonic() - began)
        return True

    def _query(self, query: Callable[[Store], _Answer | None]) -> Iterator[_Answer]:
        """Call a function with each usable store, and yield the results that are not None."""
        for url in self.working():
            try:
                answer = self._try(url, query)
            except (RefusedError, CacheCorruptError, CacheSchemaError) as error:
                if self.required:
                    raise
                _log.warning("Ignoring content of %s: %s", redacted(url), error)
            else:
                if answer is not None:
                    yield answer

    def _try(self, url: str, call: Callable[[Store], _Answer]) -> _Answer | None:
        """Call a function with a store; if the store fails and is not required, suspend it and return None."""
        try:
            return call(self._store(url))
        except RemoteError as error:
            if self.required:
                raise
            self._suspend(url, error)
            return None

    def _store(self, url: str) -> Store:
        with self._lock:
            if url not in self._stores:
                self._stores[url] = open_store(url)
            return self._stores[url]

    def _mark(self, url: str) -> Path:
        return self._layout.state_dir / "remotes" / sha256_hex(redacted(url).encode())

    def _is_suspended(self, url: str) -> bool:
        try:
            return abs(time.time() - self._mark(url).stat().st_mtime) < _SUSPEND_SECS
        except OSError:
            return False

    def _suspend(self, url: str, error: RemoteError) -> None:
        with self._lock:
            if not self._is_suspended(url):
                _log.warning("%s It will not be used for %d s.", error, _SUSPEND_SECS)
            with contextlib.suppress(Exception):  # in a read-only cache, every request to the store fails on its own
                touch(self._mark(url))


def _get_unit(store: Store, *, key: str, origin: Origin) -> tuple[bytes, Artifact] | None:
    path = unit_path(key)
    record = read(store, path, most=_MAX_UNIT_BYTES)
    if record is None:
        return None
    artifact = parse_unit(record, path=f"{store.url}/{path}", key=key)
    if artifact.size_bytes > _MAX_ARTIFACT_BYTES:
        why = f"is listed with {artifact.size_bytes} bytes, but only {_MAX_ARTIFACT_BYTES} are allowed"
        raise refused("too_large", why, member=path, expected=_MAX_ARTIFACT_BYTES, actual=artifact.size_bytes)
    data = b"".join(stream(store, f"artifacts/{artifact.file}", artifact.size_bytes))
    if sha256_hex(data) != artifact.digest:
        raise refused("digest_mismatch", "does not match its digest", member=f"artifacts/{artifact.file}")
    try:
        actual = split_origin(data, artifact.kind)[0]
        if artifact.kind == PACKAGE_KIND:
            unpack_package(data, verified=True)
    except ArtifactError as error:
        raise refused("strange_artifact", f"is not an artifact of cgtool: {error}", member=path) from error
    if (actual.piece, actual.shape) != (origin.piece, origin.shape):
        raise refused("strange_artifact", "was compiled from another piece than its unit", member=path)
    return data, artifact


def _put_unit(store: Store, *, key: str, data: bytes, artifact: Artifact) -> None:
    path = f"artifacts/{artifact.file}"
    if store.size(path) != artifact.size_bytes:
        store.put(path, data)
    if store.size(unit_path(key)) is None:
        store.put(unit_path(key), seal(Unit(key=key, artifact=artifact)), if_absent=True)
