"""What a prune does to a folder, and what is remembered of it. Must not import torch.

A folder is renamed into the trash, so that it is gone at once and whole, and deleted after that::

    state/trash/<name>-<token>       what `put_aside` was given; deleted by the same prune, or by the next prune or warm

On a disk so full that no trash can be made, or where a link leads out of the cache in its place, a folder is renamed
where it lies to the name of a temporary file, which nobody reads and every sweep removes. Nothing behind a link is
removed: who could lay one into the cache could have anyone's files deleted through it.

For each digest of cheap facts that led to an entry which a prune removed::

    state/pruned/<digest>.json      the entries, sealed
    state/pruned/<digest>.missed    one byte for each lookup of that digest that ended in a miss since

A lookup that finds nothing costs one `open` more for this, and one that finds something costs nothing.
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
#: A full disk, and a link in place of the trash.
_NO_TRASH = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ELOOP})


def trash_dir(layout: CacheLayout) -> Path:
    """Return where the trash lies."""
    return layout.state_dir / "trash"


def is_inside(layout: CacheLayout, path: str) -> bool:
    """Return whether a path lies in the cache folder itself, so that no link between leads to anything else."""
    above, name = os.path.split(os.path.relpath(path, layout.base))
    if name in (os.curdir, os.pardir) or f"{above}{os.sep}".startswith(f"{os.pardir}{os.sep}"):
        return False
    base = os.path.realpath(layout.base)
    return os.path.realpath(f"{layout.base}/{above}") == os.path.normpath(f"{base}/{above}")


def check_inside(layout: CacheLayout, path: str) -> None:
    """Refuse to remove what lies behind a link.

    Raises:
        CacheError: It does.
    """
    if not is_inside(layout, path):
        raise CacheError(
            f"{path} was not removed: a link in place of a folder leads there, out of its place in the cache. Remove "
            "the link, or what is behind it, yourself.",
            path=path,
        )


def put_aside(layout: CacheLayout, path: str) -> str | None:
    """Rename a folder away from its name, so that it is gone for everyone who has not opened it yet.

    Nobody else may write to it meanwhile.

    Returns:
        Its path now, for `remove_tree`, once the rename is flushed (`flush`); None where it was gone already.

    Raises:
        CacheError: It cannot be renamed, or lies behind a link, and is as it was.
    """
    check_inside(layout, path)
    name, token = os.path.basename(path), secrets.token_hex(6)  # noqa: PTH119 - paths are str all over prune
    target = f"{trash_dir(layout)}/{name}-{token}"
    try:
        try:
            if not is_inside(layout, target):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))  # noqa: TRY301 - as where there is no room
            trash_dir(layout).mkdir(parents=True, exist_ok=True)
            os.rename(path, target)  # noqa: PTH104 - as above
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise CacheError(
                    f"{path} was not removed: it lies in a lower layer of an overlay file system, as of a container "
                    "image. Remove it where that layer is made.",
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
    """Make renames out of folders last through a power cut, before anything of what was renamed is deleted."""
    for folder in (trash_dir(layout), *folders):
        sync_folder(folder)


def remove_tree(path: str) -> Iterator[CacheError]:
    """Remove a file or a folder with all that is in it; what others remove meanwhile is fine.

    Yields:
        An error for each thing that cannot be removed.
    """
    if not os.path.isdir(path) or os.path.islink(path):  # noqa: PTH112, PTH114 - paths are str all over prune
        yield from _removed(os.unlink, path)
        return
    unlisted: list[OSError] = []
    for above, folders, files in os.walk(path, topdown=False, onerror=unlisted.append):
        for name in folders:
            inner = f"{above}/{name}"
            yield from _removed(os.unlink if os.path.islink(inner) else os.rmdir, inner)  # noqa: PTH114 - as above
        for name in sorted(files, key=_LOCK.__eq__):  # whoever removes a unit where it lies holds it to the last
            yield from _removed(os.unlink, f"{above}/{name}")
    for error in unlisted:
        if not isinstance(error, FileNotFoundError):
            yield cache_error(error, Path(error.filename), doing="removed")
    yield from _removed(os.rmdir, path)


def _removed(function: Callable[[str], None], path: str) -> Iterator[CacheError]:
    try:
        function(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # what keeps it from being empty has said so itself
            yield cache_error(error, Path(path), doing="removed")


def sweep_trash(layout: CacheLayout) -> None:
    """Delete what a killed prune left in the trash; costs one look where there is none, and never raises."""
    for name in names_in(trash_dir(layout)):
        if not is_inside(layout, f"{trash_dir(layout)}/{name}"):
            return
        for _ in remove_tree(f"{trash_dir(layout)}/{name}"):
            pass


#: Entries that a record names: the last ones.
_MOST = 20
#: After so long nobody misses it any more.
FORGET_SECS = 180 * 86400.0


class PrunedEntry(Record, frozen=True, kw_only=True):
    """An entry that a prune removed, when (in UTC), and the sentence of the rule that chose it."""

    hash: Digest
    model: str
    when: str
    why: str


class PrunedEntries(Sealed, frozen=True, kw_only=True, tag="pruned-2"):
    """`state/pruned/<digest>.json`: what prunes removed, the last removed last."""

    entries: tuple[PrunedEntry, ...]


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What prunes removed of one model, and how often it was missed since."""

    lookup: str
    #: The last removed last; one that is in the cache again is not among them.
    entries: tuple[PrunedEntry, ...]
    misses: int
    #: Seconds since the epoch.
    last_missed: float | None

    @property
    def sentence(self) -> str:
        """Which entry was removed last, when and why: a reason of a miss."""
        last = self.entries[-1]
        return f"entry {short(last.hash)} was pruned on {last.when[:10]}: {last.why}"


def note_pruned(layout: CacheLayout, removed: Mapping[str, Iterable[PrunedEntry]]) -> None:
    """Remember entries that are about to be removed."""
    for digest, entries in removed.items():
        new = {entry.hash: entry for entry in entries}
        older = [entry for entry in _entries(layout, digest) if entry.hash not in new]
        listed = PrunedEntries(entries=(*older, *new.values())[-_MOST:])
        touch(_folder(layout) / f"{check_hash(digest)}.missed")
        write_atomic(_folder(layout) / f"{digest}.json", seal(listed))


def count_miss(layout: CacheLayout, digest: str) -> Pruned | None:
    """Count a lookup that ended in a miss, if a prune may be why. Never raises on account of the disk.

    Returns:
        What prunes removed of it; None where they removed nothing.
    """
    flags = os.O_WRONLY | os.O_APPEND | SAFE_OPEN_FLAGS
    try:
        with open_descriptor(os.open, f"{_folder(layout)}/{digest}.missed", flags) as descriptor:
            os.write(descriptor, b".")
    except FileNotFoundError:
        return None
    except OSError:  # a read-only cache: not counted, and told all the same
        pass
    return pruned(layout, digest)


def pruned(layout: CacheLayout, digest: str) -> Pruned | None:
    """Return what prunes removed of a model; None where they removed nothing that is still missing."""
    entries = tuple(entry for entry in _entries(layout, digest) if not layout.key_file(entry.hash).exists())
    if not entries:
        return None
    misses, last_missed = 0, None
    with contextlib.suppress(OSError):
        status = (_folder(layout) / f"{digest}.missed").stat()
        misses, last_missed = status.st_size, status.st_mtime if status.st_size else None
    return Pruned(lookup=digest, entries=entries, misses=misses, last_missed=last_missed)


def all_pruned(layout: CacheLayout) -> tuple[Pruned, ...]:
    """Return what prunes removed and is still missing, the most missed first."""
    names = names_in(_folder(layout), follow=False)
    digests = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    found = [record for digest in digests if is_hash(digest) and (record := pruned(layout, digest)) is not None]
    return tuple(sorted(found, key=lambda record: (-record.misses, record.lookup)))


def forgotten(layout: CacheLayout, now: float | None = None) -> list[str]:
    """Return the names in `state/pruned` that nobody asked for in half a year."""
    names = names_in(_folder(layout), follow=False)
    old = (time.time() if now is None else now) - FORGET_SECS
    ages: dict[str, float] = {}
    for name in names:
        with contextlib.suppress(OSError):
            digest = name.partition(".")[0]
            ages[digest] = max(ages.get(digest, 0.0), (_folder(layout) / name).stat().st_mtime)
    return [name for name in names if ages.get(name.partition(".")[0], old) < old and name[0] != "."]


def _entries(layout: CacheLayout, digest: str) -> tuple[PrunedEntry, ...]:
    """The entries of a record; none where it is missing or cannot be trusted."""
    try:
        record = read_sealed(_folder(layout) / f"{digest}.json", PrunedEntries)
    except CacheError:
        return ()
    return () if record is None else record.entries


def _folder(layout: CacheLayout) -> Path:
    return layout.state_dir / "pruned"
