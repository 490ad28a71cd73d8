"""Units: what a piece compiled to, shared by all entries of a cache. Must not import torch.

A unit's key is the digest of everything that decides its bytes: piece identity, shape, options, target, compiler. Its
folder `units/<key[:2]>/<key>/` holds the bytes as `<sha256>.<kind>` and then, written last, `unit.json`: a
`cgtool.store.records.Unit`.

A unit that another user owns or may write to is none, unless the policy says so (`cgtool.store.trust`): what is taken
from it into an entry of ours would be believed there.

A folder without an intact `unit.json`, or whose artifact is missing or differs from its digest, holds no unit. The lock
beside them saves double work: N processes that ask for one unit compile it once. Without working locks two processes
may both compile it, and the last `unit.json` wins; the bytes of both stay right, for they lie under their own digests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from cgtool.errors import CacheCorruptError, CacheError, CacheSchemaError, RefusedError
from cgtool.host import environment
from cgtool.plan.grammar import sha256_hex
from cgtool.store.entry import ObjectStore
from cgtool.store.files import (
    ARTIFACT_MODE,
    cache_error,
    corrupt,
    ensure_root,
    read_bytes,
    seal,
    sweep,
    unseal,
    write_atomic,
)
from cgtool.store.layout import UNIT_FILE, CacheLayout
from cgtool.store.lock import FileLock
from cgtool.store.records import Artifact, Unit
from cgtool.store.trust import check_unit_owner

_log = logging.getLogger(__name__)


class UnitStore:
    """All units of one cache.

    Args:
        layout: Where the cache lies.
        allow_shared: Whether others may own units or write to them; None takes the environment's word.
    """

    def __init__(self, layout: CacheLayout, *, allow_shared: bool | None = None) -> None:
        # Through links that others may turn, another folder could be read than the one that was looked at.
        self._layout = CacheLayout(root=Path(os.path.realpath(layout.root)))
        self._allow_shared = environment().allow_shared_cache if allow_shared is None else allow_shared
        self._told = False

    def lock(self, key: str, *, on_wait: Callable[[], None] | None = None) -> FileLock:
        """Return the lock of a unit, to be held around `find` and `put`.

        Args:
            key: The unit's key, 64 hexadecimal digits.
            on_wait: Called once if another process holds it: it is compiling the unit.
        """
        return FileLock(self._layout.unit_dir(key) / "lock", on_wait=on_wait)

    def find(self, key: str) -> Artifact | None:
        """Return a unit's artifact, or None when there is no intact one that only we may write; the others are logged.

        Raises:
            CacheError: It is there and cannot be read.
        """
        folder = self._layout.unit_dir(key)
        if not self._allow_shared:
            try:
                check_unit_owner(self._layout, key)
            except RefusedError as error:
                self._tell(error)
                return None
        try:
            return _read(folder, key)
        except CacheCorruptError as error:
            _log.warning("%s It is compiled again.", error)
        except CacheSchemaError as error:
            _log.info("%s It is compiled again.", error)
        return None

    def _tell(self, error: RefusedError) -> None:
        if not self._told:  # what holds for one holds for thousands
            self._told = True
            _log.warning("%s Units that others could have written are compiled again.", error)

    def put(self, key: str, data: bytes, artifact: Artifact) -> None:
        """Store a unit, replacing one that is corrupt or older.

        Args:
            key: The unit's key.
            data: The artifact's bytes.
            artifact: What is known of it; its digest and size must be those of `data`.

        Raises:
            CacheError: It cannot be written, or `artifact` does not fit `data`.
        """
        path = self.artifact_path(key, artifact)
        if sha256_hex(data) != artifact.digest or len(data) != artifact.size_bytes:
            raise CacheError(
                f"The unit {key} was given bytes that its record does not describe. Please report this.",
                path=path,
                expected=artifact.digest,
                actual=sha256_hex(data),
            )
        ensure_root(self._layout.root)
        folder = path.parent
        write_atomic(path, data, mode=ARTIFACT_MODE)
        write_atomic(folder / UNIT_FILE, seal(Unit(key=key, artifact=artifact)))
        sweep(folder)

    def remove(self, key: str) -> None:
        """Forget a unit; entries that have its artifact keep it.

        Raises:
            CacheError: It cannot be removed.
        """
        path = self._layout.unit_dir(key) / UNIT_FILE
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise cache_error(error, path) from error

    def data(self, key: str, artifact: Artifact) -> bytes | None:
        """Return a unit's bytes, or None where they are gone or differ from their digest.

        Raises:
            CacheError: They cannot be read.
        """
        data = read_bytes(self.artifact_path(key, artifact))
        return data if data is not None and sha256_hex(data) == artifact.digest else None

    def link_into(self, objects: ObjectStore, key: str, artifact: Artifact) -> None:
        """Put a unit's artifact into an entry: a hard link where possible, else a copy.

        Raises:
            CacheCorruptError: The unit's bytes are gone or differ from their digest.
            CacheError: It cannot be written.
        """
        objects.link_from(self.artifact_path(key, artifact), artifact.digest, artifact.kind)

    def artifact_path(self, key: str, artifact: Artifact) -> Path:
        """Return where a unit's bytes lie."""
        return self._layout.unit_dir(key) / artifact.file


def parse_unit(data: bytes, *, path: Path | str, key: str) -> Artifact:
    """Return the artifact that the bytes of a `unit.json` name.

    Args:
        data: The bytes.
        path: The file, for errors.
        key: Of the unit.

    Raises:
        CacheCorruptError: They are torn, break the grammar, or are another unit's.
        CacheSchemaError: Another version of cgtool wrote them.
    """
    unit = unseal(data, Unit, path=path)
    if unit.key != key:
        raise corrupt(path, "it belongs to another unit", expected=key, actual=unit.key)
    return unit.artifact


def _read(folder: Path, key: str) -> Artifact | None:
    path = folder / UNIT_FILE
    data = read_bytes(path)
    if data is None:
        return None
    artifact = parse_unit(data, path=path, key=key)
    _check_bytes(folder / artifact.file, artifact.digest)
    return artifact


def _check_bytes(path: Path, digest: str) -> None:
    data = read_bytes(path)
    actual = None if data is None else sha256_hex(data)
    if data is None or actual != digest:
        why = "it is missing" if data is None else "its bytes differ from its digest"
        raise corrupt(path, why, expected=digest, actual=actual)
