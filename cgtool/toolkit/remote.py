"""`push` and `pull`: entries to a remote store and from it. Prints nothing; importable without torch.

What a push finds there already it does not send again. What a pull finds in the cache already it does not fetch again;
the rest is checked as a bundle is, before anything is placed.
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
from cgtool.toolkit.bundle.export import ExportReport, export, held_names
from cgtool.toolkit.bundle.import_ import ImportedEntry, ImportReport, import_bundle
from cgtool.toolkit.selection import hash_named

SCHEMA = 1
#: What an interrupted push waits for files that it is sending.
_LAST_FILES_SECS = 2.0


class PushedEntry(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One entry, and what of it was sent."""

    hash: str
    model: str
    #: "pushed", or "same" where the store had all of it.
    outcome: str
    #: How many files were sent.
    files: int
    size_bytes: int


class PushReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What was pushed; its fields are those that `push --json` prints."""

    schema: int = SCHEMA
    root: str
    #: The store, without user and password.
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
    """Add chosen entries to a store: artifacts, then records and marks, then the index that makes them seen.

    Raises:
        UsageError: The choice fits nothing, a key is none, or the URL names no store.
        CacheCorruptError: Something of an entry is missing or not as its digest says.
        RemoteError: The store fails.
        CacheError: The cache cannot be read.
    """
    store, began = open_store(url), time.monotonic()
    keys = [signatures.load_private_key(path) for path in sign]
    layout = CacheLayout.at(cache_dir)
    names = held_names(layout, choice)
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
            each = partial(_sending, pool, partial(_tell, on_event, "push", label))
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
    """Yield threads that send; whoever is interrupted waits a moment for the files under way, and not for a network."""
    pool = ThreadPool(AT_ONCE)
    try:
        yield pool
    finally:
        pool.terminate()
        ending = threading.Thread(target=pool.join, daemon=True)
        ending.start()
        ending.join(_LAST_FILES_SECS)


def _tell(on_event: OnEvent, phase: Phase, label: str, done: int, total: int) -> None:
    on_event(Event(phase, label, done=done, total=total))


def _sending(pool: ThreadPool, on_file: OnMember, send: Callable[[Any], Any], group: Collection[Any]) -> Iterator[Any]:
    """Send a group, several files at a time, and say how far it is."""
    for number, sent in enumerate(in_parallel(pool, send, group), 1):
        on_file(number, len(group))
        yield sent


class PullReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What was pulled; its fields are those that `pull --json` prints."""

    schema: int = SCHEMA
    #: The store, without user and password.
    url: str
    root: str
    entries: tuple[ImportedEntry, ...]
    #: Sentences: entries that were not asked for by name, and are not for this machine or not whole.
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
    """Take entries of a store into the cache, each once all of it was checked.

    Args:
        url: The store.
        hashes: Beginnings of hashes; none means all entries that this machine can load.
        cache_dir: The cache's root; None means the one that `warm` fills.
        trust: Whether the user vouches for native code that nobody signed.
        require_signature: Files and folders of public keys, one of which must have signed each.
        any_machine: Whether to take what this machine cannot load.
        replacing: Whether the store's plan wins where the cache holds another of the same hash.
        on_event: Is told how far it is.

    Raises:
        UsageError: A beginning fits nothing or several entries, or the URL names no store.
        RefusedError: An entry is not trusted, not whole, or was named and is not fit for this machine.
        RemoteError: The store fails, or holds no entry.
        CacheError: The cache cannot be written.
    """
    store, began = open_store(url), time.monotonic()
    layout = CacheLayout.at(cache_dir)
    there = indexes(store)
    chosen = [hash_named(store.url, text, list(there)) for text in hashes] or list(there)
    if not chosen:
        raise RemoteError(f"{store.url} holds no entry. Push one: cgtool push {store.url}", path=store.url)
    entries: dict[str, ImportedEntry] = {}
    skipped: list[str] = []
    warnings: list[str] = []
    for number, hash_ in enumerate(chosen):
        entry_began = time.monotonic()
        label = short(hash_) if len(chosen) == 1 else f"{short(hash_)}, entry {number + 1} of {len(chosen)}"
        on_event(Event("pull", label))
        is_skipped = False
        for digest in there[hash_]:
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
                    on_member=partial(_tell, on_event, "pull", label),
                )
            except RefusedError as error:
                if error.reason != "unsupported" or hashes:
                    raise
                skipped.append(str(error))
                is_skipped = True
                break
            entries[hash_] = _together(entries.get(hash_), report.entries[0])
            warnings += report.warnings
        if hash_ not in entries and not is_skipped:
            what = f"The entry {short(hash_)} of {store.url} is not whole"
            message = f"{what}: no push of it has come to its end. Push it again."
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


def _together(before: ImportedEntry | None, now: ImportedEntry) -> ImportedEntry:
    """One entry may come in several bundles; what the first did to the cache stands."""
    if before is None:
        return now
    outcome = now.outcome if before.outcome == "same" else before.outcome
    ranks = {(one.rank, one.prefix): one for one in (*before.ranks, *now.ranks)}
    return replace(now, outcome=outcome, rows_added=before.rows_added + now.rows_added, ranks=tuple(ranks.values()))


def export_to(url: str, **options: Any) -> ExportReport:
    """Write a bundle as `export` does, to one file of a store; to a tag of a registry, a container image.

    Raises:
        RemoteError: The store fails; and as `export`.
    """
    if url.startswith("oci://"):
        open_store(url)  # says what is not installed
        from cgtool.toolkit.image import ImageTag  # oras, an extra

        return export(ImageTag(url), **options)
    store, name = _file_of(url)
    with tempfile.TemporaryDirectory(prefix="cgtool-export-") as made:
        report = export(Path(made) / "bundle", **options)
        store.put(name, Path(made) / "bundle")
    return replace(report, dest=redacted(url))


def import_from(url: str, *, max_bytes: int = Limits().max_bytes, **options: Any) -> ImportReport:
    """Take a bundle in as `import` does, from one file of a store.

    Raises:
        RemoteError: The store fails, or has no such file; and as `import_bundle`.
    """
    store, name = _file_of(url)
    with tempfile.NamedTemporaryFile(prefix="cgtool-import-") as file:
        # Packed it is hardly larger than what it holds and the index.
        file.writelines(download(store, name, most=max_bytes + Limits().max_index_bytes))
        file.flush()
        return replace(import_bundle(Path(file.name), max_bytes=max_bytes, **options), source=redacted(url))


def _file_of(url: str) -> tuple[Store, str]:
    """The store that a file lies in, and its name there; the query of a URL that was signed is the store's."""
    if url.startswith("oci://"):
        message = "A registry has no bundles. Take entries with cgtool pull, or copy them out of the image."
        raise UsageError(message, path=redacted(url))
    place, mark, query = url.partition("?") if url.startswith(("http://", "https://")) else (url, "", "")
    folder, _, name = place.rpartition("/")
    return open_store(folder + mark + query), unquote(name)
