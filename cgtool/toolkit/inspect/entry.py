"""`inspect entry` and `inspect key`: what one entry is compiled for, where holes are, and what its key was made of.

Prints nothing; importable without torch. JSON of an entry of ours::

    {"schema": 2, "root": str, "hash": hash, "complete": bool, "shapes": [shape...], "ranks": [rank...],
     "places": [place...], "holes": [hole...], "unknown": [...], "fallbacks": [...], "warnings": [str...]}
    rank  = {"rank", "prefix", "model", "level", "adaptor", "cgtool", "created", "variants": [{"name", "fixed",
             "pieces", "splitting_pieces", "unique_pieces", "proved_at", "proof_gap"}...]}
    place = {"rank", "prefix", "variant", "piece_index", "adaptor", "serves_all", "cells": [cell...]}
    cell  = {"shape", "adaptor", "tuned", "digest", "kind", "size_bytes", "compile_secs", "kernels", "guards", "proved",
             "proof_gap"}
    hole  = {"rank", "prefix", "variant", "piece_index", "shape"}
    unknown: {"rank", "prefix", "variant", "count"}: pieces without any artifact, of which no plan says which they are

of another system's, the fields of `ForeignEntryReport`; and of a key::

    {"schema": 1, "root": str, "hash": hash, "factors": [{"name": str, "hash": sha256, "value": json}...]}
    {"schema": 1, "system": str, "root": str, "entry": str, "factors": [...], "not_recorded": str}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict as fields_of
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from cgtool.errors import CacheError
from cgtool.plan.shapes import Shape, distinct_shapes, shape_order, shape_text
from cgtool.store.entry import entry_with_plan
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.key import FACTOR_ORDER, read_key
from cgtool.store.layout import CacheLayout, RankName, short
from cgtool.store.records import Factor, Manifest
from cgtool.store.walk import view_entry
from cgtool.toolkit.coverage import Coverage, Planned, entry_coverage, planned
from cgtool.toolkit.foreign.detect import read_foreign
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignCache, ForeignEntry, one_entry
from cgtool.toolkit.selection import resolve_entry

SCHEMA = 2
KEY_SCHEMA = 1

_OF_VLLM = "no guards, no compile times and no uses, and of a binary artifact neither a digest nor its target"
#: What the cache of another system does not say of entries.
_NOT_RECORDED = {
    "vllm": f"vLLM records {_OF_VLLM}.",
    "atom": f"ATOM records {_OF_VLLM}.",
    "torch_inductor": "torch records in no plain form which model, piece or shape a graph is of, and no compile times.",
    "triton": "Triton records neither which model asked for a kernel nor at which shapes, and no compile times.",
    "mega_cache": "A mega-cache records in no plain form which model, piece or shape a member is of.",
    "compiled_artifact": "A compiled artifact records in no plain form which model, piece or shape it is of.",
}
#: The same of keys.
_KEY_NOT_RECORDED = {
    "vllm": (
        "cache_key_factors.json has three of the factors as one digest each: which files were traced (code_hash) and "
        "which settings were in force (config_hash, compiler_hash) vLLM does not record. Without that file it records "
        "no factor."
    ),
    "atom": "ATOM records no factor of its hash, unless cache_key_factors.json lies beside the index.",
    "torch_inductor": "torch records no factor of a key beside the digest that it makes of them.",
    "triton": (
        "These are the options that the kernel was compiled with. Its source and the environment's part of the key "
        "are one digest (hash)."
    ),
    "mega_cache": "A mega-cache records no factor of its members' keys beside the digests that torch makes of them.",
    "compiled_artifact": "A compiled artifact records one factor: a digest of the sources of the torch that wrote it.",
}


@dataclass(frozen=True, kw_only=True)
class EntryReport:
    """What one entry of cgtool's is compiled for, and what of it could not be read."""

    root: Path
    hash: str
    manifests: tuple[Manifest, ...]
    coverage: Coverage
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect entry --json` prints."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "hash": self.hash,
            "complete": self.coverage.is_whole and not self.warnings,
            "shapes": list(self.coverage.shapes),
            "ranks": [
                {name: getattr(manifest, name) for name in _RANK_FIELDS}
                | {"variants": [asdict(variant) for variant in manifest.variants]}
                for manifest in self.manifests
            ],
            "places": [
                {name: getattr(place, name) for name in _PLACE_FIELDS}
                | {
                    "cells": [
                        {"shape": row.shape, "adaptor": row.adaptor, "tuned": row.tuned, **asdict(row.artifact)}
                        for row in place.rows
                    ]
                }
                for place in self.coverage.places
            ],
            "holes": [fields_of(hole) for hole in self.coverage.holes],
            "unknown": [fields_of(one) for one in self.coverage.unknown],
            "fallbacks": [
                {"rank": manifest.rank, "prefix": manifest.prefix, **asdict(fallback)}
                for manifest in self.manifests
                for fallback in manifest.fallbacks
            ],
            "warnings": list(self.warnings),
        }


_PLACE_FIELDS = ("rank", "prefix", "variant", "piece_index", "adaptor", "serves_all")
_RANK_FIELDS = ("rank", "prefix", "model", "level", "adaptor", "cgtool", "created")


class ForeignHole(msgspec.Struct, frozen=True, kw_only=True):
    """A shape that one piece lacks, and that another piece or rank of its prefix has."""

    rank: str
    prefix: str
    piece_index: int
    shape: Shape


class ForeignEntryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one entry of another system's cache holds; the fields are the document that `--json` prints."""

    schema: int = SCHEMA
    system: str
    #: Of the system, where the files say so.
    version: str | None
    root: Path
    entry: ForeignEntry
    shapes: tuple[Shape, ...]
    holes: tuple[ForeignHole, ...]
    #: What such a cache does not say, in a sentence.
    not_recorded: str


@dataclass(frozen=True, kw_only=True)
class KeyReport:
    """What is known of an entry's key."""

    root: Path
    #: The entry's hash, or its name.
    hash: str
    #: Those that tell most about a miss first; of another system, what it wrote of them.
    factors: tuple[Factor, ...]
    #: Which other system wrote the entry; None for cgtool.
    system: str | None = None

    @property
    def not_recorded(self) -> str:
        """What the system did not write of the key, in a sentence; "" of cgtool's own."""
        return _KEY_NOT_RECORDED.get(self.system or "", "")

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect key --json` prints."""
        factors = [{"name": factor.name, "hash": factor.hash, "value": factor.value} for factor in self.factors]
        document = {"schema": KEY_SCHEMA, "root": str(self.root), "hash": self.hash, "factors": factors}
        if self.system is None:
            return document
        named = {"schema": KEY_SCHEMA, "system": self.system, "root": str(self.root), "entry": self.hash}
        return {**named, "factors": factors, "not_recorded": self.not_recorded}


@os_errors_as_cache_errors()
def inspect_entry(entry: str | None = None, *, cache_dir: Path | None = None) -> EntryReport | ForeignEntryReport:
    """Show what an entry is compiled for, on all its ranks.

    Args:
        entry: The beginning of its hash, or of its name in another system's cache; None where the cache has one.
        cache_dir: The cache's root, or another system's folder or file; None means the cache that `warm` fills.

    Raises:
        UsageError: No entry fits, or several do; the message lists them.
        CacheError: The cache is empty, or nothing of the entry can be read or trusted.
    """
    cache = read_foreign(cache_dir)
    if cache is not None:
        return _inspect_foreign(cache, one_entry(cache, entry))
    layout = CacheLayout.at(cache_dir)
    hash_ = resolve_entry(layout, entry)
    view = view_entry(layout, hash_)
    manifests, failures = view.manifests, list(view.problems)
    plans: dict[RankName, Planned] = {}
    for manifest in manifests:
        try:
            plans[manifest.name] = planned(entry_with_plan(layout, manifest.name)[1])
        except CacheError as error:
            failures.append(error)
    if not manifests:
        gone = f"Entry {short(hash_)} is gone. Look again with: cgtool inspect cache"
        raise failures[0] if failures else CacheError(gone, path=layout.entry_dir(hash_))
    return EntryReport(
        root=layout.root,
        hash=hash_,
        manifests=manifests,
        coverage=entry_coverage(manifests, plans=plans),
        warnings=tuple(map(str, failures)),
    )


def _inspect_foreign(cache: ForeignCache, entry: ForeignEntry) -> ForeignEntryReport:
    return ForeignEntryReport(
        system=cache.system,
        version=cache.version,
        root=cache.root,
        entry=entry,
        shapes=distinct_shapes(one.shape for one in entry.artifacts if one.shape is not None and one.size_bytes),
        holes=tuple(_holes(entry.artifacts)),
        not_recorded=_NOT_RECORDED[cache.system],
    )


def _holes(artifacts: tuple[ForeignArtifact, ...]) -> Iterator[ForeignHole]:
    places: dict[tuple[str, str, int], set[str]] = {}
    shapes: dict[str, dict[str, Shape]] = {}
    for one in artifacts:
        if one.piece_index is not None and one.shape is not None:
            text = shape_text(one.shape)
            shapes.setdefault(one.prefix, {})[text] = one.shape
            places.setdefault((one.rank, one.prefix, one.piece_index), set()).update([text] if one.size_bytes else ())
    for (rank, prefix, piece), there in sorted(places.items()):
        for text, shape in sorted(shapes[prefix].items(), key=lambda item: shape_order(item[1])):
            if text not in there:
                yield ForeignHole(rank=rank, prefix=prefix, piece_index=piece, shape=shape)


@os_errors_as_cache_errors()
def inspect_key(entry: str | None = None, *, cache_dir: Path | None = None) -> KeyReport:
    """Show the factors of an entry's key; the arguments are those of `inspect_entry`."""
    cache = read_foreign(cache_dir)
    if cache is not None:
        found = one_entry(cache, entry)
        return KeyReport(root=cache.root, hash=found.name, factors=found.key_factors, system=cache.system)
    layout = CacheLayout.at(cache_dir)
    hash_ = resolve_entry(layout, entry)
    key = read_key(layout, hash_)
    if key is None:
        path = layout.key_file(hash_)
        raise CacheError(f"Entry {short(hash_)} has no {path.name}. Warm the model again.", path=path)
    factors = [Factor(name=name, value=value) for name, value in key.factors.items()]
    order = {name: place for place, name in enumerate(FACTOR_ORDER)}
    factors.sort(key=lambda factor: (order.get(factor.name, len(order)), factor.name))
    return KeyReport(root=layout.root, hash=hash_, factors=tuple(factors))


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
