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
    if type(data) is not int or data < 0:
        raise wrong("a number from 0", data)
    return data


def seconds(data: Json) -> float:
    """Return `data` if it is a duration.

    Raises:
        CacheError: It is not.
    """
    if type(data) not in (int, float) or data < 0:
        raise wrong("a number of seconds", data)
    return float(data)


def flag(data: Json) -> bool:
    """Return `data` if it is true or false.

    Raises:
        CacheError: It is not.
    """
    if type(data) is not bool:
        raise wrong("true or false", data)
    return data


def text(data: Json) -> str:
    """Return `data` if it is a text.

    Raises:
        CacheError: It is not.
    """
    if type(data) is not str:
        raise wrong("a text", data)
    return data


def word(data: Json) -> str:
    """Return `data` if it is a plain word.

    Raises:
        CacheError: It is not.
    """
    if _WORD.fullmatch(text(data)) is None:
        raise wrong("a plain word", data)
    return str(data)


def texts(data: Json) -> tuple[str, ...]:
    """Return `data` if it is a list of texts.

    Raises:
        CacheError: It is not.
    """
    if type(data) is not list:
        raise wrong("a list of texts", data)
    return tuple([text(item) for item in data])
