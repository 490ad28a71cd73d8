"""Sending one entry to a store, so that a reader finds all of it or none. Must not import torch.

Artifacts come first, then records and marks, then the index that makes them seen. What is there is not sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from cgtool.plan.grammar import sha256_hex
from cgtool.remote.entries import index_path, indexes, mark_path, member_path, signature_path
from cgtool.remote.stores import Store, read
from cgtool.store.bundle.gather import Content, Contents
from cgtool.store.files import read_bytes
from cgtool.store.layout import SIGNATURES, CacheLayout

#: What is larger is sent from its file, and not held in memory.
_MOST_HELD_BYTES = 64 * 2**20
#: Calls a function with each of some values, perhaps several at a time: `map`, or that of a pool.
Each = Callable[[Callable[[Any], Any], Collection[Any]], Iterable[Any]]


class Sent(NamedTuple):
    """What went: how many files, their bytes, and whether the store replaces what it should leave alone."""

    files: int
    size_bytes: int
    is_replaced: bool

    def warning(self, store: Store) -> str | None:
        """Name a store that knows no preconditions."""
        if self.files and store.caveat:
            return f"{store.url} {store.caveat}"
        if not self.is_replaced:
            return None
        return (
            f"{store.url} replaces files where it was asked to write only what is absent. Everything that cgtool reads "
            "there is checked by digest; but of two machines that push one unit the last wins."
        )


def kept_signature(layout: CacheLayout, hash_: str, contents: Contents) -> bytes | None:
    """Return the signatures that an entry came with, where it is as it was signed."""
    return read_bytes(layout.entry_dir(hash_) / SIGNATURES / f"{sha256_hex(contents.index_bytes)}.sig")


def send_entry(store: Store, hash_: str, contents: Contents, signed: bytes | None, *, each: Each = map) -> Sent:
    """Send what a store lacks of an entry and of the signatures of its index."""
    index = contents.index_bytes
    digest = sha256_hex(index)
    place = index_path(hash_, digest)
    sent: list[int] = []
    if signed is not None and read(store, signature_path(hash_, digest), most=len(signed)) != signed:
        store.put(signature_path(hash_, digest), signed)
        sent.append(len(signed))
    is_new = store.size(place) != len(index)
    is_first = is_new and not indexes(store, hash_)
    artifacts = [content for content in contents.contents if content.file is not None]
    records = [content for content in contents.contents if content.file is None]
    there = []
    for group in (artifacts, records):  # what is named comes before what names it
        for content, size in zip(group, each(lambda content: _send(store, content), group), strict=True):
            if size is None:
                there.append(content)
            else:
                sent.append(size)
    marks = {mark_path(lookup, hash_) for manifest in contents.manifests for lookup in manifest.lookup}
    list(each(lambda mark: store.size(mark) is None and store.put(mark, b""), sorted(marks)))
    is_replaced = False
    if is_new:
        store.put(place, index, if_absent=store.size(place) is None)
        sent.append(len(index))
        is_replaced = store.put(place, index, if_absent=True)
    if is_first:  # what was there already may have been pruned while nothing named it
        again = each(lambda content: _send(store, content), there)
        sent += [size for size in again if size is not None]
    return Sent(len(sent), sum(sent), is_replaced)


def _send(store: Store, content: Content) -> int | None:
    """Send one file and return its size; None where the store has it."""
    member, path = content.member, member_path(content.member)
    if store.size(path) == member.size_bytes:
        return None
    if content.file is not None and member.size_bytes > _MOST_HELD_BYTES:
        for _ in content.chunks():
            pass  # which matches it to its digest
        store.put(path, content.file)
    else:
        store.put(path, b"".join(content.chunks()))
    return member.size_bytes
