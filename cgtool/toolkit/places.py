"""Open what a user names: a cache, a bundle, a store, or one entry of these. Must not import torch.

    place = folder of a cache | .../torch_compile_cache/<hash> | file of a bundle
          | URL of a store | URL of a store ":" abbreviated hash
          | folder of a cache ":" abbreviated hash | abbreviated hash, of the cache that is named separately

Text that exists as a path is a path. An abbreviated hash must match exactly one entry.
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
from cgtool.toolkit.selection import empty_cache_error, resolve_hash

_ABBREVIATED_HASH = re.compile(r"[0-9a-fA-F]{1,64}")


class Place(NamedTuple):
    """A cache, and the entry of it that was named, if any."""

    #: The name to show to people.
    text: str
    layout: CacheLayout
    hash: str | None = None
    #: Whether it is a temporary copy of a bundle or a store, to be read only.
    is_copy: bool = False


def is_abbreviated_hash(text: str) -> bool:
    """Return whether a text can be an abbreviated hash, and is not an existing path."""
    return _ABBREVIATED_HASH.fullmatch(text) is not None and existing_path(text) is None


def existing_path(text: str) -> Path | None:
    """Return the existing path that a text names; None if there is none."""
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, or the home of an unknown user
        return None


@contextlib.contextmanager
def open_place(text: str, cache_dir: Path | None = None, *, artifacts: bool = False) -> Iterator[Place]:
    """Yield the place that `text` names; with `artifacts`, also fetch the artifacts of a store."""
    if is_remote(text):
        from cgtool.toolkit.mirror import mirrored  # imported lazily: only stores need it

        url, _, hash_text = text.rpartition(":")
        # Digits after a bare host are a port.
        names_entry = "/" in url.partition("://")[2] and _ABBREVIATED_HASH.fullmatch(hash_text) is not None
        with mirrored(url if names_entry else text, artifacts=artifacts) as mirror:
            hash_ = resolve_hash(redacted(url), hash_text, mirror.layout.hashes()) if names_entry else None
            yield Place(redacted(text), mirror.layout, hash_, is_copy=True)
        return
    path = existing_path(text)
    if path is not None and not path.is_dir():
        from cgtool.store.bundle.unpack import unpacked  # imported lazily: only bundles need zstandard

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
    root_text, colon, hash_text = text.rpartition(":")
    has_root = bool(colon and root_text)
    above = existing_path(root_text) if has_root else cache_dir
    if _ABBREVIATED_HASH.fullmatch(hash_text) is None or (above is None and has_root):
        message = f"There is no {text!r:.200}. Name a cache's folder, an entry as HASH or ROOT:HASH, or a bundle."
        raise UsageError(message, actual=text)
    layout = CacheLayout.at(above)
    hashes = layout.hashes()
    if not hashes:
        check_own(layout.root)
        raise empty_cache_error(layout)
    return Place(text, layout, resolve_hash(layout.root, hash_text, hashes))
