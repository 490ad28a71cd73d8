"""`push` and `pull`: copy entries to and from a remote store. Prints nothing; importable without torch.

A push sends only the files that the store lacks, and a pull fetches only the files that the cache lacks. A pulled entry
is checked as a bundle before anything is installed.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from msgspec.structs import replace

from cgtool.errors import RefusedError, RemoteError, UsageError
from cgtool.events import Event, OnEvent, Phase, ignore
from cgtool.plan.grammar import Record
from cgtool.remote.entries import AT_ONCE, in_cache, indexes, open_bundle
from cgtool.remote.sending import kept_signature, send_entry
from cgtool.remote.stores import Store, download, open_store, redacted
from cgtool.store import signatures
from cgtool.store.bundle.gather import gather
from cgtool.store.bundle.unpack import OnMember
from cgtool.store.bundle_index import Limits
from cgtool.store.layout import CacheLayout, short
from cgtool.threads import in_parallel
from cgtool.toolkit.bundle.choose import Choice
from cgtool.toolkit.bundle.export import ExportReport, choose_and_lease, export
from cgtool.toolkit.bundle.import_ import ImportedEntry, ImportReport, import_bundle
from cgtool.toolkit.selection import resolve_hash

SCHEMA = 1
#: How long an interrupted push waits for the files being sent.
_LAST_FILES_SECS = 2.0


class PushedEntry(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One entry, and what was sent of it."""

    hash: str
    model: str
    #: "pushed", or "same" if the store had all of it.
    outcome: str
    #: How many files were sent.
    files: int
    size_bytes: int


class PushReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What was pushed; its fields are those that `push --json` prints."""

    schema: int = SCHEMA
    root: str
    #: The URL of the store, without user and password.
    url: str
    entries: tuple[PushedEntry, ...]
    secs: float
    warnings: tuple[str, ...]


def push(
    url: str,
    *,
    choice: Choice,
    cache_dir: Path | None = None,
    sign: Sequence[Path] = (),
    on_event: OnEvent = ignore,
) -> PushReport:
    """Add the chosen entries to a store: artifacts, then records and markers, then the index that makes them visible.

    Args:
        url: The store.
        choice: Which entries, ranks and shapes.
        cache_dir: The cache's root; None means the one that `warm` fills.
        sign: Files with private keys.
        on_event: Called as files are sent.

    Raises:
        UsageError: The choice matches nothing, a key is invalid, or the URL names no store.
        CacheCorruptError: A file of an entry is missing or does not match its digest.
        RemoteError: The store fails.
        CacheError: The cache cannot be read.
    """
    store, began = open_store(url), time.monotonic()
    keys = [signatures.load_private_key(path) for path in sign]
    layout = CacheLayout.at(cache_dir)
    names = choose_and_lease(layout, choice)
    grouped = {hash_: list(group) for hash_, group in itertools.groupby(names, key=lambda name: name.hash)}
    pushed: list[PushedEntry] = []
    warnings: list[str | None] = []
    with sending_threads() as pool:
        for number, (hash_, group) in enumerate(grouped.items()):
            entry_began = time.monotonic()
            contents = gather(layout, group, shapes=choice.shapes, debug=choice.debug)
            model = contents.manifests[0].model
            label = f"{model} {short(hash_)}"
            on_event(Event("push", label))
            each = partial(_send_group, pool, partial(_report_progress, on_event, "push", label))
            signed = signatures.sign(contents.index_bytes, keys) if keys else kept_signature(layout, hash_, contents)
            sent = send_entry(store, hash_, contents, signed, each=each)
            outcome = "pushed" if sent.files else "same"
            pushed.append(
                PushedEntry(hash=hash_, model=model, outcome=outcome, files=sent.files, size_bytes=sent.size_bytes)
            )
            warnings.append(sent.warning(store))
            secs = time.monotonic() - entry_began
            on_event(Event("push", label, done=number + 1, total=len(grouped), secs=secs))
    return PushReport(
        root=str(layout.root),
        url=store.url,
        entries=tuple(pushed),
        secs=time.monotonic() - began,
        warnings=tuple(dict.fromkeys(filter(None, warnings))),
    )


@contextlib.contextmanager
def sending_threads() -> Iterator[ThreadPool]:
    """Yield a pool of sending threads; after an interrupt, wait only briefly for the files being sent."""
    pool = ThreadPool(AT_ONCE)
    try:
        yield pool
    finally:
        pool.terminate()
        ending = threading.Thread(target=pool.join, daemon=True)
        ending.start()
        ending.join(_LAST_FILES_SECS)


def _report_progress(on_event: OnEvent, phase: Phase, label: str, done: int, total: int) -> None:
    on_event(Event(phase, label, done=done, total=total))


def _send_group(
    pool: ThreadPool, on_file: OnMember, send: Callable[[Any], Any], group: Collection[Any]
) -> Iterator[Any]:
    """Send a group, several files at a time, and report progress."""
    for number, sent in enumerate(in_parallel(pool, send, group), 1):
        on_file(number, len(group))
        yield sent


class PullReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What was pulled; its fields are those that `pull --json` prints."""

    schema: int = SCHEMA
    #: The URL of the store, without user and password.
    url: str
    root: str
    entries: tuple[ImportedEntry, ...]
    #: Why entries were skipped that were not requested by name: unsupported here, or incomplete in the store.
    skipped: tuple[str, ...]
    secs: float
    warnings: tuple[str, ...]


def pull(
    url: str,
    hashes: Sequence[str] = (),
    *,
    cache_dir: Path | None = None,
    trust: bool = False,
    require_signature: Sequence[Path] = (),
    any_machine: bool = False,
    replacing: bool = False,
    on_event: OnEvent = ignore,
) -> PullReport:
    """Add entries of a store to the cache, each after checking all of it.

    Args:
        url: The store.
        hashes: Abbreviated hashes; empty means all entries that this machine can load.
        cache_dir: The cache's root; None means the one that `warm` fills.
        trust: Whether the user trusts unsigned native code.
        require_signature: Files and folders with public keys, one of which must have signed each entry.
        any_machine: Whether to pull entries that this machine cannot load.
        replacing: Whether the store's plan replaces a different plan of the same hash in the cache.
        on_event: Called as files are fetched.

    Raises:
        UsageError: An abbreviated hash matches no entry or several, or the URL names no store.
        RefusedError: An entry is untrusted or incomplete, or was named and is unsupported on this machine.
        RemoteError: The store fails, or holds no entry.
        CacheError: The cache cannot be written.
    """
    store, began = open_store(url), time.monotonic()
    layout = CacheLayout.at(cache_dir)
    stored = indexes(store)
    chosen = [resolve_hash(store.url, text, list(stored)) for text in hashes] or list(stored)
    if not chosen:
        raise RemoteError(f"{store.url} holds no entry. Push one with: cgtool push {store.url}", path=store.url)
    entries: dict[str, ImportedEntry] = {}
    skipped: list[str] = []
    warnings: list[str] = []
    for number, hash_ in enumerate(chosen):
        entry_began = time.monotonic()
        label = short(hash_) if len(chosen) == 1 else f"{short(hash_)}, entry {number + 1} of {len(chosen)}"
        on_event(Event("pull", label))
        is_skipped = False
        for digest in stored[hash_]:
            bundle = open_bundle(store, hash_, digest, partial(in_cache, layout))
            if bundle is None:
                continue
            try:
                report = import_bundle(
                    bundle,
                    cache_dir=layout.root,
                    trust=trust,
                    require_signature=require_signature,
                    any_machine=any_machine,
                    replace=replacing,
                    on_member=partial(_report_progress, on_event, "pull", label),
                )
            except RefusedError as error:
                if error.reason != "unsupported" or hashes:
                    raise
                skipped.append(str(error))
                is_skipped = True
                break
            entries[hash_] = _merged(entries.get(hash_), report.entries[0])
            warnings += report.warnings
        if hash_ not in entries and not is_skipped:
            what = f"The entry {short(hash_)} of {store.url} is incomplete"
            message = f"{what}: no push of it has completed. Push it again."
            if hashes:
                raise RemoteError(message, path=store.url, actual=hash_)
            skipped.append(message)
        on_event(Event("pull", short(hash_), done=number + 1, total=len(chosen), secs=time.monotonic() - entry_began))
    return PullReport(
        url=store.url,
        root=str(layout.root),
        entries=tuple(entries.values()),
        skipped=tuple(skipped),
        secs=time.monotonic() - began,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _merged(before: ImportedEntry | None, now: ImportedEntry) -> ImportedEntry:
    """Merge the results of an entry's bundles, of which a store may hold several."""
    if before is None:
        return now
    outcome = now.outcome if before.outcome == "same" else before.outcome
    ranks = {(rank.rank, rank.prefix): rank for rank in (*before.ranks, *now.ranks)}
    return replace(now, outcome=outcome, rows_added=before.rows_added + now.rows_added, ranks=tuple(ranks.values()))


def export_to(url: str, **options: Any) -> ExportReport:
    """Export a bundle to a file in a store, or a container image to a tag of a registry.

    Raises:
        RemoteError: The store fails.
        CgtoolError: As for `export`.
    """
    if url.startswith("oci://"):
        open_store(url)  # raises if the extra is not installed
        from cgtool.toolkit.image import ImageTag  # needs oras, an extra

        return export(ImageTag(url), **options)
    store, name = _file_of(url)
    with tempfile.TemporaryDirectory(prefix="cgtool-export-") as folder:
        report = export(Path(folder) / "bundle", **options)
        store.put(name, Path(folder) / "bundle")
    return replace(report, dest=redacted(url))


def import_from(url: str, *, max_bytes: int = Limits().max_bytes, **options: Any) -> ImportReport:
    """Import a bundle from a file in a store.

    Raises:
        RemoteError: The store fails, or the file does not exist.
        CgtoolError: As for `import_bundle`.
    """
    store, name = _file_of(url)
    with tempfile.NamedTemporaryFile(prefix="cgtool-import-") as file:
        # Compressed, a bundle is hardly larger than its members and its index.
        file.writelines(download(store, name, most=max_bytes + Limits().max_index_bytes))
        file.flush()
        return replace(import_bundle(Path(file.name), max_bytes=max_bytes, **options), source=redacted(url))


def _file_of(url: str) -> tuple[Store, str]:
    """Return a file's store and its name there; the query of a presigned URL belongs to the store."""
    if url.startswith("oci://"):
        message = "A registry holds no bundles. Use `cgtool pull`, or copy the entries out of the image."
        raise UsageError(message, path=redacted(url))
    place, mark, query = url.partition("?") if url.startswith(("http://", "https://")) else (url, "", "")
    folder, _, name = place.rpartition("/")
    return open_store(folder + mark + query), unquote(name)
