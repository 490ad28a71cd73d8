"""What a prune knows of a cache: the walk's views of its entries, and what each unit's folder holds. No torch.

What is read here is only ever a suspicion: before an artifact is removed, its entry is looked at again
(`prune.leftovers`).
"""

from __future__ import annotations

import contextlib
import errno
import os

from cgtool.records import dataclass
from cgtool.store.files import is_temporary
from cgtool.store.layout import UNIT_FILE, CacheLayout, is_hash
from cgtool.store.walk import EntryView, Status, walk

_UNIT_FILES = frozenset({UNIT_FILE, "lock"})


@dataclass(frozen=True, kw_only=True)
class CacheFacts:
    """All of a cache.

    Args:
        layout: Where it lies.
        entries: By hash, in order.
        units: The names in each unit's folder, by key; where that was asked for of those alone that are not `is_whole`.
        units_readable: Whether all units could be listed.
        strays: Names in the cache folder of what is being written, or was when its writer died.
    """

    layout: CacheLayout
    entries: dict[str, EntryView]
    units: dict[str, list[str]]
    units_readable: bool
    strays: tuple[str, ...]

    @property
    def readable(self) -> bool:
        """Whether it is known what every entry shares."""
        return self.units_readable and all(entry.is_readable for entry in self.entries.values())


def collect(layout: CacheLayout, *, whole_units: bool = True) -> CacheFacts:
    """Return what a cache holds; an entry that cannot be read is marked and never an error.

    Args:
        layout: Where it lies.
        whole_units: Whether units that are as they should be are of interest: nearly all of a hundred thousand.

    Raises:
        CacheError: The cache folder itself cannot be listed.
    """
    units, units_readable = _units(layout, whole=whole_units)
    entries = {entry.hash: entry for entry in walk(layout)}
    return CacheFacts(
        layout=layout,
        entries=entries,
        units=units,
        units_readable=units_readable,
        strays=tuple(sorted(filter(is_temporary, names_in(str(layout.base), follow=True)))),
    )


def names_in(folder: str, *, follow: bool = False) -> list[str]:
    """Return the names in a folder; none where it is not there.

    Args:
        folder: Its path, without "/" at the end.
        follow: Whether it may be a link.

    Raises:
        OSError: It cannot be listed, or is a link.
    """
    if not follow and _is_link(folder):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone, of a hundred thousand folders
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_link(path: str) -> bool:
    return os.path.islink(path)  # noqa: PTH114 - a str, a hundred thousand times


def stamps_in(layout: CacheLayout) -> dict[str, Status]:
    """Return the stamps of loads, by `RankName.flat`; none where they cannot be read."""
    found: dict[str, Status] = {}
    with contextlib.suppress(OSError), os.scandir(layout.state_dir / "used") as stamps:
        for stamp in stamps:
            with contextlib.suppress(OSError):
                status = stamp.stat()
                found[stamp.name] = status.st_mtime_ns, status.st_size
    return found


def is_whole(files: list[str]) -> bool:
    """Return whether a unit's folder holds its record and one artifact, and beside them a lock at most."""
    others = set(files) - _UNIT_FILES
    return UNIT_FILE in files and len(others) == 1 and not others.pop().startswith(".")


def _units(layout: CacheLayout, *, whole: bool) -> tuple[dict[str, list[str]], bool]:
    """The names in each unit's folder, but of whole units only where they are wanted, and whether all were listed."""
    base = f"{layout.base}/units"
    units: dict[str, list[str]] = {}
    readable = True
    try:
        shards = names_in(base)
    except OSError:
        return {}, False
    for shard in shards:
        above = f"{base}/{shard}"
        try:
            if _is_link(above):
                readable = False
                continue
            with os.scandir(above) as found:
                items = list(found)
            for item in items:
                if item.is_symlink():
                    readable = False
                elif item.name.startswith(shard):
                    files = names_in(item.path, follow=True)  # for it is none
                    if (whole or not is_whole(files)) and is_hash(item.name):
                        units[item.name] = files
        except OSError:
            readable = False
    return units, readable
