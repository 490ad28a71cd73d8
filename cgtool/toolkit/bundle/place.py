"""The folder in a cache in which a bundle is unpacked before any of it is believed. Must not import torch.

`torch_compile_cache/.import.<pid>.<token>.tmp/` is a cache root of its own, which no reader looks into. Its maker holds
a lock on it, so that one which nobody holds was left by a killed process and is removed by the next import.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from cgtool.errors import RefusedError
from cgtool.store.files import cache_error, discard, os_errors_as_cache_errors, sync_folder
from cgtool.store.layout import CacheLayout
from cgtool.store.leases import hold_folder, is_abandoned

_NAME = re.compile(r"\.import\.[0-9]+\.[0-9a-f]+\.tmp")


@contextlib.contextmanager
def unpacking_folder(layout: CacheLayout) -> Iterator[Path]:
    """Yield a new folder beside the entries of a cache; what was made for it is gone afterwards, unless it holds more.

    Raises:
        RefusedError: link_here: the folder of the entries is a link.
        CacheError: It cannot be made: read-only, full, no permission.
    """
    check_no_links([layout.base])
    made = _make(layout.base)
    folder = layout.base / f".import.{os.getpid()}.{secrets.token_hex(6)}.tmp"
    try:
        for leftover in abandoned(layout):
            discard(leftover)
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise cache_error(error, folder) from error
        with os_errors_as_cache_errors(folder):
            descriptor = hold_folder(folder)
        try:
            yield folder
        finally:
            os.close(descriptor)
    finally:
        discard(folder)
        for above in made:
            with contextlib.suppress(OSError):  # something is in it by now
                above.rmdir()


def check_no_links(folders: Iterable[Path]) -> None:
    """Check that folders of a cache are no links, through which an import would write elsewhere.

    Args:
        folders: Which; one that is missing passes.

    Raises:
        RefusedError: link_here.
        CacheError: One cannot be looked at.
    """
    for folder in folders:
        with os_errors_as_cache_errors(folder):
            is_link = folder.is_symlink()
        if is_link:
            message = (
                f"{folder} is a link, and an import writes nowhere but into the cache. Nothing was changed. Put what "
                "it leads to in its place, or name another cache with --cache-dir."
            )
            raise RefusedError(message, reason="link_here", path=folder)


def abandoned(layout: CacheLayout) -> list[Path]:
    """Return the folders that killed imports left in a cache."""
    try:
        found = [path for path in layout.base.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []
    return [path for path in found if is_abandoned(path)]


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it; return those that were missing, the innermost first."""
    missing = []
    try:
        for above in (folder, *folder.parents):
            if above.is_dir():
                break
            missing.append(above)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for above in missing:
            with contextlib.suppress(OSError):
                above.rmdir()
        raise cache_error(error, folder) from error
    for above in missing:
        sync_folder(above.parent)
    return missing
