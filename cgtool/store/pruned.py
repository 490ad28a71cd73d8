"""Removal of folders by prune, and the record of pruned entries. Must not import torch.

A folder is first renamed into the trash, so that it disappears atomically, and deleted afterwards::

    state/trash/<name>-<token>      a folder passed to `put_aside`; deleted by the same prune, or the next prune or warm

If the disk is too full to create the trash, or the trash is a symlink that leads out of the cache, the folder is
renamed in place to the name of a temporary file, which nobody reads and every sweep removes. Nothing behind a symlink
is removed: otherwise anyone who can create a link in the cache could make cgtool delete other people's files.

For each lookup digest that led to a pruned entry::

    state/pruned/<digest>.json      the entries, sealed
    state/pruned/<digest>.missed    one byte for each lookup of that digest that has missed since

This costs a miss one additional `open` and a hit nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cgtool.errors import CacheError
from cgtool.plan.grammar import Digest, Record
from cgtool.store.files import (
    SAFE_OPEN_FLAGS,
    Sealed,
    cache_error,
    names_in,
    open_descriptor,
    read_sealed,
    seal,
    sync_folder,
    touch,
    write_atomic,
)
from cgtool.store.layout import CacheLayout, check_hash, is_hash, short

_LOCK = "lock"
#: A full disk, or a symlink in place of the trash.
_NO_TRASH = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ELOOP})


def trash_dir(layout: CacheLayout) -> Path:
    """Return the folder of the trash."""
    return layout.state_dir / "trash"


def is_inside(layout: CacheLayout, path: str) -> bool:
    """Return whether a path is inside the cache folder, with no symlink between them that leads elsewhere."""
    above, name = os.path.split(os.path.relpath(path, layout.base))
    if name in (os.curdir, os.pardir) or f"{above}{os.sep}".startswith(f"{os.pardir}{os.sep}"):
        return False
    base = os.path.realpath(layout.base)
    return os.path.realpath(f"{layout.base}/{above}") == os.path.normpath(f"{base}/{above}")


def check_inside(layout: CacheLayout, path: str) -> None:
    """Check that a path is safe to remove.

    Raises:
        CacheError: The path is behind a symlink.
    """
    if not is_inside(layout, path):
        raise CacheError(
            f"{path} was not removed: it is reached through a link that leads out of its place in the cache. Remove "
            "the link or its target yourself.",
            path=path,
        )


def put_aside(layout: CacheLayout, path: str) -> str | None:
    """Rename a folder into the trash, so that it disappears for every process that has not opened it yet.

    The caller must ensure that no other process writes to it.

    Returns:
        The new path, to be passed to `remove_tree` after the rename is flushed (`flush`), or None if the folder did not
        exist.

    Raises:
        CacheError: The folder cannot be renamed or is behind a symlink; it is unchanged.
    """
    check_inside(layout, path)
    name, token = os.path.basename(path), secrets.token_hex(6)  # noqa: PTH119 - paths are str all over prune
    target = f"{trash_dir(layout)}/{name}-{token}"
    try:
        try:
            if not is_inside(layout, target):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))  # noqa: TRY301 - handled like a full disk
            trash_dir(layout).mkdir(parents=True, exist_ok=True)
            os.rename(path, target)  # noqa: PTH104 - as above
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise CacheError(
                    f"{path} was not removed: it is in a lower layer of an overlay file system, such as a container "
                    "image. Remove it where that layer is built.",
                    path=path,
                ) from error
            if error.errno not in _NO_TRASH:
                raise
            target = f"{os.path.dirname(path)}/.{name}.{os.getpid()}.{token}.tmp"  # noqa: PTH120 - as above
            os.rename(path, target)  # noqa: PTH104 - as above
    except FileNotFoundError:
        return None
    except OSError as error:
        raise cache_error(error, Path(path), doing="removed") from error
    return target


def flush(layout: CacheLayout, *folders: Path) -> None:
    """Flush renames out of folders to disk; needed before deleting the renamed folders, in case of a power loss."""
    for folder in (trash_dir(layout), *folders):
        sync_folder(folder)


def remove_tree(path: str) -> Iterator[CacheError]:
    """Remove a file, or a folder with its contents; tolerates concurrent removal.

    Yields:
        An error for each file or folder that cannot be removed.
    """
    if not os.path.isdir(path) or os.path.islink(path):  # noqa: PTH112, PTH114 - paths are str all over prune
        yield from _remove(os.unlink, path)
        return
    unlisted: list[OSError] = []
    for above, folders, files in os.walk(path, topdown=False, onerror=unlisted.append):
        for name in folders:
            inner = f"{above}/{name}"
            yield from _remove(os.unlink if os.path.islink(inner) else os.rmdir, inner)  # noqa: PTH114 - as above
        for name in sorted(files, key=_LOCK.__eq__):  # a unit's lock is held until its other files are gone
            yield from _remove(os.unlink, f"{above}/{name}")
    for error in unlisted:
        if not isinstance(error, FileNotFoundError):
            yield cache_error(error, Path(error.filename), doing="removed")
    yield from _remove(os.rmdir, path)


def _remove(function: Callable[[str], None], path: str) -> Iterator[CacheError]:
    try:
        function(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # the remaining content has been reported already
            yield cache_error(error, Path(path), doing="removed")


def sweep_trash(layout: CacheLayout) -> None:
    """Delete what a killed prune left in the trash; never raises. Without trash this lists one folder."""
    for name in names_in(trash_dir(layout)):
        if not is_inside(layout, f"{trash_dir(layout)}/{name}"):
            return
        for _ in remove_tree(f"{trash_dir(layout)}/{name}"):
            pass


#: A record keeps this many entries, the most recently pruned.
_MAX_ENTRIES = 20
#: A record without a change or a miss for this long is dropped.
FORGET_SECS = 180 * 86400.0


class PrunedEntry(Record, frozen=True, kw_only=True):
    """A pruned entry, the time of its removal (UTC), and the reason given by the rule that selected it."""

    hash: Digest
    model: str
    when: str
    why: str


class PrunedEntries(Sealed, frozen=True, kw_only=True, tag="pruned-2"):
    """`state/pruned/<digest>.json`: pruned entries, oldest removal first."""

    entries: tuple[PrunedEntry, ...]


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """The pruned entries of one model, and the number of misses since."""

    lookup: str
    #: Oldest removal first, without entries that are in the cache again.
    entries: tuple[PrunedEntry, ...]
    misses: int
    #: Seconds since the epoch.
    last_missed: float | None

    @property
    def sentence(self) -> str:
        """Explain a miss by the entry that was removed last: which, when and why."""
        last = self.entries[-1]
        return f"entry {short(last.hash)} was pruned on {last.when[:10]}: {last.why}"


def note_pruned(layout: CacheLayout, removed: Mapping[str, Iterable[PrunedEntry]]) -> None:
    """Record entries that are about to be removed."""
    for digest, entries in removed.items():
        new = {entry.hash: entry for entry in entries}
        older = [entry for entry in _entries(layout, digest) if entry.hash not in new]
        record = PrunedEntries(entries=(*older, *new.values())[-_MAX_ENTRIES:])
        touch(_folder(layout) / f"{check_hash(digest)}.missed")
        write_atomic(_folder(layout) / f"{digest}.json", seal(record))


def count_miss(layout: CacheLayout, digest: str) -> Pruned | None:
    """Count a miss that a prune may have caused. Never raises `OSError`.

    Returns:
        The pruned entries, or None if there are none.
    """
    flags = os.O_WRONLY | os.O_APPEND | SAFE_OPEN_FLAGS
    try:
        with open_descriptor(os.open, f"{_folder(layout)}/{digest}.missed", flags) as descriptor:
            os.write(descriptor, b".")
    except FileNotFoundError:
        return None
    except OSError:  # a read-only cache: the miss is reported but not counted
        pass
    return pruned(layout, digest)


def pruned(layout: CacheLayout, digest: str) -> Pruned | None:
    """Return the pruned entries of a model, or None if none of them is missing."""
    entries = tuple(entry for entry in _entries(layout, digest) if not layout.key_file(entry.hash).exists())
    if not entries:
        return None
    misses, last_missed = 0, None
    with contextlib.suppress(OSError):
        status = (_folder(layout) / f"{digest}.missed").stat()
        misses, last_missed = status.st_size, status.st_mtime if status.st_size else None
    return Pruned(lookup=digest, entries=entries, misses=misses, last_missed=last_missed)


def all_pruned(layout: CacheLayout) -> tuple[Pruned, ...]:
    """Return the pruned entries of all models that are still missing, most misses first."""
    names = names_in(_folder(layout), follow=False)
    digests = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    records = [record for digest in digests if is_hash(digest) and (record := pruned(layout, digest)) is not None]
    return tuple(sorted(records, key=lambda record: (-record.misses, record.lookup)))


def forgotten(layout: CacheLayout, now: float | None = None) -> list[str]:
    """Return the file names in `state/pruned` of records without a change or a miss in the last half year."""
    names = names_in(_folder(layout), follow=False)
    oldest = (time.time() if now is None else now) - FORGET_SECS
    modified: dict[str, float] = {}
    for name in names:
        with contextlib.suppress(OSError):
            digest = name.partition(".")[0]
            modified[digest] = max(modified.get(digest, 0.0), (_folder(layout) / name).stat().st_mtime)
    return [name for name in names if modified.get(name.partition(".")[0], oldest) < oldest and name[0] != "."]


def _entries(layout: CacheLayout, digest: str) -> tuple[PrunedEntry, ...]:
    """Return the entries of a record; () if it is missing or corrupt."""
    try:
        record = read_sealed(_folder(layout) / f"{digest}.json", PrunedEntries)
    except CacheError:
        return ()
    return () if record is None else record.entries


def _folder(layout: CacheLayout) -> Path:
    return layout.state_dir / "pruned"
