"""What a user names as a cache, a bundle or a store, or as an entry of one, opened. No torch.

    place = folder of a cache | .../torch_compile_cache/<hash> | file of a bundle
          | URL of a store | URL of a store ":" beginning of a hash
          | folder of a cache ":" beginning of a hash | beginning of a hash, of the cache that is named beside it

What exists as a path is taken for one; a beginning must be that of one entry alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cgtool.errors import UsageError
from cgtool.remote.stores import is_remote, redacted
from cgtool.store.layout import CACHE_FOLDER, CacheLayout, is_hash
from cgtool.toolkit.foreign.detect import check_own
from cgtool.toolkit.selection import empty, hash_named

_BEGINNING = re.compile(r"[0-9a-fA-F]{1,64}")


class Place(NamedTuple):
    """A cache, and the one entry of it that was named, if one was."""

    #: What people are told of it.
    text: str
    layout: CacheLayout
    hash: str | None = None
    #: Whether it is a copy of a bundle or of a store, which is gone afterwards: it is looked at and neither opened
    #: nor changed.
    is_copy: bool = False


def is_beginning(text: str) -> bool:
    """Return whether a text may be the beginning of a hash, and is no path."""
    return _BEGINNING.fullmatch(text) is not None and path_of(text) is None


def path_of(text: str) -> Path | None:
    """Return the path that a text names; None where there is nothing."""
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long for a path, a null byte, the home of nobody
        return None


@contextlib.contextmanager
def opened_place(text: str, cache_dir: Path | None = None, *, artifacts: bool = False) -> Iterator[Place]:
    """Yield what `text` names, in the grammar above; with `artifacts`, those of a store are fetched too."""
    if is_remote(text):
        from cgtool.toolkit.mirror import mirrored  # for stores alone

        url, _, beginning = text.rpartition(":")
        # Behind a host alone, figures are a port.
        names_entry = "/" in url.partition("://")[2] and _BEGINNING.fullmatch(beginning) is not None
        with mirrored(url if names_entry else text, artifacts=artifacts) as mirror:
            hash_ = hash_named(redacted(url), beginning, mirror.layout.hashes()) if names_entry else None
            yield Place(redacted(text), mirror.layout, hash_, is_copy=True)
        return
    path = path_of(text)
    if path is not None and not path.is_dir():
        from cgtool.store.bundle.unpack import unpacked  # zstandard and more, for bundles alone

        with unpacked(path) as root:
            yield Place(text, CacheLayout(root=root), is_copy=True)
    elif path is not None:
        yield _folder(text, path.absolute())
    else:
        yield _entry(text, cache_dir)


def _folder(text: str, path: Path) -> Place:
    if is_hash(path.name) and path.parent.name == CACHE_FOLDER:
        return Place(text, CacheLayout(root=path.parent.parent), path.name)
    return Place(text, CacheLayout.at(path))


def _entry(text: str, cache_dir: Path | None) -> Place:
    root_text, colon, beginning = text.rpartition(":")
    has_root = bool(colon and root_text)
    above = path_of(root_text) if has_root else cache_dir
    if _BEGINNING.fullmatch(beginning) is None or (above is None and has_root):
        message = (
            f"There is no {text!r:.200}. Name a cache's folder, an entry by its hash or as ROOT:HASH, or a bundle."
        )
        raise UsageError(message, actual=text)
    layout = CacheLayout.at(above)
    hashes = layout.hashes()
    if not hashes:
        check_own(layout.root)
        raise empty(layout)
    return Place(text, layout, hash_named(layout.root, beginning, hashes))
