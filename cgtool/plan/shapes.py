"""Shapes: the sizes of dynamic dimensions that an artifact is compiled for. Must not import torch.

A shape names its dimensions, `{dim: [smallest, largest]}`, inclusive. A size is a range of one, and the general shape,
which serves every size, names none. People read and write it as text, in which equal shapes are equal::

    general      num_tokens=8      num_tokens=2-64      batch=1:seq=2-64
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta

from cgtool.plan.grammar import DimName

#: The number of elements along a dimension; a variant of its own serves 0.
Size = Annotated[int, Meta(ge=0, le=2**53)]
Shape = dict[DimName, tuple[Size, Size]]

GENERAL = "general"
_PART = r"(?:(?P<dim>[A-Za-z_]\w{0,63})=)?(?P<low>[0-9]{1,15})(?:-(?P<high>[0-9]{1,15}))?"


def of_sizes(sizes: Mapping[str, int]) -> Shape:
    """Return the shape that fixes each dimension of `sizes`; {} gives the general shape."""
    return {dim: (size, size) for dim, size in sizes.items()}


def is_size(shape: Shape) -> bool:
    """Return whether a shape fixes all dimensions that it names, and names some."""
    return bool(shape) and all(low == high for low, high in shape.values())


def shape_text(shape: Shape) -> str:
    """Return a shape as text, which is equal for equal shapes."""
    parts = [f"{dim}={low}" if low == high else f"{dim}={low}-{high}" for dim, (low, high) in sorted(shape.items())]
    return ":".join(parts) or GENERAL


def shape_order(shape: Shape) -> tuple[int, list[tuple[str, tuple[int, int]]]]:
    """Return a sort key for listings: the general shape, then ranges, then sizes, each by dimension and number."""
    return 0 if not shape else 2 if is_size(shape) else 1, sorted(shape.items())


def distinct_shapes(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """Return shapes each once, in the order of listings."""
    return tuple(sorted({shape_text(shape): shape for shape in shapes}.values(), key=shape_order))


def dispatch_order(shape: Shape) -> tuple[int, int, list[tuple[str, tuple[int, int]]]]:
    """Return a sort key for the choice of an artifact: sizes, then ranges, then the general shape.

    Of two shapes that fit a call, the one that fixes more dimensions was compiled for exactly this.
    """
    fixed = sum(low == high for low, high in shape.values())
    return -fixed, fixed - len(shape), sorted(shape.items())


def joined_ranges(ranges: Iterable[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """Return ranges of sizes in order, those that touch as one; None is no limit."""
    found: list[tuple[int, int | None]] = []
    for low, high in sorted(ranges, key=lambda one: one[0]):
        if found and (found[-1][1] is None or low <= found[-1][1] + 1):
            first, last = found.pop()
            found.append((first, None if last is None or high is None else max(last, high)))
        else:
            found.append((low, high))
    return found


def check_shape(shape: Shape) -> None:
    """Check what the types of a shape do not say.

    Raises:
        ValueError: A range is empty, or starts at 0, whose artifacts serve no other size.
    """
    for dim, (low, high) in shape.items():
        if low > high or (low == 0 and high > 0):
            msg = f"the range {low} to {high} of {dim} is empty or starts at 0"
            raise ValueError(msg)


def parse_shape(text: str) -> dict[str, tuple[int, int]]:
    """Return what a user asks for by a shape's text; a dimension whose name is left out has the name "".

    Raises:
        ValueError: `text` is no shape.
    """
    if text == GENERAL:
        return {}
    parts = [re.fullmatch(_PART, part, re.ASCII) for part in text.split(":")]
    asked = {part["dim"] or "": (int(part["low"]), int(part["high"] or part["low"])) for part in parts if part}
    named_once = len(asked) == len(parts) and (len(parts) == 1 or "" not in asked)
    if not named_once or any(low > high for low, high in asked.values()):
        msg = f"{text!r} is no shape"
        raise ValueError(msg)
    return asked


def is_asked(shape: Shape, asked: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether a user who asked for `asked` means `shape`: a name may be left out where there is but one."""
    return list(shape.values()) == [asked[""]] if "" in asked else shape == asked
