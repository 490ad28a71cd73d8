"""The stores that a process was told to use beside its cache: units before a compile, entries before a miss. No torch.

A process can do without them unless they are required: one that fails is a warning, and is left alone for a minute by
every process that shares the cache. Nothing of a store is believed for where it comes from; whoever names one vouches
for it as for a cache of his own, and where keys are trusted, what nobody signed is passed over: all units are.
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
from cgtool.remote.stores import Store, open_store, read, shown, stream
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

#: How long a store that failed is left alone.
_LEFT_ALONE_SECS = 60.0
_MOST_UNIT_BYTES = 2**20
#: An artifact of a unit is held in memory.
_MOST_ARTIFACT_BYTES = 4 * 2**30
#: Entries that one digest of cheap facts leads to, of which the key is looked at: each edit of a model makes one.
_MOST_CANDIDATES = 256


class Remotes:
    """The stores of one process, asked in order; where they are required, one that fails is an error."""

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
        """Return the stores that a configuration names, or else the variables of this process."""
        from cgtool.config import CompilationConfig  # a load needs it only once it has missed

        names = ("CGTOOL_REMOTE", "CGTOOL_REMOTE_READONLY", "CGTOOL_REMOTE_REQUIRED")
        variables = environment().variables
        said = CompilationConfig.from_variables({name: variables.get(name, "") for name in names})
        given = config or said
        return cls(
            layout,
            given.remote or said.remote,
            trust=trust,
            readonly=given.remote_readonly or said.remote_readonly,
            required=given.remote_required or said.remote_required,
        )

    def working(self) -> Iterator[str]:
        """Yield the URLs of the stores that did not fail just now; of required ones, all."""
        for url in self.urls:
            if self.required or not self._is_left_alone(url):
                yield url

    def unit(self, key: str, origin: Origin) -> tuple[bytes, Artifact] | None:
        """Return what a unit compiled to elsewhere, matched to its digest and to what it was compiled from."""
        if self._trust.trusted_keys:
            return None
        return next(self._answers(partial(_unit, key=key, origin=origin)), None)

    def put_unit(self, key: str, data: bytes, artifact: Artifact) -> None:
        """Hand a unit on to every store that lacks it."""
        if not self.readonly:
            list(self._answers(partial(_put_unit, key=key, data=data, artifact=artifact)))

    def push(self, name: RankName, *, each: Each = map) -> None:
        """Add a rank of an entry, which is finished, to every store that lacks it; one that fails is a warning."""
        if self.readonly or not self.urls or not keep(self._layout, name):
            return
        contents = gather(self._layout, [name])
        signed = kept_signature(self._layout, name.hash, contents)
        for url in self.working():
            try:
                store = self._store(url)
                sent = send_entry(store, name.hash, contents, signed, each=each)
            except RemoteError as error:
                if self.required:
                    raise
                self._leave_alone(url, error)
            else:
                if (warning := sent.warning(store)) is not None:
                    _log.warning("%s", warning)

    def find(
        self, find: Callable[[], _Answer], lookup: str, fits: Callable[[Key], bool], *, rank: int, prefix: str
    ) -> _Answer | None:
        """Pull what may serve a model, entry by entry, until `find` finds it in the cache; None where it never does.

        Of the processes of one machine that look for one model at a time, one pulls and the others find. `find` raises
        CacheMissError where the cache does not serve the model, whose cheap facts have the digest `lookup`.
        """

        def ask(store: Store) -> _Answer | None:
            for hash_ in list(candidates(store, lookup))[:_MOST_CANDIDATES]:
                name = RankName(hash=hash_, rank=rank, prefix=prefix)
                if self._have_or_pull(store, name, fits):
                    with contextlib.suppress(CacheMissError):
                        return find()
            return None

        if not self.urls:
            return None
        with file_lock(self._layout.state_dir / "locks" / f"pull-{lookup}"):
            return next(self._answers(ask), None)

    def _have_or_pull(self, store: Store, name: RankName, fits: Callable[[Key], bool]) -> bool:
        """Return whether the cache has an entry now that may serve; one that does not fit is not pulled."""
        if self._layout.manifest_file(name).exists():
            return True
        keys = None
        if self._trust.trusted_keys:
            from cgtool.store.signatures import load_public_keys  # tens of milliseconds, and only under this policy

            keys = load_public_keys(self._trust.trusted_keys)
        pulled = False
        for digest in indexes(store, name.hash).get(name.hash, ()):
            pulled |= self._pulled(store, name, digest, fits, keys)
        return pulled

    def _pulled(
        self, store: Store, name: RankName, digest: str, fits: Callable[[Key], bool], keys: PublicKeys | None
    ) -> bool:
        """Pull one bundle of an entry, if it holds the rank, is trusted and fits."""
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

    def _answers(self, ask: Callable[[Store], _Answer | None]) -> Iterator[_Answer]:
        """Put a question to each store that works, and yield what is an answer."""
        for url in self.working():
            try:
                answer = ask(self._store(url))
            except RemoteError as error:
                if self.required:
                    raise
                self._leave_alone(url, error)
            except (RefusedError, CacheCorruptError, CacheSchemaError) as error:
                if self.required:
                    raise
                _log.warning("Nothing of %s was taken: %s", shown(url), error)
            else:
                if answer is not None:
                    yield answer

    def _store(self, url: str) -> Store:
        with self._lock:
            if url not in self._stores:
                self._stores[url] = open_store(url)
            return self._stores[url]

    def _mark(self, url: str) -> Path:
        return self._layout.state_dir / "remotes" / sha256_hex(shown(url).encode())

    def _is_left_alone(self, url: str) -> bool:
        try:
            return abs(time.time() - self._mark(url).stat().st_mtime) < _LEFT_ALONE_SECS
        except OSError:
            return False

    def _leave_alone(self, url: str, error: RemoteError) -> None:
        with self._lock:
            if not self._is_left_alone(url):
                _log.warning("%s It is not asked again for %d s.", error, _LEFT_ALONE_SECS)
            with contextlib.suppress(Exception):  # a cache that cannot be written: then each question fails by itself
                touch(self._mark(url))


def _unit(store: Store, *, key: str, origin: Origin) -> tuple[bytes, Artifact] | None:
    path = unit_path(key)
    record = read(store, path, most=_MOST_UNIT_BYTES)
    if record is None:
        return None
    artifact = parse_unit(record, path=f"{store.url}/{path}", key=key)
    if artifact.size_bytes > _MOST_ARTIFACT_BYTES:
        why = f"promises {artifact.size_bytes} bytes, and {_MOST_ARTIFACT_BYTES} are allowed"
        raise refused("too_large", why, member=path, expected=_MOST_ARTIFACT_BYTES, actual=artifact.size_bytes)
    data = b"".join(stream(store, f"artifacts/{artifact.file}", artifact.size_bytes))
    if sha256_hex(data) != artifact.digest:
        raise refused("digest_mismatch", "differs from its digest", member=f"artifacts/{artifact.file}")
    try:
        made_of = split_origin(data, artifact.kind)[0]
        if artifact.kind == PACKAGE_KIND:
            unpack_package(data, verified=True)
    except ArtifactError as error:
        raise refused("strange_artifact", f"is no artifact of cgtool's: {error}", member=path) from error
    if (made_of.piece, made_of.shape) != (origin.piece, origin.shape):
        raise refused("strange_artifact", "was compiled from another piece than its unit says", member=path)
    return data, artifact


def _put_unit(store: Store, *, key: str, data: bytes, artifact: Artifact) -> None:
    path = f"artifacts/{artifact.file}"
    if store.size(path) != artifact.size_bytes:
        store.put(path, data)
    if store.size(unit_path(key)) is None:
        store.put(unit_path(key), seal(Unit(key=key, artifact=artifact)), if_absent=True)
