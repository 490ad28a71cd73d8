"""`inspect entry` and `inspect key`: the coverage of an entry, with its holes, and the factors of its key.

Prints nothing; importable without torch. JSON of a cgtool entry::

    {"schema": 2, "root": str, "hash": hash, "complete": bool, "shapes": [shape...], "ranks": [rank...],
     "places": [place...], "holes": [hole...], "unknown": [...], "fallbacks": [...], "warnings": [str...]}
    rank  = {"rank", "prefix", "model", "level", "adaptor", "cgtool", "created", "variants": [{"name", "fixed",
             "pieces", "splitting_pieces", "unique_pieces", "proved_at", "proof_gap"}...]}
    place = {"rank", "prefix", "variant", "piece_index", "adaptor", "serves_all", "cells": [cell...]}
    cell  = {"shape", "adaptor", "tuned", "digest", "kind", "size_bytes", "compile_secs", "kernels", "guards", "proved",
             "proof_gap"}
    hole  = {"rank", "prefix", "variant", "piece_index", "shape"}
    unknown: {"rank", "prefix", "variant", "count"}: pieces without an artifact; only a plan would state their indices

JSON of another system's entry: the fields of `ForeignEntryReport`. JSON of a key::

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

_PLACE_FIELDS = ("rank", "prefix", "variant", "piece_index", "adaptor", "serves_all")
_RANK_FIELDS = ("rank", "prefix", "model", "level", "adaptor", "cgtool", "created")

_VLLM_NOT_RECORDED = "guards, compile times and uses, nor the digest and the target of a binary artifact"
#: The facts that other systems do not record about entries.
_NOT_RECORDED = {
    "vllm": f"vLLM does not record {_VLLM_NOT_RECORDED}.",
    "atom": f"ATOM does not record {_VLLM_NOT_RECORDED}.",
    "torch_inductor": "torch does not record the model, piece and shape of a graph in plain form, nor compile times.",
    "triton": "Triton does not record the models and shapes that use a kernel, nor compile times.",
    "mega_cache": "A mega-cache does not record the model, piece and shape of a member in plain form.",
    "compiled_artifact": "A compiled artifact does not record its model, piece and shape in plain form.",
}
#: The facts that other systems do not record about keys.
_KEY_NOT_RECORDED = {
    "vllm": (
        "Three factors in cache_key_factors.json are digests: vLLM does not record the traced files (code_hash) or "
        "the settings (config_hash, compiler_hash). Without that file it records no factor."
    ),
    "atom": "ATOM records no factor of its hash, unless cache_key_factors.json lies beside the index.",
    "torch_inductor": "torch records no factor of a key, only the digest of all factors.",
    "triton": (
        "These are the options that the kernel was compiled with. Triton records its source and environment only as a "
        "digest (hash)."
    ),
    "mega_cache": "A mega-cache records no factor of its members' keys, only the digests of all factors.",
    "compiled_artifact": "A compiled artifact records one factor: a digest of the sources of the torch that wrote it.",
}


@dataclass(frozen=True, kw_only=True)
class EntryReport:
    """The coverage of a cgtool entry, and warnings about what could not be read."""

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
            "unknown": [fields_of(pieces) for pieces in self.coverage.unknown],
            "fallbacks": [
                {"rank": manifest.rank, "prefix": manifest.prefix, **asdict(fallback)}
                for manifest in self.manifests
                for fallback in manifest.fallbacks
            ],
            "warnings": list(self.warnings),
        }


class ForeignHole(msgspec.Struct, frozen=True, kw_only=True):
    """A shape that a piece lacks and that another piece or rank of its prefix has."""

    rank: str
    prefix: str
    piece_index: int
    shape: Shape


class ForeignEntryReport(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of another system's cache; the fields are the document that `--json` prints."""

    schema: int = SCHEMA
    system: str
    #: The version of the system, if the files state it.
    version: str | None
    root: Path
    entry: ForeignEntry
    shapes: tuple[Shape, ...]
    holes: tuple[ForeignHole, ...]
    #: A sentence on facts that the system does not record.
    not_recorded: str


@dataclass(frozen=True, kw_only=True)
class KeyReport:
    """The factors of an entry's key."""

    root: Path
    #: The entry's hash, or its name in another system.
    hash: str
    #: The most likely causes of a miss first; for another system, the factors that it recorded.
    factors: tuple[Factor, ...]
    #: The other system that wrote the entry; None for cgtool.
    system: str | None = None

    @property
    def not_recorded(self) -> str:
        """A sentence on the parts of the key that the system does not record; "" for cgtool."""
        return _KEY_NOT_RECORDED.get(self.system or "", "")

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect key --json` prints."""
        factors = [{"name": factor.name, "hash": factor.hash, "value": factor.value} for factor in self.factors]
        document = {"schema": KEY_SCHEMA, "root": str(self.root), "hash": self.hash, "factors": factors}
        if self.system is None:
            return document
        entry = {"schema": KEY_SCHEMA, "system": self.system, "root": str(self.root), "entry": self.hash}
        return {**entry, "factors": factors, "not_recorded": self.not_recorded}


@os_errors_as_cache_errors()
def inspect_entry(entry: str | None = None, *, cache_dir: Path | None = None) -> EntryReport | ForeignEntryReport:
    """Report the coverage of an entry on all its ranks.

    Args:
        entry: An abbreviation of its hash, or of its name in another system's cache; None if the cache has only one.
        cache_dir: The cache's root, or another system's folder or file; None means the default cache.

    Raises:
        UsageError: No entry or several entries match; the message lists them.
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
        removed = f"Entry {short(hash_)} was just removed. List the others with: cgtool inspect cache"
        raise failures[0] if failures else CacheError(removed, path=layout.entry_dir(hash_))
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
        shapes=distinct_shapes(
            artifact.shape for artifact in entry.artifacts if artifact.shape is not None and artifact.size_bytes
        ),
        holes=tuple(_holes(entry.artifacts)),
        not_recorded=_NOT_RECORDED[cache.system],
    )


def _holes(artifacts: tuple[ForeignArtifact, ...]) -> Iterator[ForeignHole]:
    compiled: dict[tuple[str, str, int], set[str]] = {}
    shapes: dict[str, dict[str, Shape]] = {}
    for artifact in artifacts:
        if artifact.piece_index is not None and artifact.shape is not None:
            text = shape_text(artifact.shape)
            shapes.setdefault(artifact.prefix, {})[text] = artifact.shape
            piece_shapes = compiled.setdefault((artifact.rank, artifact.prefix, artifact.piece_index), set())
            piece_shapes.update([text] if artifact.size_bytes else ())
    for (rank, prefix, piece), piece_shapes in sorted(compiled.items()):
        for text, shape in sorted(shapes[prefix].items(), key=lambda item: shape_order(item[1])):
            if text not in piece_shapes:
                yield ForeignHole(rank=rank, prefix=prefix, piece_index=piece, shape=shape)


@os_errors_as_cache_errors()
def inspect_key(entry: str | None = None, *, cache_dir: Path | None = None) -> KeyReport:
    """Report the factors of an entry's key; the arguments are those of `inspect_entry`."""
    cache = read_foreign(cache_dir)
    if cache is not None:
        foreign = one_entry(cache, entry)
        return KeyReport(root=cache.root, hash=foreign.name, factors=foreign.key_factors, system=cache.system)
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
    """Yield (dotted path, value) for every leaf of a factor's value; an empty object or list is a leaf."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{number}]")
    else:
        yield path, value
