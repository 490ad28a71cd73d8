"""`inspect cache`: what a cache holds. Prints nothing; importable without torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgtool.cache.layout import resolve_root
from cgtool.cache.scan import CacheListing, scan


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """What a cache holds, and when that was looked at.

    Args:
        listing: The entries.
        now: Seconds since the epoch.
    """

    listing: CacheListing
    now: float

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect cache --json` prints."""
        return dict(self.listing.to_json())


def inspect_cache(path: Path | None = None) -> CacheReport:
    """List the entries of a cache.

    Args:
        path: Its root; None means the cache that `warm` fills.

    Returns:
        The entries; none where the default cache does not exist yet.

    Raises:
        CacheError: `path` is no folder, or cannot be listed.
    """
    # A cache that was named must be there; the default one may wait for its first warm.
    return CacheReport(listing=scan(resolve_root(path), missing_ok=path is None), now=time.time())
