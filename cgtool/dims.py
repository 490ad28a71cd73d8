"""Dynamic dimensions as a user writes them, read: which sizes of which arguments may differ from call to call.

Without torch: a hit reads them for its key, and traces nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cgtool.errors import UsageError

#: The smallest size that Dynamo keeps symbolic.
FIRST_DYNAMIC = 2


@dataclass(frozen=True, kw_only=True)
class DynamicDim:
    """A named dimension and the sizes that it may take, inclusive."""

    name: str
    min: int
    max: int | None

    def allows(self, size: int) -> bool:
        """Return whether it may be of a size that stays symbolic."""
        return size >= max(self.min, FIRST_DYNAMIC) and (self.max is None or size <= self.max)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a named dimension is found: a parameter of the method and one of its dimensions."""

    parameter: str
    dim: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Dims:
    """All dynamic dimensions of a model: by name, and by place."""

    by_name: Mapping[str, DynamicDim]
    places: tuple[Place, ...]

    @classmethod
    def of(cls, dynamic: Any) -> Dims:
        """Read what a user wrote as `DynamicDims`: `{"input_ids": {0: "batch", 1: ("seq", 1, 4096)}}`.

        Raises:
            UsageError: A name, bound or dimension is not of that form, or bounds of one name differ.
        """
        if not isinstance(dynamic, Mapping):
            msg = f'dynamic is {dynamic!r}; write {{"argument": {{0: "name"}}}}, with the index of each dimension.'
            raise UsageError(msg, path="dynamic", actual=dynamic)
        by_name: dict[str, DynamicDim] = {}
        places: list[Place] = []
        for parameter, dims in dynamic.items():
            if not isinstance(dims, Mapping):
                msg = f'dynamic[{parameter!r}] is {dims!r}; write {{0: "name"}}, with the index of each dimension.'
                raise UsageError(msg, path=parameter, actual=dims)
            for dim, spec in dims.items():
                read = _read_dim(parameter, dim, spec)
                known = by_name.get(read.name)
                if known is not None and known != read and not isinstance(spec, str):
                    if (known.min, known.max) != (1, None):
                        msg = f"The dynamic dimension {read.name!r} has two different bounds; give them once."
                        raise UsageError(msg, path=parameter)
                    by_name[read.name] = read
                by_name.setdefault(read.name, read)
                places.append(Place(parameter=parameter, dim=dim, name=read.name))
        return cls(by_name=by_name, places=tuple(places))


def _read_dim(parameter: str, dim: Any, spec: Any) -> DynamicDim:
    parts = (spec,) if isinstance(spec, str) else tuple(spec) if isinstance(spec, (tuple, list)) else ()
    if not 1 <= len(parts) <= 3:  # noqa: PLR2004 - a name, and at most two bounds
        raise _no_dim(parameter, dim, spec)
    name, low, high = parts[0], *(parts[1:2] or (1,)), *(parts[2:] or (None,))
    well_formed = isinstance(name, str) and name.isidentifier() and type(low) is int and type(dim) is int
    if not well_formed or low < 0 or not (high is None or (type(high) is int and high >= low)):
        raise _no_dim(parameter, dim, spec)
    return DynamicDim(name=name, min=low, max=high)


def _no_dim(parameter: str, dim: Any, spec: Any) -> UsageError:
    msg = (
        f"dynamic[{parameter!r}][{dim!r}] is {spec!r}; write a dimension's index and its name, "
        'or ("name", min, max) with 0 <= min <= max.'
    )
    return UsageError(msg, path=parameter, actual=spec)
