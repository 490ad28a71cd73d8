"""`inspect key`: every factor of an entry's key with its value. Prints nothing; importable without torch.

JSON::

    {"schema": 1, "root": str, "hash": hash, "factors": [{"name": str, "hash": sha256, "value": json}...]}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgtool.errors import CacheError
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.key import FACTOR_ORDER, Factor, read_key
from cgtool.store.layout import CacheLayout, resolve_root, short
from cgtool.toolkit.selection import one_hash

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class KeyReport:
    """The factors of one entry, those that tell most about a miss first."""

    root: Path
    hash: str
    factors: tuple[Factor, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect key --json` prints."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "hash": self.hash,
            "factors": [{"name": factor.name, "hash": factor.hash, "value": factor.value} for factor in self.factors],
        }


@os_errors_as_cache_errors()
def inspect_key(entry: str | None = None, *, cache_dir: Path | None = None) -> KeyReport:
    """Show the factors of an entry's key.

    Args:
        entry: The beginning of the entry's hash; None where the cache has one.
        cache_dir: The cache's root; None means the cache that `warm` fills.

    Raises:
        UsageError: No entry fits, or several do; the message lists them.
        CacheError: The cache is empty, or the key is missing, torn or not the entry's.
    """
    root = resolve_root(cache_dir)
    layout = CacheLayout(root=root)
    hash_ = one_hash(layout, entry)
    key = read_key(layout, hash_)
    if key is None:
        path = layout.key_file(hash_)
        raise CacheError(f"Entry {short(hash_)} has no {path.name}. Warm the model again.", path=path)
    return KeyReport(root=root, hash=hash_, factors=tuple(sorted(key.factors, key=_telling)))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for every leaf of a factor's value; an empty object or list is one."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{number}]")
    else:
        yield path, value


def _telling(factor: Factor) -> tuple[int, str]:
    return FACTOR_ORDER.index(factor.name) if factor.name in FACTOR_ORDER else len(FACTOR_ORDER), factor.name
