"""Checks of the values that a record was read with. Must not import torch.

A record may come from a stranger, so each of its fields is matched to its grammar before anything is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cgtool.errors import CacheError
from cgtool.pieces import Json

_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def wrong(expected: str, actual: Any) -> CacheError:
    """Return the error for a value of a record that is not what the grammar says."""
    return CacheError(f"{actual!r} is not {expected}. Warm the model again.", expected=expected, actual=actual)


def expect(data: Any, holds: Callable[[Any], bool], expected: str) -> Any:
    """Return `data` if it holds what is expected.

    Raises:
        CacheError: It is not.
    """
    if not holds(data):
        raise wrong(expected, data)
    return data


def count(data: Json) -> int:
    """Return `data` if it is a number from 0.

    Raises:
        CacheError: It is not.
    """
    return int(expect(data, lambda value: type(value) is int and value >= 0, "a number from 0"))


def seconds(data: Json) -> float:
    """Return `data` if it is a duration.

    Raises:
        CacheError: It is not.
    """
    return float(expect(data, lambda value: type(value) in (int, float) and value >= 0, "a number of seconds"))


def flag(data: Json) -> bool:
    """Return `data` if it is true or false.

    Raises:
        CacheError: It is not.
    """
    return bool(expect(data, lambda value: isinstance(value, bool), "true or false"))


def text(data: Json) -> str:
    """Return `data` if it is a text.

    Raises:
        CacheError: It is not.
    """
    return str(expect(data, lambda value: isinstance(value, str), "a text"))


def word(data: Json) -> str:
    """Return `data` if it is a plain word.

    Raises:
        CacheError: It is not.
    """
    return str(expect(text(data), lambda value: _WORD.fullmatch(value) is not None, "a plain word"))


def texts(data: Json) -> tuple[str, ...]:
    """Return `data` if it is a list of texts.

    Raises:
        CacheError: It is not.
    """
    return tuple(text(item) for item in expect(data, lambda value: isinstance(value, list), "a list of texts"))
