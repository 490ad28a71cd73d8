"""Units: what a piece compiled to, shared by all entries of a cache. Must not import torch.

A unit's key is the digest of everything that decides its bytes: piece identity, shape, options, target, compiler. Its
folder `units/<key[:2]>/<key>/` holds the bytes as `<sha256>.<kind>` and then, written last, `unit.json`::

    {"schema": 2, "cgtool": version, "key": key, "artifact": sha256, "kind": str, "size_bytes": int,
     "compile_secs": float, "kernels": int, "guards": [str...], "proved": bool, "proof_gap": str,
     "created": str, "digest": ...}

A unit that another user owns or may write to is none, unless the policy says so (`cgtool.cache.trust`): what is taken
from it into an entry of ours would be believed there.

A folder without an intact `unit.json`, or whose artifact is missing or differs from its digest, holds no unit. The lock
beside them saves double work: N processes that ask for one unit compile it once. Without working locks two processes
may both compile it, and the last `unit.json` wins; the bytes of both stay right, for they lie under their own digests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from cgtool.cache.checks import count, flag, seconds, text, texts
from cgtool.cache.files import (
    ARTIFACT_MODE,
    cache_error,
    corrupt,
    ensure_root,
    parse_sealed,
    read_bytes,
    sealed_json,
    sweep,
    write_atomic,
)
from cgtool.cache.layout import UNIT_FILE, CacheLayout, check_hash, check_kind
from cgtool.cache.lock import FileLock
from cgtool.cache.objects import ObjectStore
from cgtool.cache.state import timestamp
from cgtool.cache.trust import check_unit_owner
from cgtool.digests import sha256_hex
from cgtool.errors import CacheCorruptError, CacheError, CacheSchemaError, RefusedError
from cgtool.pieces import Json
from cgtool.records import dataclass
from cgtool.variables import environment

_log = logging.getLogger(__name__)

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class UnitRecord:
    """What is known of a compiled unit.

    Args:
        digest: The SHA-256 of the artifact's bytes.
        kind: The artifact's kind, which is its file suffix.
        size_bytes: The artifact's size.
        compile_secs: How long it took to compile, in seconds.
        kernels: How many kernels the compiler generated.
        guards: Facts over the graph's symbols that the compiler added.
        proved: Whether the bytes were run and compared with the piece before they were stored.
        proof_gap: Why they could not be, where that was tried and the piece itself does not run alone; else "".
        created: When, in UTC: "2026-01-31T12:00:00.123Z".
    """

    digest: str
    kind: str
    size_bytes: int
    compile_secs: float
    kernels: int
    guards: tuple[str, ...] = ()
    proved: bool = False
    proof_gap: str = ""
    created: str = field(default_factory=timestamp)

    @property
    def needs_proof(self) -> bool:
        """Whether nobody has tried to prove it yet."""
        return not self.proved and not self.proof_gap

    def to_json(self) -> Json:
        """Return the record's fields as JSON."""
        return {
            "artifact": self.digest,
            "kind": self.kind,
            "size_bytes": self.size_bytes,
            "compile_secs": self.compile_secs,
            "kernels": self.kernels,
            "guards": list(self.guards),
            "proved": self.proved,
            "proof_gap": self.proof_gap,
            "created": self.created,
        }

    @classmethod
    def from_json(cls, data: Json) -> UnitRecord:
        """Return the record of `data`.

        Raises:
            CacheError: A field is outside of the grammar.
            KeyError: A field is missing.
        """
        return cls(
            digest=check_hash(text(data["artifact"])),
            kind=check_kind(text(data["kind"])),
            size_bytes=count(data["size_bytes"]),
            compile_secs=seconds(data["compile_secs"]),
            kernels=count(data["kernels"]),
            guards=texts(data["guards"]),
            proved=flag(data["proved"]),
            proof_gap=text(data["proof_gap"]),
            created=text(data["created"]),
        )


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

    def find(self, key: str) -> UnitRecord | None:
        """Return a unit's record, or None when there is no intact one that only we may write; the others are logged.

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

    def put(self, key: str, data: bytes, record: UnitRecord) -> UnitRecord:
        """Store a unit, replacing one that is corrupt or older.

        Args:
            key: The unit's key.
            data: The artifact's bytes.
            record: What is known of it; its digest and size must be those of `data`.

        Returns:
            The record.

        Raises:
            CacheError: It cannot be written, or `record` does not fit `data`.
        """
        path = self.artifact_path(key, record)
        if sha256_hex(data) != record.digest or len(data) != record.size_bytes:
            raise CacheError(
                f"The unit {key} was given bytes that its record does not describe. Please report this.",
                path=path,
                expected=record.digest,
                actual=sha256_hex(data),
            )
        ensure_root(self._layout.root)
        folder = path.parent
        write_atomic(path, data, mode=ARTIFACT_MODE)
        write_atomic(folder / UNIT_FILE, sealed_json({"key": key, **record.to_json()}, schema=SCHEMA))
        sweep(folder)
        return record

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

    def data(self, key: str, record: UnitRecord) -> bytes | None:
        """Return a unit's bytes, or None where they are gone or differ from their digest.

        Raises:
            CacheError: They cannot be read.
        """
        data = read_bytes(self.artifact_path(key, record))
        return data if data is not None and sha256_hex(data) == record.digest else None

    def link_into(self, objects: ObjectStore, key: str, record: UnitRecord) -> None:
        """Put a unit's artifact into an entry: a hard link where possible, else a copy.

        Raises:
            CacheCorruptError: The unit's bytes are gone or differ from their digest.
            CacheError: It cannot be written.
        """
        objects.link_from(self.artifact_path(key, record), record.digest, record.kind)

    def artifact_path(self, key: str, record: UnitRecord) -> Path:
        """Return where a unit's bytes lie."""
        return self._layout.unit_dir(key) / f"{check_hash(record.digest)}.{check_kind(record.kind)}"


def new_record(
    data: bytes, *, kind: str, compile_secs: float, kernels: int, guards: tuple[str, ...] = ()
) -> UnitRecord:
    """Return the record of an artifact that was compiled just now.

    Args:
        data: The artifact's bytes.
        kind: Its kind.
        compile_secs: How long it took, in seconds.
        kernels: How many kernels were generated.
        guards: Facts that the compiler added.
    """
    return UnitRecord(
        digest=sha256_hex(data),
        kind=kind,
        size_bytes=len(data),
        compile_secs=round(compile_secs, 3),
        kernels=kernels,
        guards=guards,
    )


def parse_unit(data: bytes, *, path: Path | str, key: str) -> UnitRecord:
    """Return the record in the bytes of a `unit.json`.

    Args:
        data: The bytes.
        path: The file, for errors.
        key: Of the unit.

    Raises:
        CacheCorruptError: They are torn, break the grammar, or are another unit's.
        CacheSchemaError: Another version of cgtool wrote them.
    """
    record = parse_sealed(data, path=path, schema=SCHEMA)
    if record.get("key") != key:
        raise corrupt(path, "it belongs to another unit", expected=key, actual=record.get("key"))
    try:
        return UnitRecord.from_json(record)
    except (CacheError, KeyError) as error:
        raise corrupt(path, f"a field is wrong: {error}") from error


def _read(folder: Path, key: str) -> UnitRecord | None:
    path = folder / UNIT_FILE
    data = read_bytes(path)
    if data is None:
        return None
    record = parse_unit(data, path=path, key=key)
    _check_bytes(folder / f"{record.digest}.{record.kind}", record.digest)
    return record


def _check_bytes(path: Path, digest: str) -> None:
    data = read_bytes(path)
    actual = None if data is None else sha256_hex(data)
    if data is None or actual != digest:
        why = "it is missing" if data is None else "its bytes differ from its digest"
        raise corrupt(path, why, expected=digest, actual=actual)
