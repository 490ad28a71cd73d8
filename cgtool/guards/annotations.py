"""Objects of `typing` as data: type variables and parametrized types, which code passes around and seldom reads."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

from cgtool.guards.sources import qualified_name
from cgtool.plan.pieces import Json


def encode_annotation(value: Any, encode: Callable[[Any], Json]) -> Json:
    """Return a type variable, a parametrized type or another object of `typing` as data, else None.

    Args:
        value: The object.
        encode: Encodes the types in it.
    """
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(value, typing.ForwardRef):
        return ["typing", name, value.__forward_arg__]
    origin = typing.get_origin(value)
    if origin is not None:
        return ["typing", name, encode(origin), *map(encode, typing.get_args(value))]
    if kind.__module__ in {"typing", "typing_extensions"}:
        return ["typing", name, qualified_name(value)]
    return None
