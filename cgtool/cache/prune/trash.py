"""The trash: a folder is renamed into it first, so that it is gone at once and whole, and deleted after that.

    state/trash/<name>-<token>       what `put_aside` was given; deleted by the same prune, or by the next prune or warm

Must not import torch. On a disk so full that no trash can be made, a folder is renamed where it lies to the name of a
temporary file, which nobody reads and every sweep removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from cgtool.cache.files import cache_error, sync_folder
from cgtool.cache.layout import CacheLayout
from cgtool.errors import CacheError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def trash_dir(layout: CacheLayout) -> Path:
    """Return where the trash lies."""
    return layout.state_dir / "trash"


def put_aside(layout: CacheLayout, path: str) -> str | None:
    """Rename a folder away from its name, so that it is gone for everyone who has not opened it yet.

    Args:
        layout: Where the cache lies.
        path: The folder.

    Returns:
        Its path now, for `remove_tree`, once the rename is flushed (`flush`); None where it was gone already.

    Raises:
        CacheError: It cannot be renamed, and is as it was.
    """
    name, token = os.path.basename(path), secrets.token_hex(6)  # noqa: PTH119 - paths are str all over prune
    target = f"{trash_dir(layout)}/{name}-{token}"
    try:
        try:
            trash_dir(layout).mkdir(parents=True, exist_ok=True)
            os.rename(path, target)  # noqa: PTH104 - as above
        except OSError as error:
            if error.errno not in _FULL:
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
        for name in files:
            yield from _removed(os.unlink, f"{above}/{name}")
        for name in folders:
            inner = f"{above}/{name}"
            yield from _removed(os.unlink if os.path.islink(inner) else os.rmdir, inner)  # noqa: PTH114 - as above
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
    with contextlib.suppress(OSError):
        for name in os.listdir(trash_dir(layout)):  # noqa: PTH208 - names alone
            for _ in remove_tree(f"{trash_dir(layout)}/{name}"):
                pass
