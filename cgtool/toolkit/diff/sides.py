"""What the user names as a side of a comparison: a cache, an entry of one, a bundle. No torch here.

Grammar::

    side = folder of a cache | .../torch_compile_cache/<hash> | file of a bundle
         | folder of a cache ":" beginning of a hash | beginning of a hash, of the cache that is named beside it

What exists as a path is taken for one; a beginning must be that of one entry alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from cgtool.errors import CacheError, UsageError
from cgtool.records import dataclass
from cgtool.store.layout import CACHE_FOLDER, SHORT_DIGITS, CacheLayout, is_hash, resolve_root

_BEGINNING = re.compile(r"[0-9a-fA-F]{1,64}")
_MOST_LISTED = 8


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison.

    Args:
        layout: The cache that it is, or lies in.
        hash: The entry; None for a cache as a whole.
    """

    layout: CacheLayout
    hash: str | None


@contextlib.contextmanager
def open_side(text: str, cache_dir: Path | None = None) -> Iterator[Side]:
    """Yield what `text` names; a bundle is unpacked for as long as the block runs.

    Args:
        text: See the module's grammar.
        cache_dir: The cache in which beginnings of hashes are looked up; None means the one that `warm` fills.

    Raises:
        UsageError: It names nothing, or several things.
        CacheError: A folder cannot be read.
        RefusedError: The bundle is not whole.
    """
    path = _path(text)
    if text and _exists(path):
        if path.is_dir():
            yield _folder(path.absolute())
            return
        from cgtool.toolkit.bundle.unpack import unpacked  # zstandard and more, for bundles alone

        with unpacked(path) as root:
            yield _bundle(CacheLayout(root=root))
            return
    root_text, colon, beginning = text.rpartition(":")
    if colon and root_text and _BEGINNING.fullmatch(beginning) and _exists(_path(root_text)):
        yield _entry(CacheLayout(root=resolve_root(_path(root_text))), beginning)
    elif _BEGINNING.fullmatch(text):
        yield _entry(CacheLayout(root=resolve_root(cache_dir)), text)
    else:
        raise UsageError(
            f"There is no {text!r:.200}. Name a cache's folder, an entry by its hash or as ROOT:HASH, or a bundle.",
            actual=text,
        )


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # the home of a user who is not there
        return Path(text)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long for a path, or holds a null byte, may be anything else
        return False


def _folder(path: Path) -> Side:
    if is_hash(path.name) and path.parent.name == CACHE_FOLDER:
        return Side(layout=CacheLayout(root=path.parent.parent), hash=path.name)
    layout = CacheLayout(root=resolve_root(path))
    if not layout.base.is_dir():
        message = f"{path} holds no cache of cgtool. Name a folder that holds {CACHE_FOLDER}, or an entry in it."
        raise CacheError(message, path=path)
    return Side(layout=layout, hash=None)


def _bundle(layout: CacheLayout) -> Side:
    hashes = layout.hashes()
    return Side(layout=layout, hash=hashes[0] if len(hashes) == 1 else None)


def _entry(layout: CacheLayout, beginning: str) -> Side:
    hashes = layout.hashes()
    fitting = [hash_ for hash_ in hashes if hash_.startswith(beginning.lower())]
    if len(fitting) == 1:
        return Side(layout=layout, hash=fitting[0])
    if not hashes:
        raise CacheError(
            f"The cache at {layout.root} holds no entry. Fill it with: cgtool warm MODEL", path=layout.root
        )
    listed = "".join(f"\n  {hash_[: _digits(hash_, hashes)]}" for hash_ in (fitting or hashes)[:_MOST_LISTED])
    what = "Several entries fit" if fitting else "No entry fits"
    message = f"{what} {beginning} in {layout.root}. Name one of these:{listed}"
    raise UsageError(message, path=layout.root, actual=beginning)


def _digits(hash_: str, among: list[str]) -> int:
    digits = SHORT_DIGITS
    while any(other != hash_ and other.startswith(hash_[:digits]) for other in among):
        digits += 1
    return digits
