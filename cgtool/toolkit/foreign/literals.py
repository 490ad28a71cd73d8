"""One Python literal or one JSON document of a stranger as values: with limits, and never executed. No torch.

The literals are those that `pprint` writes of dictionaries, tuples, lists, texts, numbers, True, False and None::

    value = "None" | "True" | "False" | ["-"] digits | text+ | "(" values ")" | "[" values "]" | "{" pairs or values "}"

with quotes and escapes as `repr` spells them. All of a text is matched to these tokens before `ast.literal_eval` sees
it, so no name, call, operator, comment or escape that the parser would warn of reaches it, and nesting is bounded, for
a deep one could end the process.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from cgtool.errors import CacheError
from cgtool.toolkit.foreign.words import shown

#: An index of vLLM has 400 bytes and about 20 tokens a row.
MOST_BYTES = 8 << 20
MOST_TOKENS = 600_000
MOST_DEPTH = 32
_MOST_DIGITS = 18

_ESCAPE = r"\\(?:['\"\\nrt]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
_TOKEN = re.compile(
    rf"(?P<space>[ \n\r\t]+)|(?P<open>[(\[{{])|(?P<close>[)\]}}])|(?P<mark>[,:])"
    r"|(?P<word>None|True|False)(?![A-Za-z0-9_])"
    rf"|(?P<number>-?[0-9]{{1,{_MOST_DIGITS}}})(?![A-Za-z0-9_.])"
    rf"|(?P<text>'(?:[^'\\\n\r\0]|{_ESCAPE})*'|\"(?:[^\"\\\n\r\0]|{_ESCAPE})*\")"
)
_BEGINS_A_VALUE = frozenset({"open", "word", "number", "text"})
_ENDS_A_VALUE = frozenset({"close", "word", "number", "text"})


class NotLiteralError(CacheError):
    """A text is not the one literal, or the one JSON document, that it should be."""


def parse_literal(data: bytes) -> Any:
    """Return the value of one Python literal.

    Args:
        data: The text in UTF-8.

    Raises:
        NotLiteralError: It is anything else, is torn, or is over a limit.
    """
    text = _text_of(data)
    _check_tokens(text)
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise NotLiteralError(f"it is no whole Python literal ({shown(error)})") from error


def parse_json(data: bytes) -> Any:
    """Return the value of one JSON document.

    Args:
        data: The text in UTF-8.

    Raises:
        NotLiteralError: It is anything else, is torn, or is over a limit.
    """
    text = _text_of(data)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise NotLiteralError(f"it is no whole JSON ({shown(error)})") from error
    if _is_deep(value):
        raise NotLiteralError(f"it is nested more than {MOST_DEPTH} deep")
    return value


def _text_of(data: bytes) -> str:
    if not data:
        raise NotLiteralError("it has zero bytes")
    if len(data) > MOST_BYTES:
        raise NotLiteralError(f"it has {len(data)} bytes, and {MOST_BYTES} are the limit")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotLiteralError("it is no text in UTF-8") from error


def _check_tokens(text: str) -> None:
    position = depth = 0
    before: str | None = None
    for number, match in enumerate(_tokens(text), start=1):
        kind = match.lastgroup
        if kind == "space":
            position = match.end()
            continue
        # A call, a subscript or a sum would be a value right after a value; a chain of them is as deep as it is long.
        if before in _ENDS_A_VALUE and kind in _BEGINS_A_VALUE and (before, kind) != ("text", "text"):
            break
        position = match.end()
        before = kind
        depth += (kind == "open") - (kind == "close")
        if depth > MOST_DEPTH:
            raise NotLiteralError(f"it is nested more than {MOST_DEPTH} deep")
        if number > MOST_TOKENS:
            raise NotLiteralError(f"it has more than {MOST_TOKENS} tokens")
    if position != len(text):
        line = text.count("\n", 0, position) + 1
        raise NotLiteralError(
            f"it is no plain literal: line {line} goes on with {shown(text[position : position + 40])}"
        )
    if before is None or depth != 0:
        raise NotLiteralError("it ends too early")


def _tokens(text: str) -> Iterator[re.Match[str]]:
    match = _TOKEN.match(text)
    while match is not None:
        yield match
        match = _TOKEN.match(text, match.end())


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is no number that can be written again")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True
