"""`inspect entry` and `inspect key` on a cache of another system. Prints nothing; importable without torch.

JSON of `entry`; `entry` in it is as in `inspect cache` (`cgtool.toolkit.foreign.records`)::

    {"schema": 1, "system": str, "version": str | null, "root": str, "entry": {...}, "shapes": [shape...],
     "holes": [{"rank": str, "prefix": str, "piece_index": int, "shape": shape}...], "not_recorded": str}

and of `key`::

    {"schema": 1, "system": str, "root": str, "entry": str,
     "factors": [{"name": str, "hash": sha256, "value": json}...], "not_recorded": str}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgtool.plan.shapes import Shape, shape_order, shape_text
from cgtool.store.key import Factor
from cgtool.toolkit.foreign.detect import read_foreign
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignCache, ForeignEntry, foreign_json, one_entry

SCHEMA = 1

#: What a cache of a system does not say, of entries and of keys.
_OF_VLLM = "no guards, no compile times and no uses, and of a binary artifact neither a digest nor its target"
NOT_RECORDED = {
    "vllm": f"vLLM records {_OF_VLLM}.",
    "atom": f"ATOM records {_OF_VLLM}.",
    "torch_inductor": "torch records in no plain form which model, piece or shape a graph is of, and no compile times.",
    "triton": "Triton records neither which model asked for a kernel nor at which shapes, and no compile times.",
    "mega_cache": "A mega-cache records in no plain form which model, piece or shape a member is of.",
    "compiled_artifact": "A compiled artifact records in no plain form which model, piece or shape it is of.",
}
KEY_NOT_RECORDED = {
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

_Place = tuple[str, str, int]


@dataclass(frozen=True, kw_only=True)
class ForeignHole:
    """A shape that one piece lacks, and that another piece or rank of its prefix has."""

    rank: str
    prefix: str
    piece_index: int
    shape: Shape

    def to_json(self) -> dict[str, Any]:
        """Return its JSON form."""
        return {"rank": self.rank, "prefix": self.prefix, "piece_index": self.piece_index, "shape": self.shape}


@dataclass(frozen=True, kw_only=True)
class ForeignEntryReport:
    """What one entry of another system's cache holds.

    Args:
        cache: The cache.
        entry: The entry.
        shapes: That its artifacts were compiled for, in order.
        holes: What some pieces lack.
    """

    cache: ForeignCache
    entry: ForeignEntry
    shapes: tuple[Shape, ...]
    holes: tuple[ForeignHole, ...]

    @property
    def not_recorded(self) -> str:
        """What such a cache does not say, in a sentence."""
        return NOT_RECORDED[self.cache.system]

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect entry --json` prints."""
        return {
            "schema": SCHEMA,
            "system": self.cache.system,
            "version": self.cache.version,
            "root": str(self.cache.root),
            "entry": foreign_json(self.entry),
            "shapes": list(self.shapes),
            "holes": [hole.to_json() for hole in self.holes],
            "not_recorded": self.not_recorded,
        }


@dataclass(frozen=True, kw_only=True)
class ForeignKeyReport:
    """What the system wrote of one entry's key: its name, its factors by name, and what it did not write."""

    cache: ForeignCache
    hash: str
    factors: tuple[Factor, ...]

    @property
    def not_recorded(self) -> str:
        """What such a cache does not say, in a sentence."""
        return KEY_NOT_RECORDED[self.cache.system]

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect key --json` prints."""
        return {
            "schema": SCHEMA,
            "system": self.cache.system,
            "root": str(self.cache.root),
            "entry": self.hash,
            "factors": [{"name": factor.name, "hash": factor.hash, "value": factor.value} for factor in self.factors],
            "not_recorded": self.not_recorded,
        }


def inspect_foreign_entry(entry: str | None, *, cache_dir: Path | None) -> ForeignEntryReport | None:
    """Show what an entry of another system's cache holds.

    Args:
        entry: The beginning of its name; None where the cache has one.
        cache_dir: A folder or a file.

    Returns:
        The entry; None where cgtool wrote what lies there, or no known system did.

    Raises:
        UsageError: No entry fits, or several do; the message lists them.
        CacheError: The cache went away while it was read.
    """
    cache = read_foreign(cache_dir)
    if cache is None:
        return None
    found = one_entry(cache, entry)
    shapes = {shape_text(one.shape): one.shape for one in found.artifacts if one.shape is not None and one.size_bytes}
    return ForeignEntryReport(
        cache=cache, entry=found, shapes=tuple(sorted(shapes.values(), key=shape_order)), holes=_holes(found.artifacts)
    )


def inspect_foreign_key(entry: str | None, *, cache_dir: Path | None) -> ForeignKeyReport | None:
    """Show what another system wrote of an entry's key; arguments, result and errors as of `inspect_foreign_entry`."""
    cache = read_foreign(cache_dir)
    if cache is None:
        return None
    found = one_entry(cache, entry)
    return ForeignKeyReport(cache=cache, hash=found.name, factors=found.key_factors)


def _holes(artifacts: tuple[ForeignArtifact, ...]) -> tuple[ForeignHole, ...]:
    places: dict[_Place, set[str]] = {}
    shapes: dict[str, dict[str, Shape]] = {}
    for one in artifacts:
        if one.piece_index is None or one.shape is None:
            continue
        there = places.setdefault((one.rank, one.prefix, one.piece_index), set())
        shapes.setdefault(one.prefix, {})[shape_text(one.shape)] = one.shape
        if one.size_bytes:
            there.add(shape_text(one.shape))
    return tuple(
        ForeignHole(rank=rank, prefix=prefix, piece_index=piece, shape=shape)
        for (rank, prefix, piece), there in sorted(places.items())
        for text, shape in sorted(shapes[prefix].items(), key=lambda item: shape_order(item[1]))
        if text not in there
    )
