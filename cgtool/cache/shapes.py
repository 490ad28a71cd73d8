"""Shapes as the manifest writes them, as text, in order, and for people. Must not import torch.

shape = "general" | size | [start, end] | {dim: size}        sizes are 0 or more; ranges are inclusive, from 1
"""

from __future__ import annotations

from collections.abc import Mapping

from cgtool.cache.checks import wrong
from cgtool.digests import canonical_json
from cgtool.pieces import Json

#: "general", a size, an inclusive (start, end), or sizes by the name of their dimension.
Shape = str | int | tuple[int, int] | Mapping[str, int]

GENERAL = "general"
_GENERAL_TEXT = canonical_json(GENERAL).decode("ascii")


def shape_to_json(shape: Shape) -> Json:
    """Return a shape as JSON."""
    if isinstance(shape, tuple):
        return list(shape)
    return dict(shape) if isinstance(shape, Mapping) else shape


def shape_from_json(data: Json) -> Shape:
    """Return the shape of `data`.

    Raises:
        CacheError: It is none of the forms of a shape.
    """
    if data == GENERAL or _is_size(data):
        return data  # type: ignore[no-any-return]  # checked just now
    if isinstance(data, list) and all(map(_is_size, data)) and data == sorted(data) and data[:1] != [0]:
        match data:
            case [start, end]:
                return start, end
    if isinstance(data, dict) and data and all(map(_is_size, data.values())):
        return dict(data)
    raise wrong('"general", a size, [start, end] or {dimension: size}', data)


def shape_text(shape: Shape) -> str:
    """Return a shape as canonical text: equal for equal shapes, and fit for a dict's key."""
    if isinstance(shape, int):  # the quick way for what nearly all rows have: each load asks once for each row
        return str(shape)
    return _GENERAL_TEXT if shape == GENERAL else canonical_json(shape_to_json(shape)).decode("ascii")


def shape_words(shape: Shape | Json) -> str:
    """Return a shape, or its JSON, for people: "general", "8", "1-16", "batch=4 seq=128"."""
    if isinstance(shape, (list, tuple)):
        return "-".join(map(str, shape))
    if isinstance(shape, Mapping):
        return " ".join(f"{name}={size}" for name, size in shape.items())
    return str(shape)


def shape_order(shape: Shape) -> tuple[int, tuple[int, ...], str]:
    """Return a sort key for shapes: general, then ranges, then sizes, then mappings, each by their numbers."""
    if isinstance(shape, str):
        return 0, (), shape
    if isinstance(shape, int):
        return 2, (shape,), ""
    if isinstance(shape, tuple):
        return 1, shape, ""
    return 3, tuple(shape.values()), shape_text(shape)


def _is_size(data: Json) -> bool:
    return type(data) is int and data >= 0  # 0 has a variant of its own
