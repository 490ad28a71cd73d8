"""Shapes: the sizes of dynamic dimensions that an artifact is compiled for. Must not import torch.

A shape maps dimensions to inclusive ranges, `{dim: [smallest, largest]}`. A size is a range of one number. The general
shape, which covers every size, is empty. Equal shapes have equal text::

    general      num_tokens=8      num_tokens=2-64      batch=1:seq=2-64
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta

from cgtool.plan.grammar import DimName

#: The number of elements along a dimension; a separate variant covers 0.
Size = Annotated[int, Meta(ge=0, le=2**53)]
Shape = dict[DimName, tuple[Size, Size]]

GENERAL = "general"
_PART = r"(?:(?P<dim>[A-Za-z_]\w{0,63})=)?(?P<low>[0-9]{1,15})(?:-(?P<high>[0-9]{1,15}))?"


def of_sizes(sizes: Mapping[str, int]) -> Shape:
    """Return the shape that fixes each dimension of `sizes`; {} gives the general shape."""
    return {dim: (size, size) for dim, size in sizes.items()}


def is_size(shape: Shape) -> bool:
    """Return whether a shape names dimensions and fixes all of them."""
    return bool(shape) and all(low == high for low, high in shape.values())


def shape_text(shape: Shape) -> str:
    """Return the text of a shape."""
    parts = [f"{dim}={low}" if low == high else f"{dim}={low}-{high}" for dim, (low, high) in sorted(shape.items())]
    return ":".join(parts) or GENERAL


def shape_order(shape: Shape) -> tuple[int, list[tuple[str, tuple[int, int]]]]:
    """Return the sort key of listings: the general shape, then ranges, then sizes, each by dimension and number."""
    return 0 if not shape else 2 if is_size(shape) else 1, sorted(shape.items())


def distinct_shapes(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """Return shapes without duplicates, in the order of listings."""
    return tuple(sorted({shape_text(shape): shape for shape in shapes}.values(), key=shape_order))


def dispatch_order(shape: Shape) -> tuple[int, int, list[tuple[str, tuple[int, int]]]]:
    """Return the sort key of dispatch: sizes, then ranges, then the general shape.

    Of the shapes that cover a call, the one that fixes most dimensions is preferred.
    """
    fixed = sum(low == high for low, high in shape.values())
    return -fixed, fixed - len(shape), sorted(shape.items())


def joined_ranges(ranges: Iterable[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """Return ranges of sizes in ascending order, with adjacent and overlapping ones merged; None means no limit."""
    joined: list[tuple[int, int | None]] = []
    for low, high in sorted(ranges, key=lambda bounds: bounds[0]):
        if joined and (joined[-1][1] is None or low <= joined[-1][1] + 1):
            first, last = joined.pop()
            joined.append((first, None if last is None or high is None else max(last, high)))
        else:
            joined.append((low, high))
    return joined


def check_shape(shape: Shape) -> None:
    """Check the ranges of a shape, which its type does not.

    Raises:
        ValueError: A range is empty, or starts at 0 and contains other sizes, which an artifact for 0 does not cover.
    """
    for dim, (low, high) in shape.items():
        if low > high or (low == 0 and high > 0):
            msg = f"the range {low} to {high} of {dim} is empty or starts at 0"
            raise ValueError(msg)


def parse_shape(text: str) -> dict[str, tuple[int, int]]:
    """Parse the text of a shape; a dimension without a name gets the name "".

    Raises:
        ValueError: `text` is malformed.
    """
    if text == GENERAL:
        return {}
    parts = [re.fullmatch(_PART, part, re.ASCII) for part in text.split(":")]
    shape = {part["dim"] or "": (int(part["low"]), int(part["high"] or part["low"])) for part in parts if part}
    are_distinct = len(shape) == len(parts) and (len(parts) == 1 or "" not in shape)
    if not are_distinct or any(low > high for low, high in shape.values()):
        msg = f"{text!r} is not a shape"
        raise ValueError(msg)
    return shape


def shape_matches(shape: Shape, parsed: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether `shape` is the parsed one, in which the name of an only dimension may be missing."""
    return list(shape.values()) == [parsed[""]] if "" in parsed else shape == parsed
