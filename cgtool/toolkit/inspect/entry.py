"""`inspect entry`: what one entry is compiled for, piece by piece, and where holes are. Prints nothing; no torch.

JSON::

    {"schema": 2, "root": str, "hash": hash, "complete": bool, "shapes": [shape...], "ranks": [rank...],
     "places": [place...], "holes": [hole...], "unknown": [...], "fallbacks": [...], "warnings": [str...]}
    rank  = {"rank", "prefix", "model", "level", "adaptor", "cgtool", "created", "variants": [{"name", "fixed",
             "pieces", "splitting_pieces", "unique_pieces"}...]}
    place = {"rank", "prefix", "variant", "piece_index", "adaptor", "serves_all", "cells": [cell...]}
    cell  = {"shape", "adaptor", "tuned", "digest", "kind", "size_bytes", "compile_secs", "kernels", "guards", "proved",
             "proof_gap"}
    hole  = {"rank", "prefix", "variant", "piece_index", "shape"}
    unknown: {"rank", "prefix", "variant", "count"}: pieces without any artifact, of which no plan says which they are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from cgtool.errors import CacheError
from cgtool.plan.records import parse_plan
from cgtool.plan.shapes import shape_order
from cgtool.store.entry import read_entry
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.layout import PLAN_FILE, CacheLayout, RankName, resolve_root, short
from cgtool.store.records import Manifest, Row
from cgtool.store.walk import view_entry
from cgtool.toolkit.coverage import Coverage, Planned, entry_coverage, planned
from cgtool.toolkit.selection import one_hash

SCHEMA = 2

#: What one cell of the table is about: (rank, prefix, variant, piece).
PlaceName = tuple[int, str, int, int]


@dataclass(frozen=True, kw_only=True)
class EntryReport:
    """What one entry is compiled for.

    Args:
        root: The cache's root.
        hash: The entry's.
        manifests: Of its ranks and prefixes, in order.
        coverage: What they cover.
        rows: The rows of each place, by shape.
        warnings: What of the entry could not be read.
    """

    root: Path
    hash: str
    manifests: tuple[Manifest, ...]
    coverage: Coverage
    rows: Mapping[PlaceName, Sequence[Row]]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect entry --json` prints."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "hash": self.hash,
            "complete": self.coverage.is_whole and not self.warnings,
            "shapes": list(self.coverage.shapes),
            "ranks": [_rank_json(manifest) for manifest in self.manifests],
            "places": [
                {
                    "rank": place.rank,
                    "prefix": place.prefix,
                    "variant": place.variant,
                    "piece_index": place.piece_index,
                    "adaptor": place.adaptor,
                    "serves_all": place.serves_all,
                    "cells": [_cell_json(row) for row in self.rows.get(place_name(place), ())],
                }
                for place in self.coverage.places
            ],
            "holes": [hole.to_json() for hole in self.coverage.holes],
            "unknown": [
                {"rank": one.rank, "prefix": one.prefix, "variant": one.variant, "count": one.count}
                for one in self.coverage.unknown
            ],
            "fallbacks": [
                {"rank": manifest.rank, "prefix": manifest.prefix, **asdict(fallback)}
                for manifest in self.manifests
                for fallback in manifest.fallbacks
            ],
            "warnings": list(self.warnings),
        }


@os_errors_as_cache_errors()
def inspect_entry(entry: str | None = None, *, cache_dir: Path | None = None) -> EntryReport:
    """Show what an entry is compiled for, on all its ranks.

    Args:
        entry: The beginning of its hash; None where the cache has one.
        cache_dir: The cache's root; None means the cache that `warm` fills.

    Raises:
        UsageError: No entry fits, or several do; the message lists them.
        CacheError: The cache is empty, or nothing of the entry can be read or trusted.
    """
    root = resolve_root(cache_dir)
    layout = CacheLayout(root=root)
    hash_ = one_hash(layout, entry)
    entry_view = view_entry(layout, hash_)
    manifests, failures = entry_view.manifests, list(entry_view.problems)
    plans: dict[RankName, Planned] = {}
    for manifest in manifests:
        try:
            plans[manifest.name] = _planned(layout, manifest.name)
        except CacheError as error:
            failures.append(error)
    if not manifests:
        raise (
            failures[0]
            if failures
            else CacheError(
                f"Entry {short(hash_)} is gone. Look again with: cgtool inspect cache", path=layout.entry_dir(hash_)
            )
        )
    return EntryReport(
        root=root,
        hash=hash_,
        manifests=manifests,
        coverage=entry_coverage(manifests, plans=plans),
        rows=_rows(manifests),
        warnings=tuple(map(str, failures)),
    )


def place_name(place: Any) -> PlaceName:
    """Return what names the place of a `Place` or of a `Hole`."""
    return place.rank, place.prefix, place.variant, place.piece_index


def _planned(layout: CacheLayout, name: RankName) -> Planned:
    entry = read_entry(layout, name)
    if entry is None:
        raise CacheError(f"{layout.rank_dir(name)} was removed while it was read. Try again.", path=name.flat)
    return planned(parse_plan(entry.files[PLAN_FILE], path=layout.rank_dir(name) / PLAN_FILE))


def _rows(manifests: Sequence[Manifest]) -> dict[PlaceName, list[Row]]:
    found: dict[PlaceName, list[Row]] = {}
    for manifest in manifests:
        for row in sorted(manifest.rows, key=lambda row: (shape_order(row.shape), row.adaptor)):
            place = (manifest.rank, manifest.prefix, row.variant, row.piece_index)
            found.setdefault(place, []).append(row)
    return found


def _rank_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "rank": manifest.rank,
        "prefix": manifest.prefix,
        "model": manifest.model,
        "level": manifest.level,
        "adaptor": manifest.adaptor,
        "cgtool": manifest.cgtool,
        "created": manifest.created,
        "variants": [asdict(variant) for variant in manifest.variants],
    }


def _cell_json(row: Row) -> dict[str, Any]:
    return {
        "shape": row.shape,
        "adaptor": row.adaptor,
        "tuned": row.tuned,
        **asdict(row.artifact),
    }
