"""Finding and reading the entries of a store, in the layout of `cgtool.remote`. Must not import torch.

An entry is read as a bundle (`RemoteBundle`), so that content from a store passes the same checks as a bundle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cgtool.errors import CacheCorruptError
from cgtool.plan.grammar import sha256_hex
from cgtool.remote.stores import Store, read, stream
from cgtool.store.bundle_index import (
    INDEX_FILE,
    MAX_SIGNATURE_BYTES,
    SIGNATURE_FILE,
    Index,
    Limits,
    Member,
    check_values,
    refused,
)
from cgtool.store.files import read_matching
from cgtool.store.layout import CACHE_FOLDER, KEY_FILE, CacheLayout, is_hash, short
from cgtool.store.records import Key, parse_key

#: The number of concurrent transfers.
AT_ONCE = 8
#: Returns the bytes of a member from this machine, or None if it does not have them.
Have = Callable[[Member], bytes | None]


def index_path(hash_: str, digest: str) -> str:
    """Return the path of an index of an entry."""
    return f"entries/{hash_}/{digest}.{INDEX_FILE}"


def signature_path(hash_: str, digest: str) -> str:
    """Return the path of the signatures of an index."""
    return f"entries/{hash_}/{digest}.{SIGNATURE_FILE}"


def member_path(member: Member) -> str:
    """Return the path of a member of an index."""
    place = member.place
    return f"artifacts/{place.file}" if place.kind else f"entries/{place.hash}/{member.sha256}.{place.file}"


def mark_path(lookup: str, hash_: str) -> str:
    """Return the path of the file that leads from a lookup digest to an entry."""
    return f"lookup/{lookup}/{hash_}"


def unit_path(key: str) -> str:
    """Return the path of the record of a unit."""
    return f"units/{key}"


def in_cache(layout: CacheLayout, member: Member) -> bytes | None:
    """Return the bytes of a member from its place in a cache, or None if they are missing or corrupt."""
    try:
        return read_matching(layout.root / member.path, member.sha256)
    except CacheCorruptError:
        return None


def indexes(store: Store, hash_: str | None = None) -> dict[str, list[str]]:
    """Return the digests of the indexes of one entry or of all entries, oldest first, by the entry's hash."""
    found: dict[str, list[tuple[float, str]]] = {}
    for item in store.list("entries" if hash_ is None else f"entries/{hash_}"):
        match item.path.split("/"):
            case ["entries", entry, file] if is_hash(entry):
                digest, _, name = file.partition(".")
                if name == INDEX_FILE and is_hash(digest):
                    found.setdefault(entry, []).append((item.modified, digest))
    return {entry: [digest for _, digest in sorted(found[entry])] for entry in sorted(found)}


class RemoteBundle:
    """A bundle whose members are in a store; see `cgtool.store.bundle.reading.OpenBundle`."""

    at_once = AT_ONCE

    def __init__(self, store: Store, hash_: str, index_bytes: bytes, signature_bytes: bytes | None, have: Have) -> None:
        self.url = store.url
        self.what = f"The entry {short(hash_)} of {store.url}"
        self.index_bytes = index_bytes
        self.signature_bytes = signature_bytes
        self._store = store
        self._hash = hash_
        self._have = have
        self._reading = threading.Lock()

    def members(self, index: Index) -> Iterator[tuple[Member, Iterator[bytes]]]:
        """Yield every member with its bytes; refuse an index that names other entries."""
        if index.hashes != (self._hash,):
            why, actual = "names members of other entries than its own", list(index.hashes)
            raise refused("bad_index", why, member=INDEX_FILE, expected=self._hash, actual=actual)
        for member in index.members:
            yield member, self._body(member)

    def _body(self, member: Member) -> Iterator[bytes]:
        with self._reading:  # local files are read into memory, so read only one at a time
            data = self._have(member)
            if data is not None:
                yield data
        if data is None:
            yield from stream(self._store, member_path(member), member.size_bytes)

    def key(self, index: Index, hash_: str) -> Key:
        """Return the key of an entry in the bundle, reading nothing else."""
        path = f"{CACHE_FOLDER}/{hash_}/{KEY_FILE}"
        member = next((member for member in index.members if member.path == path), None)
        if member is None:
            raise refused("missing_member", "is missing", member=path)
        data = b"".join(self._body(member))
        if sha256_hex(data) != member.sha256:
            raise refused("digest_mismatch", "does not match its digest", member=path)
        check_values(data, path)
        return parse_key(data, path=Path(path), hash_=hash_)


def open_bundle(store: Store, hash_: str, digest: str, have: Have = lambda _: None) -> RemoteBundle | None:
    """Open a bundle of an entry, reading only index and signatures; None if the index is missing or incomplete."""
    data = read(store, index_path(hash_, digest), most=Limits().max_index_bytes)
    if data is None or sha256_hex(data) != digest:
        return None
    signature = read(store, signature_path(hash_, digest), most=MAX_SIGNATURE_BYTES)
    return RemoteBundle(store, hash_, data, signature, have)


def candidates(store: Store, lookup: str) -> Iterable[str]:
    """Return the hashes of the candidate entries for a lookup digest, newest first."""
    marks = sorted(store.list(f"lookup/{lookup}"), key=lambda item: -item.modified)
    names = [item.path.rpartition("/")[2] for item in marks]
    return [name for name in names if is_hash(name)]
