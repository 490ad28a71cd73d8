"""Units: compiled pieces, shared by all entries of a cache. Must not import torch.

A unit's key is the digest of everything that determines its bytes: piece identity, shape, options, target, compiler.
Its folder `units/<key[:2]>/<key>/` contains the bytes as `<sha256>.<kind>` and, written last, `unit.json`: a
`cgtool.store.records.Unit`.

Units that another user owns or can write to are ignored unless the policy allows them (`cgtool.store.trust`), because
an artifact that is copied from a unit into an entry is trusted there.

A folder is not a unit without an intact `unit.json`, or if the artifact is missing or does not match its digest. The
lock in the folder prevents duplicate work: N processes that need a unit compile it once. Without working locks two
processes may both compile it, and the last `unit.json` wins; both artifacts remain valid under their own digests.
"""

from __future__ import annotations

import contextlib
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
    corrupt_error,
    ensure_root,
    read_bytes,
    read_matching,
    remove,
    seal,
    sweep,
    unseal,
    write_atomic,
)
from cgtool.store.layout import UNIT_FILE, CacheLayout
from cgtool.store.lock import file_lock
from cgtool.store.records import Artifact, Unit
from cgtool.store.trust import check_unit_owner

_log = logging.getLogger(__name__)


class UnitStore:
    """All units of one cache.

    Args:
        layout: The cache.
        allow_shared: Whether to use units that others own or can write to; None uses the environment's setting.
    """

    def __init__(self, layout: CacheLayout, *, allow_shared: bool | None = None) -> None:
        # Resolve symlinks: one that is changed after the ownership check would lead to an unchecked folder.
        self._layout = CacheLayout(root=Path(os.path.realpath(layout.root)))
        self._allow_shared = environment().allow_shared_cache if allow_shared is None else allow_shared
        self._warned = False

    def lock(self, key: str, *, on_wait: Callable[[], None] | None = None) -> contextlib.AbstractContextManager[bool]:
        """Return the lock of a unit, to be held around `find` and `put`."""
        return file_lock(self._layout.unit_dir(key) / "lock", on_wait=on_wait)

    def find(self, key: str) -> Artifact | None:
        """Return a unit's artifact, or None if there is none that is intact and trusted; log why a unit is rejected."""
        path = self._layout.unit_dir(key) / UNIT_FILE
        try:
            if not self._allow_shared:
                check_unit_owner(self._layout, key)
            data = read_bytes(path)
            if data is None:
                return None
            artifact = parse_unit(data, path=path, key=key)
            read_matching(self.artifact_path(key, artifact), artifact.digest)
        except RefusedError as error:
            if not self._warned:  # warn once rather than for thousands of units
                self._warned = True
                _log.warning("%s Units that others could have written are recompiled.", error)
            return None
        except (CacheCorruptError, CacheSchemaError) as error:
            level = logging.INFO if isinstance(error, CacheSchemaError) else logging.WARNING
            _log.log(level, "%s Recompiling it.", error)
            return None
        return artifact

    def put(self, key: str, data: bytes, artifact: Artifact) -> None:
        """Store a unit, replacing any existing one."""
        path = self.artifact_path(key, artifact)
        if sha256_hex(data) != artifact.digest or len(data) != artifact.size_bytes:
            message = f"The bytes of unit {key} do not match its record. Please report this."
            raise CacheError(message, path=path, expected=artifact.digest, actual=sha256_hex(data))
        ensure_root(self._layout.root)
        write_atomic(path, data, mode=ARTIFACT_MODE)
        write_atomic(path.parent / UNIT_FILE, seal(Unit(key=key, artifact=artifact)))
        sweep(path.parent)

    def remove(self, key: str) -> None:
        """Remove a unit's record; entries that use its artifact keep it."""
        remove(self._layout.unit_dir(key) / UNIT_FILE)

    def data(self, key: str, artifact: Artifact) -> bytes | None:
        """Return a unit's bytes, or None if they are missing or do not match their digest."""
        with contextlib.suppress(CacheCorruptError):
            return read_matching(self.artifact_path(key, artifact), artifact.digest)
        return None

    def link_into(self, objects: ObjectStore, key: str, artifact: Artifact) -> None:
        """Add a unit's artifact to an entry, as a hard link if possible, else as a copy."""
        objects.link_from(self.artifact_path(key, artifact), artifact.digest, artifact.kind)

    def artifact_path(self, key: str, artifact: Artifact) -> Path:
        """Return the path of a unit's artifact."""
        return self._layout.unit_dir(key) / artifact.file


def parse_unit(data: bytes, *, path: Path | str, key: str) -> Artifact:
    """Return the artifact in the bytes of a `unit.json`, which must belong to `key`."""
    unit = unseal(data, Unit, path=path)
    if unit.key != key:
        raise corrupt_error(path, "it belongs to another unit", expected=key, actual=unit.key)
    return unit.artifact
