"""The dynamic dimensions that a user declares: which sizes of which arguments may differ from call to call.

Must not import torch: a hit reads the declaration for its key.
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
    """A named dimension and its inclusive bounds."""

    name: str
    min: int
    max: int | None

    def allows(self, size: int) -> bool:
        """Return whether `size` is within the bounds and can stay symbolic."""
        return size >= max(self.min, FIRST_DYNAMIC) and (self.max is None or size <= self.max)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A parameter of the method, and the index and name of one of its dimensions."""

    parameter: str
    dim: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Dims:
    """All dynamic dimensions of a model, by name and by place."""

    by_name: Mapping[str, DynamicDim]
    places: tuple[Place, ...]

    @classmethod
    def of(cls, dynamic: Any) -> Dims:
        """Parse `DynamicDims`: `{"input_ids": {0: "batch", 1: ("seq", 1, 4096)}}`.

        Raises:
            UsageError: A name, bound or dimension is malformed, or one name has different bounds.
        """
        if not isinstance(dynamic, Mapping):
            msg = f'dynamic must be {{"argument": {{0: "name"}}}}, with the index of each dimension, not {dynamic!r}.'
            raise UsageError(msg, path="dynamic", actual=dynamic)
        by_name: dict[str, DynamicDim] = {}
        places: list[Place] = []
        for parameter, dims in dynamic.items():
            if not isinstance(dims, Mapping):
                msg = f'dynamic[{parameter!r}] must be {{0: "name"}}, with the index of each dimension, not {dims!r}.'
                raise UsageError(msg, path=parameter, actual=dims)
            for dim, spec in dims.items():
                parsed = _parse_dim(parameter, dim, spec)
                known = by_name.get(parsed.name)
                if known is not None and known != parsed and not isinstance(spec, str):
                    if (known.min, known.max) != (1, None):
                        msg = f"The dynamic dimension {parsed.name!r} has two different bounds. Give them once."
                        raise UsageError(msg, path=parameter)
                    by_name[parsed.name] = parsed
                by_name.setdefault(parsed.name, parsed)
                places.append(Place(parameter=parameter, dim=dim, name=parsed.name))
        return cls(by_name=by_name, places=tuple(places))


def _parse_dim(parameter: str, dim: Any, spec: Any) -> DynamicDim:
    parts = (spec,) if isinstance(spec, str) else tuple(spec) if isinstance(spec, (tuple, list)) else ()
    if not 1 <= len(parts) <= 3:  # noqa: PLR2004 - a name, and at most two bounds
        raise _dim_error(parameter, dim, spec)
    name, low, high = parts[0], *(parts[1:2] or (1,)), *(parts[2:] or (None,))
    well_formed = isinstance(name, str) and name.isidentifier() and type(low) is int and type(dim) is int
    if not well_formed or low < 0 or not (high is None or (type(high) is int and high >= low)):
        raise _dim_error(parameter, dim, spec)
    return DynamicDim(name=name, min=low, max=high)


def _dim_error(parameter: str, dim: Any, spec: Any) -> UsageError:
    msg = (
        f"dynamic[{parameter!r}][{dim!r}] is {spec!r}. Use the integer index of a dimension as the key, and its name "
        'or ("name", min, max) with 0 <= min <= max as the value.'
    )
    return UsageError(msg, path=parameter, actual=spec)
