"""Uploading an entry to a store, so that readers find all of it or nothing. Must not import torch.

Artifacts are sent first, then records and lookup files, and last the index, which makes them visible. Files that the
store has already are not sent again.
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

#: Larger files are sent from disk instead of memory.
_MAX_MEMORY_BYTES = 64 * 2**20
#: `map` or a concurrent equivalent.
Each = Callable[[Callable[[Any], Any], Collection[Any]], Iterable[Any]]


class Sent(NamedTuple):
    """The number of files sent, their total size, and whether the store replaced a file despite `if_absent`."""

    files: int
    size_bytes: int
    is_replaced: bool

    def warning(self, store: Store) -> str | None:
        """Return a warning about a store without conditional writes, or None."""
        if self.files and store.caveat:
            return f"{store.url} {store.caveat}"
        if not self.is_replaced:
            return None
        return (
            f"{store.url} replaces existing files although conditional writes were requested. Everything that cgtool "
            "reads is checked by digest, but if two machines push the same unit, the last one wins."
        )


def kept_signature(layout: CacheLayout, hash_: str, contents: Contents) -> bytes | None:
    """Return the signatures that an entry was imported with, if it still matches them."""
    return read_bytes(layout.entry_dir(hash_) / SIGNATURES / f"{sha256_hex(contents.index_bytes)}.sig")


def send_entry(store: Store, hash_: str, contents: Contents, signed: bytes | None, *, each: Each = map) -> Sent:
    """Send the files of an entry, and the signatures of its index, that a store does not have."""
    index = contents.index_bytes
    digest = sha256_hex(index)
    path = index_path(hash_, digest)
    sent: list[int] = []
    if signed is not None and read(store, signature_path(hash_, digest), most=len(signed)) != signed:
        store.put(signature_path(hash_, digest), signed)
        sent.append(len(signed))
    is_new = store.size(path) != len(index)
    is_first = is_new and not indexes(store, hash_)
    artifacts = [content for content in contents.contents if content.file is not None]
    records = [content for content in contents.contents if content.file is None]
    present = []
    for group in (artifacts, records):  # artifacts before the records that name them
        for content, size in zip(group, each(lambda content: _send(store, content), group), strict=True):
            if size is None:
                present.append(content)
            else:
                sent.append(size)
    marks = {mark_path(lookup, hash_) for manifest in contents.manifests for lookup in manifest.lookup}
    list(each(lambda mark: store.size(mark) is None and store.put(mark, b""), sorted(marks)))
    is_replaced = False
    if is_new:
        store.put(path, index, if_absent=store.size(path) is None)
        sent.append(len(index))
        is_replaced = store.put(path, index, if_absent=True)
    if is_first:  # files that were present may have been pruned before the index named them
        sizes = each(lambda content: _send(store, content), present)
        sent += [size for size in sizes if size is not None]
    return Sent(len(sent), sum(sent), is_replaced)


def _send(store: Store, content: Content) -> int | None:
    """Send one file and return its size, or None if the store has it already."""
    member, path = content.member, member_path(content.member)
    if store.size(path) == member.size_bytes:
        return None
    if content.file is not None and member.size_bytes > _MAX_MEMORY_BYTES:
        for _ in content.chunks():
            pass  # checks the digest
        store.put(path, content.file)
    else:
        store.put(path, b"".join(content.chunks()))
    return member.size_bytes
