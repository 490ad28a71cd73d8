"""What a listing needs of a manifest's rows, of which a cache may have a million. Must not import torch.

A manifest as `sealed_json` writes it has one field a line, and text holds no raw line end: so its rows can be cut out
and read by a pattern, four times as quick as JSON. What is not of that form is read as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from cgtool.cache.checks import count, expect, text, word
from cgtool.cache.shapes import Shape, shape_from_json, shape_order, shape_to_json
from cgtool.errors import CacheError
from cgtool.pieces import Json
from cgtool.records import dataclass

_HEAD, _END = b'\n "rows": [\n', b"\n ],"
_MOST_BYTES, _MOST_SECS = 2**63, 1e12
_ROW_START = "\n  {\n"
_ROW = re.compile(
    r'\n   "shape": ([^\n\[{]+|[\[{][^\]}]*[\]}]),\n   "piece_index": \d+,\n   "adaptor": "[^"\\\n]*",'
    r'\n   "artifact": "([^"\\\n]*)",\n   "kind": "([^"\\\n]*)",\n   "size_bytes": (\d{1,18}),'
    r'\n   "compile_secs": (\d{1,12}(?:\.\d{1,20})?(?:e-\d{1,3})?),\n'
)


@dataclass(frozen=True, kw_only=True)
class ArtifactListing:
    """One artifact of an entry and every piece that it serves for one shape."""

    piece_index: tuple[int, ...]
    shape: Shape
    adaptor: str
    digest: str
    size_bytes: int
    compile_secs: float
    proved: bool

    def to_json(self) -> Json:
        """Return the artifact as `inspect cache` prints it."""
        return {
            "piece_index": list(self.piece_index),
            "shape": shape_to_json(self.shape),
            "adaptor": self.adaptor,
            "digest": self.digest,
            "size_bytes": self.size_bytes,
            "compile_secs": self.compile_secs,
            "proved": self.proved,
        }


@dataclass(frozen=True, kw_only=True)
class RowFigures:
    """What rows come to.

    Args:
        sizes: Artifact's file name → its bytes.
        secs: Artifact's file name → how long it took to compile.
        shapes: What the rows are for, in order.
        unshared_bytes: The bytes of each row's artifact, counted for itself.
    """

    sizes: Mapping[str, int]
    secs: Mapping[str, float]
    shapes: tuple[Shape, ...]
    unshared_bytes: int


def figures_of(rows: Iterable[Mapping[str, Any]]) -> RowFigures:
    """Return the figures of a manifest's rows.

    Raises:
        CacheError: A field is outside of the grammar.
        LookupError: A field is missing.
    """
    sizes: dict[str, int] = {}
    secs: dict[str, float] = {}
    shapes: dict[str, Shape] = {}
    unshared = 0
    for row in rows:
        file = f"{text(row['artifact'])}.{text(row['kind'])}"
        sizes[file] = file_bytes(row["size_bytes"])
        secs[file] = _duration(row["compile_secs"])
        unshared += sizes[file]
        shapes[json.dumps(row["shape"])] = shape_from_json(row["shape"])
    in_order = tuple(sorted(shapes.values(), key=shape_order))
    return RowFigures(sizes=sizes, secs=secs, shapes=in_order, unshared_bytes=unshared)


def quick_rows(data: bytes) -> RowFigures | None:
    """Return the figures of the rows in the text of a manifest, or None where it is not as `sealed_json` writes it."""
    start = data.find(_HEAD)
    end = data.find(_END, start)
    if start < 0 or end < 0:
        return None
    try:
        rows = data[start:end].decode("ascii")
    except UnicodeDecodeError:
        return None
    found = _ROW.findall(rows)
    if not found or len(found) != rows.count(_ROW_START):
        return None
    shapes, digests, kinds, sizes, secs = zip(*found, strict=True)
    files = [f"{digest}.{kind}" for digest, kind in zip(digests, kinds, strict=True)]
    bytes_of_rows = list(map(int, sizes))
    try:
        in_order = _shapes(frozenset(shapes))
    except (CacheError, ValueError):  # JSON says better what is wrong
        return None
    return RowFigures(
        sizes=dict(zip(files, bytes_of_rows, strict=True)),
        secs=dict(zip(files, map(float, secs), strict=True)),
        shapes=in_order,
        unshared_bytes=sum(bytes_of_rows),
    )


@lru_cache(maxsize=16)  # the entries of a cache are for the same few sets of shapes
def _shapes(spelled: frozenset[str]) -> tuple[Shape, ...]:
    return tuple(sorted([shape_from_json(json.loads(text)) for text in spelled], key=shape_order))


def without_rows(data: bytes) -> bytes:
    """Return the text of a manifest that `quick_rows` understood, with no rows."""
    start = data.find(_HEAD)
    return data[: start + len(_HEAD)] + data[data.find(_END, start) + 1 :]


def listed_artifacts(rows: Iterable[Mapping[str, Any]]) -> tuple[ArtifactListing, ...]:
    """Return a manifest's rows as artifacts, each with all pieces it serves for one shape, by shape and piece.

    Raises:
        CacheError: A field is outside of the grammar.
        LookupError: A field is missing.
    """
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((json.dumps(row["shape"]), row["adaptor"], row["artifact"]), []).append(row)
    listed = [
        ArtifactListing(
            piece_index=tuple(sorted({count(row["piece_index"]) for row in group})),
            shape=shape_from_json(group[0]["shape"]),
            adaptor=word(group[0]["adaptor"]),
            digest=text(group[0]["artifact"]),
            size_bytes=file_bytes(group[0]["size_bytes"]),
            compile_secs=max(_duration(row["compile_secs"]) for row in group),
            proved=all(row["proved"] is True for row in group),
        )
        for group in groups.values()
    ]
    return tuple(sorted(listed, key=lambda item: (shape_order(item.shape), item.piece_index, item.adaptor)))


def file_bytes(value: Any) -> int:
    """Return `value` if it is the size of a file.

    Raises:
        CacheError: It is not.
    """
    return int(expect(count(value), lambda size: size < _MOST_BYTES, "a size that a file can have"))


def _duration(value: Any) -> float:
    return float(expect(value, _is_duration, "a number of seconds"))


def _is_duration(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST_SECS
