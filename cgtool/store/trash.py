"""The trash: a folder is renamed into it first, so that it is gone at once and whole, and deleted after that.

    state/trash/<name>-<token>       what `put_aside` was given; deleted by the same prune, or by the next prune or warm

Must not import torch. On a disk so full that no trash can be made, or where a link leads out of the cache in its
place, a folder is renamed where it lies to the name of a temporary file, which nobody reads and every sweep removes.

A folder that lies in the lower layer of an overlay file system cannot be renamed at all (EXDEV). It is emptied where it
lies, and its manifests go first, that of the last rank before that of the first: killed in between, each rank is as
before or gone, and what is left is an entry that no warm came to the end of. No room comes free by that.

Nothing behind a link is removed: who could lay one into the cache could have anyone's files deleted through it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from cgtool.errors import CacheError
from cgtool.store.entry import withdraw
from cgtool.store.files import cache_error, remove, sync_folder
from cgtool.store.layout import UNIT_FILE, CacheLayout, is_hash

_LOCK = "lock"
#: A full disk, and a link in place of the trash.
_NO_TRASH = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ELOOP})


def trash_dir(layout: CacheLayout) -> Path:
    """Return where the trash lies."""
    return layout.state_dir / "trash"


def is_inside(layout: CacheLayout, path: str) -> bool:
    """Return whether a path lies in the cache folder itself, so that no link between leads to anything else.

    Args:
        layout: Where the cache lies; its folder may be a link.
        path: Below `layout.base`; its own last name may be a link, too.
    """
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

    Args:
        layout: Where the cache lies.
        path: The folder; nobody else may write to it meanwhile.

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
                _empty(layout, path)
                os.mkdir(target)  # noqa: PTH102 - as above; what stands for it
                return target
            if error.errno not in _NO_TRASH:
                raise
            target = f"{os.path.dirname(path)}/.{name}.{os.getpid()}.{token}.tmp"  # noqa: PTH120 - as above
            os.rename(path, target)  # noqa: PTH104 - as above
    except FileNotFoundError:
        return None
    except OSError as error:
        raise cache_error(error, Path(path), doing="removed") from error
    return target


def _empty(layout: CacheLayout, path: str) -> None:
    """Remove a folder that cannot be renamed: first what readers start from, and the rest once that is flushed.

    Raises:
        CacheError: It cannot be removed whole.
    """
    name = os.path.basename(path)  # noqa: PTH119 - paths are str all over prune
    ranks = list(layout.rank_names(name)) if path == f"{layout.base}/{name}" and is_hash(name) else []
    for rank in reversed(ranks):
        withdraw(layout, rank)
    remove(Path(path) / UNIT_FILE)
    sync_folder(Path(path))
    for error in remove_tree(path):
        raise error


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
    with contextlib.suppress(OSError):
        for name in os.listdir(trash_dir(layout)):  # noqa: PTH208 - names alone
            if not is_inside(layout, f"{trash_dir(layout)}/{name}"):
                return
            for _ in remove_tree(f"{trash_dir(layout)}/{name}"):
                pass
